"""Which steps there are, in a directory and perhaps a second one, and their records: known without
a device."""

import contextlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from data_pipeline import strict_json
from data_pipeline.errors import StorageError, UserError
from maxtrain.checkpoint.formats import migrate
from maxtrain.checkpoint.integrity import damaged, read_commit, survey
from maxtrain.config.schema import CheckpointConfig


def second_of(directory: Path, config: CheckpointConfig) -> Path | None:
    """Where the steps of RUN/checkpoints are copied to: COPY_TO/RUN/checkpoints; None: nowhere.

    Raises:
        StorageError: COPY_TO is not there, and the run has no step yet: perhaps it has some there.
    """
    if config.copy_to is None:
        return None
    root = Path(config.copy_to).expanduser().absolute()
    if not root.is_dir():
        problem = f"checkpoint.copy_to={config.copy_to} is no directory here. Mount or make it, or set another one"
        if not complete(directory):
            raise StorageError(f"{problem}: the run may have checkpoints there to go on from.")
        print(
            f"WARNING: {problem}; meanwhile the run goes on from {directory}.",
            file=sys.stderr,
            flush=True,
        )
    return root / directory.parent.name / directory.name


def complete(directory: Path, second: Path | None = None) -> dict[int, Path]:
    """The complete steps by number, ascending; of one that is in both directories, that in the
    first."""
    directories = [second, directory] if second else [directory]
    found = {
        step: place / f"{step:08d}"
        for place in directories
        for step, why in survey(place).items()
        if not why
    }
    return dict(sorted(found.items()))


def latest_record(
    directory: Path,
    accept: Callable[[dict[str, Any]], bool] = lambda record: True,
    second: Path | None = None,
) -> dict[str, Any] | None:
    """The record of the newest complete checkpoint below a directory, or a second one, that
    `accept` takes.

    None: there is none. StorageError: one can't be read, or there are only damaged ones: starting
        afresh would hide that.
    """
    directory = directory.expanduser()
    records = (read_record(path) for path in reversed(complete(directory, second).values()))
    found = next(filter(accept, records), None)
    if found is None and (bad := damaged(directory) + (damaged(second) if second else [])):
        lines = "".join(f"\n  {path}" for path in bad[:20])
        mend = "Copy a good one there, or start afresh with another run_name"
        raise StorageError(
            f"{directory} has no checkpoint to go on from, only damaged ones:{lines}\n{mend}."
        )
    return found


def saved_steps(directory: Path) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """What `read_step` gives for all complete checkpoints below a directory, by step; StorageError:
    one can't be read.

    One that a training removes meanwhile is passed over.
    """
    found = {}
    for step, path in complete(directory.expanduser()).items():
        try:
            found[step] = read_step(path)
        except StorageError:
            if path.exists():
                raise
    return found


def saved_digests(directory: Path) -> dict[int, dict[str, str]]:
    """The digests of all arrays by name, of each complete checkpoint below a directory that has
    them, by step, ascending."""
    return {
        step: arrays
        for step, (commit, _) in saved_steps(directory).items()
        if (arrays := array_digests(commit))
    }


def array_digests(commit: dict[str, Any]) -> dict[str, str]:
    """The digest that each array was saved with, by its name; steps of format 1 have none."""
    return {
        name: array["digest"]
        for name, array in commit.get("arrays", {}).items()
        if "digest" in array
    }


def read_record(path: Path) -> dict[str, Any]:
    """What the caller saved beside the arrays of a step."""
    return read_step(path)[1]


def read_step(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The commit record of a step, and what the caller saved beside the arrays; those of older
    formats as of this one."""
    with as_storage_error(f"reading {path}", "Check the file's permissions."):
        record = strict_json.loads((path / "record.json").read_bytes())
        if not isinstance(record, dict):
            raise ValueError("record.json is no JSON object")
        record.pop("format", None)  # of the whole step: integrity.py looks at it
        return migrate(read_commit(path), record)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table as lines of an error or a message: columns as wide as they need be,
    indented."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [f"    {'  '.join(map(str.ljust, row, widths)).rstrip()}" for row in rows]


@contextlib.contextmanager
def as_storage_error(doing: str, advice: str, unfinished: Path | None = None) -> Iterator[None]:
    """Turn what Orbax, its array store and the system raise into one error with a mend; remove what
    is left unfinished."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        if unfinished:
            shutil.rmtree(unfinished, ignore_errors=True)  # its space is needed
        what = (str(error).strip() or type(error).__name__).splitlines()[0]
        what = (
            what if len(what) < 300 else f"{what[:100]} ... {what[-160:]}"
        )  # the cause comes last
        raise StorageError(f"{doing} failed: {what}. {advice}") from error
