"""Where the time of a run went, over all its launches: RUN/clock.jsonl has a line for each, with seconds by cause.

The line of the launch that runs is written anew every few seconds: one that is killed loses no more than these.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from data_pipeline.shards import write_atomic
from maxtrain.observe.metrics import Stopwatch

FILE_NAME = "clock.jsonl"


class Ledger:
    """The line of this launch, which began with `first` finished steps."""

    def __init__(self, folder: Path, clock: Stopwatch, first: int):
        self._path, self._clock, self._first = folder / FILE_NAME, clock, first
        self._start = time.time() - sum(clock.seconds().values())
        self._before = b"".join(_line(record) for record in read_clock(folder))

    def write(self, step: int) -> None:
        """What is known now, with `step` finished steps."""
        record = {"start": self._start, "first": self._first, "step": step, "seconds": self._clock.seconds()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._path, self._before + _line(record))


def read_clock(folder: Path) -> list[dict[str, Any]]:
    """The launches of a run in order; empty if none was recorded."""
    path = folder / FILE_NAME
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def goodput(launches: list[dict[str, Any]]) -> dict[str, float]:
    """Wall seconds by cause from the first launch to the end of the last, which they sum to; the largest first.

    `step` is what made steps that count, `lost` the steps (and their waits for data) that a later launch made again, `down`
    the time between launches.
    """
    seconds = defaultdict[str, float](float)
    for launch, after in zip(launches, [*launches[1:], None]):
        for cause, spent in launch["seconds"].items():
            seconds[cause] += spent
        if after:
            again, made = max(0, launch["step"] - after["first"]), launch["step"] - launch["first"]
            share = min(1.0, again / made) if made > 0 else 0.0
            for cause in ("step", "data_wait"):
                lost = launch["seconds"].get(cause, 0.0) * share
                seconds[cause] -= lost
                seconds["lost"] += lost
            seconds["down"] += max(0.0, after["start"] - launch["start"] - sum(launch["seconds"].values()))
    return {cause: spent for cause, spent in sorted(seconds.items(), key=lambda item: -item[1]) if spent}


def _line(record: dict[str, Any]) -> bytes:
    return json.dumps(record, allow_nan=False).encode() + b"\n"
