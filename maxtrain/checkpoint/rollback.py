"""What a run has left out since anomalies took it back, and which checkpoints are of the run that it is now.

RUN/rollbacks.json is a list of {"step", "kind", "left_out": [first, last]}, steps counted from 1, written before anything else
is done about an anomaly. What is left out depends on the step alone, not on the checkpoints there are; so a process that is
killed at any instant afterwards finds here, when it starts again, all that it needs to go on to the same numbers.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import StorageError
from data_pipeline.shards import write_atomic

FILE_NAME = "rollbacks.json"
Rollback = Mapping[str, Any]


def read_rollbacks(run: Path) -> list[Rollback] | None:
    """Those of a run, in their order; None if it has no such file. StorageError: the file is not readable."""
    path = run / FILE_NAME
    try:
        return [{"step": r["step"], "kind": r["kind"], "left_out": r["left_out"]} for r in json.loads(path.read_bytes())]
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        mend = "Restore it, or remove it to go on as the newest checkpoint says"
        raise StorageError(f"{path} is not a list of rollbacks ({error!r}). {mend}.") from error


def write_rollbacks(run: Path, rollbacks: Sequence[Rollback]) -> None:
    """Whole or not at all."""
    write_atomic(run / FILE_NAME, json.dumps(rollbacks, indent=1).encode())


def left_out(rollbacks: Sequence[Rollback]) -> frozenset[int]:
    """The steps that change nothing, counted from 0 as batches are."""
    return frozenset(step - 1 for r in rollbacks for step in range(r["left_out"][0], r["left_out"][1] + 1))


def went_with(record: Mapping[str, Any], rollbacks: Sequence[Rollback] | None) -> bool:
    """Whether the checkpoint of this record left out, of the steps before it, those that the run leaves out; None: yes."""
    theirs, ours = left_out(record.get("rollbacks", ())), left_out(rollbacks or ())
    return rollbacks is None or {s for s in theirs if s < record["step"]} == {s for s in ours if s < record["step"]}
