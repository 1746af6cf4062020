"""Progress of a run, read from its folder without jax; and RUN/attempts.jsonl, with a line for each
attempt of a supervisor.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from maxtrain.observe.jsonl_logs import JsonlLog, encode
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
# Bytes at the end of a file that hold its last record: more than a record has.
_TAIL = 1 << 16


def saved_step(folder: Path, local: Path | None = None) -> tuple[int, float]:
    """The step of the newest committed checkpoint, and the time of its commit in seconds since the
    epoch; zeros if there is none.

    Args:
        local: where this host has parts of checkpoints that are not uploaded; None: nowhere.
    """
    newest = None
    step = 0
    places = [*folder.glob("checkpoints/*/commit.json")]
    if local is not None:
        places += local.glob("*/*/commit.json")
    for path in places:
        if not path.parent.name.isdecimal():
            continue
        if newest is None or int(path.parent.name) > step:
            newest = path
            step = int(path.parent.name)
    if newest is None:
        return 0, 0.0
    return step, newest.stat().st_mtime


def reached_step(folder: Path) -> int:
    """The last step on record or saved."""
    saved, _ = saved_step(folder)
    path = folder / METRICS
    if not path.exists():
        return saved
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - _TAIL))
        # What follows the last line break is torn.
        lines = file.read().split(b"\n")[:-1]
    if not lines:
        return saved
    try:
        recorded = int(strict_json.loads(lines[-1])["step"])
    except (ValueError, KeyError, TypeError):
        # A damaged record is an error only for those who need its numbers.
        return saved
    return max(saved, recorded)


def _privately(path: str, flags: int) -> int:
    """Opens a file that nobody else may read, since commands are in it; none that a link names."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def append_attempt(folder: Path, record: Mapping[str, Any], index: int = 0) -> None:
    """Adds a line; the supervisors of the processes of a job, one a host, have a file each."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / attempts(index).name
    line = encode(record)
    # A supervisor that was killed may have left a line without its end.
    if path.exists() and path.read_bytes()[-1:] not in (b"", b"\n"):
        line = "\n" + line
    with open(path, "a", encoding="utf-8", opener=_privately) as file:
        file.write(line)
        file.flush()
        os.fsync(file.fileno())


def read_attempts(folder: Path, index: int = 0) -> list[dict[str, Any]]:
    """All attempts in order, as far as they can be read; empty without a supervisor."""
    return attempts(index).read(folder)


def attempts(index: int = 0) -> JsonlLog:
    """The book of the supervisor with this number."""
    name = FILE_NAME
    if index != 0:
        name = f"attempts-{index}.jsonl"
    return JsonlLog(name, _FIELDS)
