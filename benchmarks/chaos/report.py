"""Results of trials: the faults that were tried, how many of them failed, and the file of
results.
"""

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
from maxtrain.observe.launches import git_revision

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "reliability.md"
HEAD = """# What runs survive

Tables of `python -m benchmarks.chaos FAULT --write`, each with its number of trials n. Where
nothing failed, 3 / n is the 95 % upper bound of the probability of a failure. A failure is: a
number that differs from the undisturbed run's in any bit, a lost checkpoint, more lost work than
promised, unnoticed damage, or an exit code or a message other than the promised one.
"""


@dataclasses.dataclass
class Tally:
    """Trials of one kind of fault. `rows` are (what, trials, failures); `notes` are paragraphs
    below the table."""

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
        """Let SIGINT and SIGTERM finish the current trial and begin no other; the table then has
        fewer trials.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)

    def _stop(self, number: int, frame: object) -> None:
        self._stopped = True

    def done(self) -> bool:
        """Return whether there were enough trials, or no time is left."""
        return (
            self._stopped
            or self.trials >= self.wanted
            or time.monotonic() - self._began > 60 * self.minutes
        )

    def count(self, problem: str = "", what: str = "") -> None:
        """One trial, with what went wrong in it (empty: nothing), and what it was."""
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
            bound = ""
            if trials >= 10 and not failures:
                bound = f"{3 / trials:.2%}"
            lines.append(f"| {what} | {trials:,} | {failures} | {bound} |")
        failed = [f"* failed: {problem}" for problem in self.failures[:20]]
        return "\n".join([*lines, "", *(f"{note}\n" for note in self.notes), *failed]).rstrip()


def quantile(values: list[float], share: float) -> float:
    """The smallest value that is at least as large as this share of the values."""
    index = min(len(values) - 1, int(share * len(values)))
    return sorted(values)[index]


def failure(where: str, problems: list[str]) -> str:
    """A line about what went wrong; empty: nothing did."""
    if not problems:
        return ""
    return f"{where}: {'; '.join(problems)}"


def write(section: str, text: str, command: str, load: float) -> None:
    """Replaces a section of the file of results, or adds it."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jax", "orbax-checkpoint"))
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d")
    cores = os.cpu_count() or 1
    busy = f"load {load:.1f} before it began"
    if load > cores / 2:
        busy = f"THE MACHINE WAS BUSY ({busy}): its times say little"
    python = f"Python {platform.python_version()}"
    code = ""
    if revision := git_revision(ROOT):
        code = f", commit {revision[:12]}{revision[40:]}"
    where = f"{cores} cores of {processor()}, {python}, {packages}, {now}{code}; {busy}."
    old = HEAD
    if RESULTS.exists():
        old = RESULTS.read_text("utf-8")
    sections = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", old, re.MULTILINE | re.DOTALL))
    sections[section] = f"\n`{command}`\n{where}\n\n{text}\n"
    head = re.split(r"^## ", old, maxsplit=1, flags=re.MULTILINE)[0].rstrip()
    parts = [f"## {name}\n{content.rstrip()}" for name, content in sections.items()]
    RESULTS.write_text("\n\n".join([head, *parts]) + "\n", encoding="utf-8")
