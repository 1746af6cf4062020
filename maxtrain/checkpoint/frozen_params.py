"""Arrays that no step changes, such as frozen parameters: saved once per run, beside its steps.

    DIRECTORY/frozen/HASH/00000000/   arrays, record and commit record, as a step has them

HASH is one of the names, shapes and digests of all of them. The commit record of every step that
needs them has it, under `frozen`: so a step is never put together with arrays that are not its own,
and steps of several runs may lie in one directory. Needs no device.
"""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import DamagedError, StorageError
from maxtrain.checkpoint.at_url import drop_arrays, fetch, url_of
from maxtrain.checkpoint.copying import copy_step
from maxtrain.checkpoint.integrity import Files, defect, find_damage, read_commit

FOLDER = "frozen"
# In the commit record of a step.
KEY = "frozen"


class FrozenArrays(NamedTuple):
    """The frozen arrays that a step needs."""

    path: Path
    commit: dict[str, Any]


def place_of(directory: Path, wanted: str) -> Path:
    """Return where the steps of a directory have the frozen arrays of this identity."""
    return directory / FOLDER / wanted / f"{0:08d}"


def stores(directory: Path) -> list[Path]:
    """All frozen arrays that steps of a directory may need."""
    return sorted(directory.glob(f"{FOLDER}/*/{0:08d}"))


def is_store(path: Path) -> bool:
    """Return whether this is such a place and no step."""
    return path.parents[1].name == FOLDER


def advice(directory: Path) -> str:
    """Return what to do if steps of a directory lack their frozen arrays, or these are damaged."""
    return (
        f"Copy {FOLDER}/ from a copy of the run's checkpoints to {directory}, "
        "or set run_name to a new name to start afresh."
    )


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


def lack(directory: Path, wanted: str, read: bool = False) -> str:
    """Why a directory does not have the frozen arrays of this identity; empty if it has them.

    Sizes of files are looked at, and with `read` their bytes.
    """
    path = place_of(directory, wanted)
    if not path.exists():
        return f"{path} is missing"
    why = defect(path)
    if why:
        return f"{path} is not whole: {why}"
    commit = read_commit(path)
    if identity(commit["arrays"]) != wanted:
        return f"{path} holds other arrays"
    damage = ""
    if read:
        damage = _damage_of(path, commit["files"])
    if damage:
        return f"{path} is damaged: {damage}"
    return ""


def _damage_of(path: Path, files: Files) -> str:
    """Return the problem with the files of a place; of one at a URL, with what is there, which
    may be whole if the copy on this host is not.
    """
    try:
        fetch(path, files, files)
        damage = find_damage(path, files)
        if damage and url_of(path) is not None:
            drop_arrays(path)
            fetch(path, files, files)
            damage = find_damage(path, files)
    except DamagedError as found:
        return found.what
    return damage


def frozen_of(step: Path, commit: dict[str, Any], also: Iterable[Path] = ()) -> FrozenArrays | None:
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
            path = place_of(directory, wanted)
            return FrozenArrays(path, read_commit(path))
        problems.append(why)
    raise StorageError(
        f"{step} needs the frozen parameters of its run, but {', and '.join(problems)}. "
        f"{advice(step.parent)}"
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

    Args:
        step: its directory.
        folder: that the step is, or will be, copied to.
        read_back: what is there, and what is copied, is read and checked.

    Raises:
        StorageError: they are nowhere, or damaged, or the copy is not like them.
    """
    commit = read_commit(step)
    wanted = commit.get(KEY)
    if wanted is None or not lack(folder, wanted, read_back):
        return
    frozen = frozen_of(step, commit)
    assert frozen is not None
    try:
        copy_step(frozen.path, folder / FOLDER / wanted, read_back=read_back)
    except DamagedError as damage:
        text = f"{damage.path} is damaged: {damage.what}. {advice(step.parent)}"
        raise StorageError(text) from damage
