"""List of the steps in a directory, and perhaps in a second one, with their records.

Needs no device.
"""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import StorageError, UserError
from maxtrain.checkpoint.frozen_params import all_arrays
from maxtrain.checkpoint.integrity import RECORD, damaged, read_commit, survey
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config.schema import CheckpointConfig


def second_of(directory: Path, config: CheckpointConfig) -> Path | None:
    """Return where the steps of RUN/checkpoints are copied to: COPY_TO/RUN/checkpoints; None:
    nowhere.

    Raises:
        StorageError: COPY_TO is not there, and the run has no step yet: perhaps it has some there.
    """
    if config.copy_to is None:
        return None
    root = Path(config.copy_to).expanduser().absolute()
    if not root.is_dir():
        problem = (
            f"checkpoint.copy_to={config.copy_to} is no directory here. "
            "Mount or make it, or set another one"
        )
        if not complete(directory):
            raise StorageError(f"{problem}: the run may have checkpoints there to go on from.")
        warning = f"WARNING: {problem}; meanwhile the run goes on from {directory}."
        print(warning, file=sys.stderr, flush=True)
    return root / directory.parent.name / directory.name


def complete(
    directory: Path, second: Path | None = None, also: Mapping[int, Path] | None = None
) -> dict[int, Path]:
    """The complete steps by number, ascending.

    Of a step that is in both directories, the one in the first counts. `also` has those that are
    known to be elsewhere, and count if they are in neither.
    """
    found = dict(also or {})
    places = [directory]
    if second:
        places = [second, directory]
    for place in places:
        for step, why in survey(place).items():
            if not why:
                found[step] = place / f"{step:08d}"
    return dict(sorted(found.items()))


def latest_record(
    directory: Path,
    accept: Callable[[dict[str, Any]], bool] | None = None,
    second: Path | None = None,
    also: Mapping[int, Path] | None = None,
) -> dict[str, Any] | None:
    """The record of the newest complete checkpoint below a directory, or a second one.

    Args:
        accept: says whether a record will do; None: every one will.
        also: as of `complete`.

    Returns:
        None if there is no such checkpoint.

    Raises:
        StorageError: one can't be read, or there are only damaged ones: starting afresh would hide
            that.
    """
    directory = directory.expanduser()
    for path in reversed(complete(directory, second, also).values()):
        record = read_record(path)
        if accept is None or accept(record):
            return record
    bad = damaged(directory)
    if second:
        bad += damaged(second)
    if bad:
        lines = "".join(f"\n  {path}" for path in bad[:20])
        fix = "Copy a good one there, or start afresh with another run_name"
        raise StorageError(
            f"{directory} has no checkpoint to go on from, only damaged ones:{lines}\n{fix}."
        )
    return None


def saved_steps(directory: Path) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """Return what `read_step` gives for all complete checkpoints below a directory, by step.

    Frozen arrays are among the others. One that a training removes meanwhile is passed over.
    StorageError: one can't be read.
    """
    found = {}
    for step, path in complete(directory.expanduser()).items():
        try:
            commit, record = read_step(path)
            found[step] = (commit | {"arrays": all_arrays(path, commit)}, record)
        except StorageError:
            if path.exists():
                raise
    return found


def saved_digests(directory: Path) -> dict[int, dict[str, str]]:
    """The digests of all arrays by name, of each complete checkpoint below a directory.

    By step, ascending; a checkpoint without digests is left out.
    """
    found = {}
    for step, (commit, _) in saved_steps(directory).items():
        digests = array_digests(commit)
        if digests:
            found[step] = digests
    return found


def array_digests(commit: dict[str, Any]) -> dict[str, str]:
    """The digest that each array was saved with, by its name."""
    return {name: array["digest"] for name, array in commit["arrays"].items()}


def latest_state(
    directory: Path,
    accept: Callable[[RunState], bool] | None = None,
    second: Path | None = None,
    also: Mapping[int, Path] | None = None,
) -> RunState | None:
    """The run at its newest complete checkpoint; arguments and errors as of `latest_record`."""

    def will_do(record: dict[str, Any]) -> bool:
        return accept is None or accept(RunState.from_record(record))

    record = latest_record(directory, will_do, second, also)
    if record is None:
        return None
    return RunState.from_record(record)


def read_record(path: Path) -> dict[str, Any]:
    """Return what the caller saved beside the arrays of a step."""
    return read_step(path)[1]


def read_step(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The commit record of a step, and what the caller saved beside the arrays."""
    with as_storage_error(f"reading {path}", "Check the file's permissions."):
        record = strict_json.loads((path / RECORD).read_bytes())
        if not isinstance(record, dict):
            raise ValueError("record.json is no JSON object")
        # The format is of the whole step: integrity.py looks at it.
        record.pop("format", None)
        return read_commit(path), record


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as indented lines of a message: columns as wide as they need be."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append(f"    {'  '.join(cells).rstrip()}")
    return lines


@contextlib.contextmanager
def as_storage_error(doing: str, advice: str, unfinished: Path | None = None) -> Iterator[None]:
    """Convert errors of Orbax, its array store and the system to one StorageError with advice.

    What is left `unfinished` is removed then: its space is needed.
    """
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        # The cause comes last.
        if len(what) >= 300:
            what = f"{what[:100]} ... {what[-160:]}"
        raise StorageError(f"{doing} failed: {what}. {advice}") from error
