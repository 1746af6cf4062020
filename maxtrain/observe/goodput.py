"""Goodput: the time of a run by cause, over all its launches. RUN/clock.jsonl has a line for each
launch, with seconds by cause.

The line of the current launch is written again every few seconds, so that a launch that is killed
loses only these.
"""

import contextlib
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import StorageError
from data_pipeline.shards import write_atomic
from maxtrain.observe.jsonl_logs import RUN, JsonlLog, encode
from maxtrain.observe.metrics import Stopwatch

FILE_NAME = "clock.jsonl"
CLOCK = JsonlLog(FILE_NAME, {"start": float, "first": int, "step": int, "seconds": dict})


class Ledger:
    """The line of this launch, which began with `first` finished steps; `run` is the run's id."""

    def __init__(self, folder: Path, clock: Stopwatch, first: int, run: str = ""):
        self._path = folder / FILE_NAME
        self._clock = clock
        self._first = first
        self._run = run
        self._start = time.time() - sum(clock.seconds().values())
        self._before = "".join(encode(record) for record in read_clock(folder))

    def write(self, step: int) -> None:
        """Writes the line of this launch, with `step` finished steps. If that fails, for example on
        a full disk, the next call tries again."""
        record = {
            "start": self._start,
            "first": self._first,
            "step": step,
            "seconds": self._clock.seconds(),
        }
        if self._run:
            record[RUN] = self._run
        with contextlib.suppress(OSError, StorageError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self._path, (self._before + encode(record)).encode())


def read_clock(folder: Path) -> list[dict[str, Any]]:
    """The launches of a run in order, as far as they can be read; empty if none was recorded."""
    return [record for record in CLOCK.read(folder) if _are_seconds(record["seconds"])]


def _are_seconds(seconds: dict[str, Any]) -> bool:
    return all(isinstance(spent, int | float) for spent in seconds.values())


def goodput(launches: list[dict[str, Any]]) -> dict[str, float]:
    """Wall seconds by cause from the first launch to the end of the last, which they sum to; the
    largest first.

    `step` is what made steps that count, `lost` the steps (and their waits for data) that a later
    launch made again, `down` the time between launches.
    """
    seconds = defaultdict[str, float](float)
    for launch, after in zip(launches, [*launches[1:], None]):
        for cause, spent in launch["seconds"].items():
            seconds[cause] += spent
        if after:
            again = max(0, launch["step"] - after["first"])
            made = launch["step"] - launch["first"]
            share = 0.0
            if made > 0:
                share = min(1.0, again / made)
            for cause in ("step", "data_wait"):
                lost = launch["seconds"].get(cause, 0.0) * share
                seconds[cause] -= lost
                seconds["lost"] += lost
            seconds["down"] += max(
                0.0, after["start"] - launch["start"] - sum(launch["seconds"].values())
            )
    return {
        cause: spent for cause, spent in sorted(seconds.items(), key=lambda item: -item[1]) if spent
    }
