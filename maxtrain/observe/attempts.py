"""How far a run has come, read from its folder without jax; and RUN/attempts.jsonl, a line for each attempt of a supervisor."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxtrain.observe.metrics import FILE_NAME as METRICS

FILE_NAME = "attempts.jsonl"
_TAIL = 1 << 16  # bytes: more than a record has


def saved_step(folder: Path) -> tuple[int, float]:
    """The newest checkpoint that counts, and when it came to count, in seconds since the epoch; zeros if there is none."""
    commits = [path for path in folder.glob("checkpoints/*/commit.json") if path.parent.name.isdecimal()]
    newest = max(commits, key=lambda path: int(path.parent.name), default=None)
    return (int(newest.parent.name), newest.stat().st_mtime) if newest else (0, 0.0)


def reached_step(folder: Path) -> int:
    """The last step on record or saved."""
    path, steps = folder / METRICS, [saved_step(folder)[0]]
    if path.exists():
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line break is torn
        steps += [json.loads(line)["step"] for line in lines[-1:]]
    return max(steps)


def append_attempt(folder: Path, record: Mapping[str, Any], index: int = 0) -> None:
    """Adds a line; the supervisors of the processes of a job, one a host, have a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / _name(index), "a", encoding="utf-8") as file:
        file.write(json.dumps(record, allow_nan=False) + "\n")
        file.flush()
        os.fsync(file.fileno())


def read_attempts(folder: Path, index: int = 0) -> list[dict[str, Any]]:
    """All attempts in order, without a torn last line; empty if nobody supervised."""
    path = folder / _name(index)
    return [json.loads(line) for line in path.read_text("utf-8").split("\n")[:-1]] if path.exists() else []


def _name(index: int) -> str:
    return FILE_NAME if index == 0 else f"attempts-{index}.jsonl"
