"""`maxtrain status RUN`: how far a run has come, where its time went, what its attempts ended with,
and what changed between its launches. Starts no device."""

import argparse
import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.errors import DataError, run_command
from maxtrain.observe.attempts import attempts as book_of_attempts
from maxtrain.observe.attempts import reached_step, read_attempts, saved_step
from maxtrain.observe.goodput import CLOCK, goodput, read_clock
from maxtrain.observe.launches import LAUNCHES, launch_changes, read_launches
from maxtrain.observe.metrics import read_metrics

_ABOUT = {
    "step": "steps that count",
    "data_wait": "their waits for data",
    "lost": "steps that were made again after a restart",
    "down": "between launches",
    "start": "opening data, starting devices",
    "compile": "compiling, initial weights",
    "eval": "evaluation",
    "save": "waiting for checkpoints",
    "restore": "reading checkpoints",
}
_MOST = 20  # attempts, and launches with changes, that are shown


def status(folder: Path, console: Console) -> None:
    """Prints it.

    Raises:
        DataError: there is no run in this folder.
    """
    launches, attempts = read_clock(folder), read_attempts(folder)
    if not launches and not attempts:
        raise DataError(
            f"{folder} has neither clock.jsonl nor attempts.jsonl. Name the folder of a run, as runs/NAME."
        )
    console.print(
        f"{folder}: step {reached_step(folder):,} on record, step {saved_step(folder)[0]:,} saved"
    )
    seconds = goodput(launches)
    if total := sum(seconds.values()):
        table = Table(box=None)
        for name in ("seconds", "share"):
            table.add_column(name, justify="right")
        table.add_column("of")
        for cause, spent in seconds.items():
            table.add_row(
                f"{spent:,.1f}", f"{spent / total:.1%}", f"{cause}: {_ABOUT.get(cause, cause)}"
            )
        console.print(table)
        count = f"{len(launches)} launches" if len(launches) > 1 else "one launch"
        console.print(
            f"goodput: {seconds.get('step', 0.0) / total:.1%} of {total:,.1f} s in {count}"
        )
    if attempts:
        table = Table(box=None)
        for name in (
            "attempt",
            "processes",
            "began",
            "from step",
            "to step",
            "saved",
            "lost s",
            "ended with",
        ):
            table.add_column(name, justify="left" if name in ("began", "ended with") else "right")
        for a in attempts[-_MOST:]:
            began = datetime.datetime.fromtimestamp(a["start"]).isoformat(" ", "seconds")
            steps = [f"{a[name]:,}" for name in ("from_step", "reached_step", "saved_step")]
            table.add_row(
                str(a["attempt"]),
                str(a.get("processes", 1)),
                began,
                *steps,
                f"{a['lost_seconds']:,.0f}",
                a["reason"],
            )
        console.print(table)
    for line in history(folder)[-_MOST:]:
        console.print(line, soft_wrap=True, markup=False)
    for book in (CLOCK, LAUNCHES, book_of_attempts()):
        for problem in book.problems(folder)[:_MOST]:
            console.print(f"{problem}; left out here", style="yellow", soft_wrap=True, markup=False)


def overview(folder: Path, console: Console) -> None:
    """Prints a line for each run in a folder; those that were launched last come first.

    Raises:
        DataError: there is none.
    """
    runs = [path.parent for path in folder.glob("*/clock.jsonl")]
    if not runs:
        raise DataError(f"{folder}/ has no runs. Name the folder of one: maxtrain status RUN.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("run", "step", "saved", "loss", "launched"):
        table.add_column(
            name,
            justify="right" if name in ("step", "saved", "loss") else "left",
            no_wrap=name != "run",
        )
    starts = {
        run: max((launch["start"] for launch in read_clock(run)), default=0.0) for run in runs
    }
    for run in sorted(runs, key=lambda run: -starts[run]):
        began = (
            datetime.datetime.fromtimestamp(starts[run]).isoformat(" ", "minutes")
            if starts[run]
            else "-"
        )
        table.add_row(
            Text(str(run)),
            f"{reached_step(run):,}",
            f"{saved_step(run)[0]:,}",
            _last_loss(run),
            began,
        )
    console.print(table)


def _last_loss(run: Path) -> str:
    try:
        losses = [
            record["loss"]
            for record in read_metrics(run)
            if record["kind"] == "train" and record["loss"] is not None
        ]
    except (DataError, KeyError):
        return "?"
    return f"{losses[-1]:.4f}" if losses else "-"


def history(folder: Path) -> list[str]:
    """A line for each launch that was not like the one before it: config, versions, devices,
    flags."""
    lines = []
    for before, after in itertools.pairwise(read_launches(folder)):
        changes = [
            f"{name} {old} -> {new}" for name, (old, new) in launch_changes(before, after).items()
        ]
        if changes:
            lines.append(
                f"changed at step {after['step']:,}, {after['time']}: {'; '.join(changes)}"
            )
    return lines


def main(argv: Sequence[str], prog: str) -> int:
    """Prints the status of a run; the exit code."""

    def job() -> None:
        parser = argparse.ArgumentParser(
            prog=prog, description=" ".join((__doc__ or "").partition(": ")[2].split())
        )
        parser.add_argument(
            "run",
            type=Path,
            metavar="RUN",
            nargs="?",
            help="folder of a run; without it, those of runs/ are listed",
        )
        run, console = parser.parse_args(argv).run, Console(highlight=False)
        status(run, console) if run else overview(Path("runs"), console)

    return run_command(job, resumes=False)
