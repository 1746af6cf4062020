"""`maxtrain status RUN`: how far a run has come, how it spent its time, what its attempts ended
with, and what changed between its launches. Starts no device."""

import argparse
import datetime
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DataError, run_command
from maxtrain.observe.attempts import attempts as book_of_attempts
from maxtrain.observe.attempts import reached_step, read_attempts, saved_step
from maxtrain.observe.goodput import CLOCK, goodput, read_clock
from maxtrain.observe.launches import LAUNCHES, launch_changes, read_launches
from maxtrain.observe.metrics import read_metrics
from maxtrain.storage.reading import readable
from maxtrain.trainer.forks import origins_of
from maxtrain.trainer.run_dir import require_run

_ABOUT = {
    "step": "steps that count",
    "data_wait": "their waits for data",
    "rollout": "completions, rewards and their log-probabilities",
    "lost": "steps that were made again after a restart",
    "down": "between launches",
    "start": "opening data, starting devices",
    "compile": "compiling, initial weights",
    "eval": "evaluation",
    "save": "waiting for checkpoints",
    "restore": "reading checkpoints",
    "profile": "starting and writing a trace",
}
# Attempts, and launches with changes, that are shown.
_MOST = 20


def status(folder: Path, console: Console, name: str = "") -> None:
    """Prints it.

    Args:
        folder: of the run, on this machine.
        console: to print on.
        name: what to call the run; empty: by its folder.

    Raises:
        UsageError: there is no run in this folder.
        DataError: the run has no record of its time yet.
    """
    require_run(folder, name)
    launches = read_clock(folder)
    attempts = read_attempts(folder)
    origins = origins_of(folder)
    if not launches and not attempts and not origins:
        raise DataError(
            f"{name or folder} has neither {CLOCK.name} nor attempts.jsonl, so nothing is known of "
            "its time. Name a run that has begun to train."
        )
    saved, _ = saved_step(folder)
    reached = reached_step(folder)
    console.print(f"{name or folder}: step {reached:,} on record, step {saved:,} saved")
    for origin in reversed(origins):
        console.print(
            f"forked from {origin.place} at step {origin.step:,} (run {origin.run})",
            soft_wrap=True,
            markup=False,
        )
    _print_goodput(launches, console)
    if attempts:
        console.print(_table_of_attempts(attempts[-_MOST:]))
    for line in history(folder)[-_MOST:]:
        console.print(line, soft_wrap=True, markup=False)
    for book in (CLOCK, LAUNCHES, book_of_attempts()):
        for problem in book.problems(folder)[:_MOST]:
            console.print(f"{problem}; left out here", style="yellow", soft_wrap=True, markup=False)


def _print_goodput(launches: list[dict[str, Any]], console: Console) -> None:
    """Print where the time of all launches went."""
    seconds = goodput(launches)
    total = sum(seconds.values())
    if not total:
        return
    table = Table(box=None)
    for name in ("seconds", "share"):
        table.add_column(name, justify="right")
    table.add_column("of")
    for cause, spent in seconds.items():
        what = f"{cause}: {_ABOUT.get(cause, cause)}"
        table.add_row(f"{spent:,.1f}", f"{spent / total:.1%}", what)
    console.print(table)
    count = "one launch"
    if len(launches) > 1:
        count = f"{len(launches)} launches"
    share = seconds.get("step", 0.0) / total
    console.print(f"goodput: {share:.1%} of {total:,.1f} s in {count}")


def _table_of_attempts(attempts: list[dict[str, Any]]) -> Table:
    table = Table(box=None)
    for name in ("attempt", "processes"):
        table.add_column(name, justify="right")
    table.add_column("began")
    for name in ("from step", "to step", "saved", "lost s"):
        table.add_column(name, justify="right")
    table.add_column("ended with")
    for attempt in attempts:
        table.add_row(
            str(attempt["attempt"]),
            str(attempt.get("processes", 1)),
            datetime.datetime.fromtimestamp(attempt["start"]).isoformat(" ", "seconds"),
            f"{attempt['from_step']:,}",
            f"{attempt['reached_step']:,}",
            f"{attempt['saved_step']:,}",
            f"{attempt['lost_seconds']:,.0f}",
            attempt["reason"],
        )
    return table


def overview(folder: Path, console: Console) -> None:
    """Prints a line for each run in a folder; those that were launched last come first.

    Raises:
        DataError: there is none.
    """
    # A copy of a run that was not launched yet has its launches, but no time of its own.
    runs = {
        path.parent for name in ("clock", "launches") for path in folder.glob(f"*/{name}.jsonl")
    }
    if not runs:
        raise DataError(f"{folder}/ has no runs. Name the folder of one: maxtrain status RUN.")
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("run")
    for name in ("step", "saved", "loss"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("launched", no_wrap=True)
    starts = {}
    for run in runs:
        starts[run] = max((launch["start"] for launch in read_clock(run)), default=0.0)
    for run in sorted(runs, key=lambda run: -starts[run]):
        began = "-"
        if starts[run]:
            began = datetime.datetime.fromtimestamp(starts[run]).isoformat(" ", "minutes")
        reached = f"{reached_step(run):,}"
        saved, _ = saved_step(run)
        table.add_row(Text(str(run)), reached, f"{saved:,}", _last_loss(run), began)
    console.print(table)


def _last_loss(run: Path) -> str:
    """The loss on record last; ? if the records can't be read."""
    losses = []
    try:
        for record in read_metrics(run):
            if record["kind"] == "train" and record["loss"] is not None:
                losses.append(record["loss"])
    except (DataError, KeyError):
        return "?"
    if not losses:
        return "-"
    return f"{losses[-1]:.4f}"


def history(folder: Path) -> list[str]:
    """Return a line for each launch that differed from the one before it.

    A line names changes of config, versions, devices and flags.
    """
    lines = []
    for before, after in itertools.pairwise(read_launches(folder)):
        changes = []
        for name, (old, new) in launch_changes(before, after).items():
            what = name
            if name == "data":
                # The plan is another one if only the number of steps is.
                what = "digest of the data plan"
            changes.append(f"{what} {old} -> {new}")
        if changes:
            what = "; ".join(changes)
            lines.append(f"changed at step {after['step']:,}, {after['time']}: {what}")
    return lines


def main(argv: Sequence[str], prog: str = "maxtrain status") -> int:
    """Prints the status of a run; the exit code."""

    def job() -> None:
        _, _, about = (__doc__ or "").partition(": ")
        parser = argparse.ArgumentParser(prog=prog, description=" ".join(about.split()))
        parser.add_argument(
            "run",
            metavar="RUN",
            nargs="?",
            help="folder or URL of a run; without it, those of runs/ are listed",
        )
        run = parser.parse_args(argv).run
        console = SafeConsole()
        if run:
            status(readable(run), console, run)
        else:
            overview(Path("runs"), console)

    return run_command(job, resumes=False)
