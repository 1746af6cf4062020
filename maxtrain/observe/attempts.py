"""How far a run has come, read from its folder without jax; and RUN/attempts.jsonl, a line for each
attempt of a supervisor."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline import strict_json
from maxtrain.observe.books import Book, encode
from maxtrain.observe.metrics import FILE_NAME as METRICS

FILE_NAME = "attempts.jsonl"
_FIELDS = {
    "attempt": int,
    "start": float,
    "reason": str,
    "from_step": int,
    "reached_step": int,
    "saved_step": int,
    "lost_seconds": float,
}
_TAIL = 1 << 16  # bytes: more than a record has


def saved_step(folder: Path) -> tuple[int, float]:
    """The newest checkpoint that counts, and when it came to count, in seconds since the epoch;
    zeros if there is none."""
    commits = [
        path for path in folder.glob("checkpoints/*/commit.json") if path.parent.name.isdecimal()
    ]
    newest = max(commits, key=lambda path: int(path.parent.name), default=None)
    return (int(newest.parent.name), newest.stat().st_mtime) if newest else (0, 0.0)


def reached_step(folder: Path) -> int:
    """The last step on record or saved."""
    path, steps = folder / METRICS, [saved_step(folder)[0]]
    if path.exists():
        with open(path, "rb") as file:
            file.seek(max(0, path.stat().st_size - _TAIL))
            lines = file.read().split(b"\n")[:-1]  # what follows the last line break is torn
        for line in lines[-1:]:
            with contextlib.suppress(
                ValueError, KeyError, TypeError
            ):  # it is judged by whoever needs its numbers
                steps.append(int(strict_json.loads(line)["step"]))
    return max(steps)


def append_attempt(folder: Path, record: Mapping[str, Any], index: int = 0) -> None:
    """Adds a line; the supervisors of the processes of a job, one a host, have a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / attempts(index).name
    is_torn = path.exists() and path.read_bytes()[-1:] not in (
        b"",
        b"\n",
    )  # by a supervisor that was killed
    with open(path, "a", encoding="utf-8") as file:
        file.write(("\n" if is_torn else "") + encode(record))
        file.flush()
        os.fsync(file.fileno())


def read_attempts(folder: Path, index: int = 0) -> list[dict[str, Any]]:
    """All attempts in order, as far as they can be read; empty if nobody supervised."""
    return attempts(index).read(folder)


def attempts(index: int = 0) -> Book:
    """The book of the supervisor with this number."""
    return Book(FILE_NAME if index == 0 else f"attempts-{index}.jsonl", _FIELDS)
