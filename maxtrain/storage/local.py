"""The folder on the disk of a host where a run behind a URL keeps steps between uploads, and which
of them the run can go on from.

    LOCAL/s3/BUCKET/.../RUN/0/    of the first process on this host; 1, 2, ... of others
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import LockedError, StorageError
from maxtrain.checkpoint.local import LocalSteps
from maxtrain.checkpoint.rollback import Rollback
from maxtrain.checkpoint.run_state import RunState
from maxtrain.observe.lock import RunLock
from maxtrain.observe.metrics import has_records


@contextlib.contextmanager
def open_local(
    place: Path | None, keep: int, before_commit: Callable[[], object]
) -> Iterator[LocalSteps | None]:
    """The steps on the disk of this host, locked meanwhile; None: `place` is None.

    A process takes the first folder that no other one has: which number it has in its job may be
    another one at the next launch.

    Args:
        place: of the run on this host.
        keep, before_commit: as of LocalSteps.

    Raises:
        StorageError: the folder can't be made, or locked.
    """
    if place is None:
        yield None
        return
    with contextlib.ExitStack() as held:
        folder = _first_free(place, held)
        yield LocalSteps(folder, keep, before_commit)


def _first_free(place: Path, held: contextlib.ExitStack) -> Path:
    try:
        place.mkdir(parents=True, exist_ok=True)
        number = 0
        while True:
            folder = place / str(number)
            folder.mkdir(exist_ok=True)
            try:
                held.enter_context(RunLock(folder))
                return folder
            except LockedError:
                number += 1
    except (OSError, StorageError) as error:
        why = error
        if isinstance(error, OSError):
            why = error.strerror
        raise StorageError(
            f"checkpoint.local: {place} can't be written ({why}). "
            "Set checkpoint.local to a directory that this host can write to."
        ) from error


def why_not(
    record: dict[str, Any], run: Path, run_id: str, rollbacks: Sequence[Rollback] | None
) -> str:
    """Why a run can't go on from a step on the disk of a host; empty if it can.

    A host may have been away, and the run may have gone on without it since; and a run may have
    been removed at its URL, and begun again by the same name.

    Args:
        record: of the step.
        run: the folder of the run, as it is at the URL.
        run_id: its id.
        rollbacks: its rollbacks.
    """
    saved = RunState.from_record(record)
    if not run_id or saved.run != run_id:
        return f"it is of another run, {saved.run}"
    if not saved.went_with(rollbacks):
        return "the run has gone back behind it"
    if saved.recorder.log is not None and not has_records(run, saved.recorder.log):
        return "the records at the URL are not those before it: the run has gone on without it"
    return ""
