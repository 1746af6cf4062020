"""Record of the steps that a run left out after anomalies took it back, and of the checkpoints that
still belong to it.

RUN/rollbacks.json has the id of the run and a list of {"step", "kind", "left_out": [first, last]},
steps counted from 1. It is written before anything else is done about an anomaly. What is left out
depends on the step alone, not on the checkpoints there are; so a process that is killed at any
instant afterwards finds here, when it starts again, all that it needs to go on to the same numbers.
Later checkpoints are removed by what it says: so a file of another run, or one that nobody can have
meant, is refused.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import StorageError
from data_pipeline.shards import write_atomic

FILE_NAME = "rollbacks.json"
# Steps of one rollback.
_MOST_LEFT_OUT = 1_000_000
Rollback = Mapping[str, Any]


def read_rollbacks(run: Path) -> list[Rollback] | None:
    """Return the rollbacks of a run, in their order; None if it has no such file.

    StorageError: the file is not readable.
    """
    found = _read(run)
    if found is None:
        return None
    _, rollbacks = found
    return rollbacks


def owner(run: Path) -> str | None:
    """The id of the run that the file is of; None if there is no file.

    StorageError: it is not readable.
    """
    found = _read(run)
    if found is None:
        return None
    run_id, _ = found
    return run_id


def _read(run: Path) -> tuple[str, list[Rollback]] | None:
    """The id of the run, and its rollbacks; None if there is no such file."""
    path = run / FILE_NAME
    try:
        content = strict_json.read(path)
        return str(content["run"]), [check_rollback(entry) for entry in content["rollbacks"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = str(error) or repr(error)
        if isinstance(error, OSError):
            what = error.strerror
        fix = "Restore it, or remove it to go on as the newest checkpoint says"
        raise StorageError(f"{path} is not a list of rollbacks ({what}). {fix}.") from error


def check_rollback(entry: Any) -> Rollback:
    """One entry, with the fields that count; ValueError: it can't be meant."""
    step = entry["step"]
    kind = entry["kind"]
    left = entry["left_out"]
    is_pair = isinstance(left, list) and len(left) == 2
    if not is_pair or not all(type(number) is int for number in (step, *left)):
        raise ValueError(
            "step and left_out must be whole numbers, as in 18 and [16, 18], "
            f"not {step!r:.40} and {left!r:.60}"
        )
    first, last = left
    if not 1 <= first <= last or last - first >= _MOST_LEFT_OUT:
        raise ValueError(
            f"left_out={left} must go up from 1 or more, over at most {_MOST_LEFT_OUT:,} steps"
        )
    return {"step": step, "kind": str(kind), "left_out": [first, last]}


def write_rollbacks(run: Path, rollbacks: Sequence[Rollback], run_id: str) -> None:
    """Whole or not at all."""
    content = {"run": run_id, "rollbacks": list(rollbacks)}
    write_atomic(run / FILE_NAME, json.dumps(content, indent=1).encode())


def left_out(rollbacks: Sequence[Rollback]) -> frozenset[int]:
    """The steps that change nothing, counted from 0 as batches are."""
    steps: set[int] = set()
    for rollback in rollbacks:
        first, last = rollback["left_out"]
        steps.update(range(first - 1, last))
    return frozenset(steps)


def same_left_out(theirs: Sequence[Rollback], ours: Sequence[Rollback], step: int) -> bool:
    """Return whether both leave out the same of the first `step` steps."""
    out_of_theirs = {left for left in left_out(theirs) if left < step}
    out_of_ours = {left for left in left_out(ours) if left < step}
    return out_of_theirs == out_of_ours
