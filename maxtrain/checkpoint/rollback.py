"""What a run has left out since anomalies took it back, and which checkpoints are of the run that
it is now.

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

from data_pipeline import strict_json
from data_pipeline.errors import StorageError
from data_pipeline.shards import write_atomic

FILE_NAME = "rollbacks.json"
_MOST_LEFT_OUT = 1_000_000  # steps of one rollback
Rollback = Mapping[str, Any]


def read_rollbacks(run: Path) -> list[Rollback] | None:
    """Those of a run, in their order; None if it has no such file. StorageError: the file is not
    readable."""
    found = _read(run)
    return None if found is None else found[1]


def owner(run: Path) -> str | None:
    """The id of the run that the file is of; empty if it does not say, None if there is no such
    file.

    StorageError: it is not readable.
    """
    found = _read(run)
    return None if found is None else found[0]


def _read(run: Path) -> tuple[str, list[Rollback]] | None:
    path = run / FILE_NAME
    try:
        content = strict_json.loads(path.read_bytes())
        if isinstance(content, list):  # by an older version
            content = {"run": "", "rollbacks": content}
        return str(content["run"]), [check_rollback(entry) for entry in content["rollbacks"]]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        what = error.strerror if isinstance(error, OSError) else str(error) or repr(error)
        mend = "Restore it, or remove it to go on as the newest checkpoint says"
        raise StorageError(f"{path} is not a list of rollbacks ({what}). {mend}.") from error


def check_rollback(entry: Any) -> Rollback:
    """One entry, with the fields that count; ValueError: it can't be meant."""
    step, kind, left = entry["step"], entry["kind"], entry["left_out"]
    if (
        not isinstance(left, list)
        or len(left) != 2
        or not all(type(number) is int for number in (step, *left))
    ):
        raise ValueError(
            f"step and left_out must be whole numbers, as in 18 and [16, 18], not {step!r:.40} and {left!r:.60}"
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
    return frozenset(
        step - 1 for r in rollbacks for step in range(r["left_out"][0], r["left_out"][1] + 1)
    )


def went_with(record: Mapping[str, Any], rollbacks: Sequence[Rollback] | None) -> bool:
    """Whether the checkpoint of this record left out, of the steps before it, those that the run
    leaves out; None: yes."""
    theirs, ours = left_out(record.get("rollbacks", ())), left_out(rollbacks or ())
    return rollbacks is None or {s for s in theirs if s < record["step"]} == {
        s for s in ours if s < record["step"]
    }
