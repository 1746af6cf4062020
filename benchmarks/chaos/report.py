"""What faults were tried, how many went wrong, and the file that says so."""

import dataclasses
import datetime
import os
import platform
import re
import signal
import sys
import time
from importlib.metadata import version
from pathlib import Path

from benchmarks.one_core import processor

RESULTS = Path(__file__).parents[1] / "results" / "reliability.md"
HEAD = """# What runs survive

Tables of `python -m benchmarks.chaos FAULT --write`, each with its number of trials and, where nothing failed, the 95 % upper
bound of the chance of a failure that this allows, 3 / n. A failure is: a number that differs from the undisturbed run's in any
bit, a checkpoint lost, more work lost than promised, damage unnoticed, or an exit code or message that is not the promised one.
"""


@dataclasses.dataclass
class Tally:
    """Trials of one kind of fault. `rows` are (what, trials, failures), `notes` paragraphs below
    the table."""

    name: str
    wanted: int
    minutes: float = float("inf")
    trials: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    rows: list[tuple[str, int, int]] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    _began: float = dataclasses.field(default_factory=time.monotonic)
    _told: float = 0.0
    _stopped: bool = False

    def stop_when_asked(self) -> None:
        """From now on SIGINT and SIGTERM end the trials after the one under way: the table is of
        those that were made."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: setattr(self, "_stopped", True))

    def done(self) -> bool:
        """Whether there were enough trials, or is no time left."""
        return (
            self._stopped
            or self.trials >= self.wanted
            or time.monotonic() - self._began > 60 * self.minutes
        )

    def count(self, problem: str = "", what: str = "") -> None:
        """One trial; empty: all is well."""
        self.trials += 1
        if problem:
            self.fail(problem)
        if time.monotonic() - self._told > 10 or self.done():
            self._told = time.monotonic()
            self.tell(
                f"{self.trials:,} of {self.wanted:,}, {len(self.failures)} failed; the last: {what}"
            )

    def fail(self, problem: str) -> None:
        self.failures.append(problem)
        self.tell(f"FAILED: {problem}")

    def tell(self, text: str) -> None:
        print(f"{time.strftime('%T')} {self.name}: {text}", file=sys.stderr, flush=True)

    def text(self) -> str:
        """Markdown."""
        lines = ["| fault | trials | failures | 95 % upper bound |", "|:--|--:|--:|--:|"]
        for what, trials, failures in self.rows:
            bound = f"{3 / trials:.2%}" if trials >= 10 and not failures else ""
            lines.append(f"| {what} | {trials:,} | {failures} | {bound} |")
        failed = [f"* failed: {problem}" for problem in self.failures[:20]]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes), *failed]).rstrip()


def quantile(values: list[float], share: float) -> float:
    """The smallest value that so many are not above."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def write(section: str, text: str, command: str, load: float) -> None:
    """Puts a section into the file of results, in the place of the one before."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint"))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    cores = os.cpu_count() or 1
    before = f"load {load:.1f} before it began"
    busy = f"THE MACHINE WAS BUSY ({before}): its times say little" if load > cores / 2 else before
    where = f"{cores} cores of {processor()}, Python {platform.python_version()}, {packages}, {now}; {busy}."
    old = RESULTS.read_text("utf-8") if RESULTS.exists() else HEAD
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", old, re.MULTILINE | re.DOTALL))
    sections[section] = f"\n`{command}`\n{where}\n\n{text}\n\n"
    head = re.split(r"^## ", old, maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    body = "".join(f"## {name}\n{content}" for name, content in sections.items()).rstrip()
    RESULTS.write_text(f"{head}\n\n{body}\n", encoding="utf-8")
