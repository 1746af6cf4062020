"""Arrays that no step changes, such as frozen parameters: saved once per run, beside its steps.

    DIRECTORY/frozen/00000000/   arrays, record and commit record, as a step has them

The commit record of every step that needs them says, under `frozen`, what they are: one hash of the
names, shapes and digests of all of them. So a step is never put together with arrays that are not
its own. Needs no device.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import StorageError
from maxtrain.checkpoint.copying import copy_step
from maxtrain.checkpoint.formats import migrate
from maxtrain.checkpoint.integrity import defect, read_commit

FOLDER = "frozen"
# In the commit record of a step.
KEY = "frozen"


class Frozen(NamedTuple):
    """The frozen arrays that a step needs."""

    path: Path
    commit: dict[str, Any]


def place_of(directory: Path) -> Path:
    """Where the steps of a directory have their frozen arrays."""
    return directory / FOLDER / f"{0:08d}"


def identity(arrays: dict[str, dict[str, Any]]) -> str:
    """16 hex digits that stand for names, shapes, types and every bit of arrays.

    Args:
        arrays: as a commit record has them, with a digest each.
    """
    rows = []
    for name in sorted(arrays):
        array = arrays[name]
        rows.append([name, array["dtype"], array["shape"], array["digest"]])
    return hashlib.blake2b(json.dumps(rows).encode(), digest_size=8).hexdigest()


def lack(directory: Path, wanted: str) -> str:
    """Why a directory does not have the frozen arrays of this identity; empty if it has them.

    Sizes of files are looked at, not their bytes.
    """
    path = place_of(directory)
    if not path.exists():
        return f"{path} is missing"
    why = defect(path)
    if why:
        return f"{path} is not whole: {why}"
    if identity(read_commit(path)["arrays"]) != wanted:
        return f"{path} holds other arrays"
    return ""


def frozen_of(step: Path, commit: dict[str, Any], also: Iterable[Path] = ()) -> Frozen | None:
    """The frozen arrays that a step needs; None: it needs none.

    Args:
        step: its directory.
        commit: its commit record.
        also: directories with steps of the same run, which have the same frozen arrays.

    Raises:
        StorageError: they are nowhere.
    """
    wanted = commit.get(KEY)
    if wanted is None:
        return None
    problems = []
    for directory in dict.fromkeys((step.parent, *also)):
        why = lack(directory, wanted)
        if not why:
            path = place_of(directory)
            found, _ = migrate(read_commit(path), {})
            return Frozen(path, found)
        problems.append(why)
    raise StorageError(
        f"{step} needs the frozen parameters of its run, but {', and '.join(problems)}. "
        f"Copy {FOLDER}/ from a copy of the run's checkpoints to {step.parent}, "
        "or set run_name to a new name to start afresh."
    )


def all_arrays(step: Path, commit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The entries of all arrays that belong to a step, its own and frozen ones.

    StorageError: frozen ones are missing.
    """
    frozen = frozen_of(step, commit)
    if frozen is None:
        return commit["arrays"]
    return commit["arrays"] | frozen.commit["arrays"]


def copy_frozen(step: Path, folder: Path, read_back: bool = False) -> None:
    """Copies the frozen arrays that a step needs below another folder that lacks them.

    Errors as of `copy_step` and `frozen_of`.
    """
    commit = read_commit(step)
    frozen = frozen_of(step, commit)
    if frozen is None or not lack(folder, commit[KEY]):
        return
    copy_step(frozen.path, folder / FOLDER, read_back=read_back)
