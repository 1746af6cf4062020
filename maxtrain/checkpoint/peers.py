"""Files of a step that a process needs and that are on the disk of another host, brought through
the devices.

All processes of a job call these functions, in the same order.
"""

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import BinaryIO

import jax
import numpy as np

from data_pipeline.base.errors import StorageError
from data_pipeline.base.new_files import open_beside
from maxtrain.checkpoint.integrity import Files
from maxtrain.checkpoint.zarr_reader import is_part_of_array, needed_parts
from maxtrain.parallel.agreement import from_one, gather_bytes, raise_together

# Bytes that are sent at a time: few sizes, since there is a program for each.
_SMALLEST = 1 << 12
_LARGEST = 1 << 24
_IS_HERE = 1
_IS_NEEDED = 2


def bring(path: Path, files: Files, targets: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Brings what is not here of the files of a step that this process reads arrays from.

    What comes is not checked: who reads it does that.

    Args:
        path: of the step on this host.
        files: all of its files, each of which some process has.
        targets: the arrays, by the names that their files have.

    Raises:
        StorageError: in all processes: one can't read or write them.
    """
    if jax.process_count() == 1:
        return
    small = {name for name in files if not is_part_of_array(name)}
    _bring(path, files, small)
    # These say which files an array has.
    _bring(path, files, needed_parts(path, files, targets))


def _bring(path: Path, files: Files, needed: Collection[str]) -> None:
    names = sorted(files)
    marks = np.zeros(len(names), np.uint8)
    for place, name in enumerate(names):
        if is_here(path, files, name):
            marks[place] |= _IS_HERE
        if name in needed:
            marks[place] |= _IS_NEEDED
    of_all = gather_bytes(marks)
    error = None
    for place, name in enumerate(names):
        of_file = of_all[:, place]
        holders = np.flatnonzero(of_file & _IS_HERE)
        if not (of_file == _IS_NEEDED).any() or not len(holders):
            continue
        is_wanted = of_file[jax.process_index()] == _IS_NEEDED
        try:
            _send(path / name, files[name]["bytes"], int(holders[0]), is_wanted)
        except OSError as problem:
            error = StorageError(
                f"bringing {path / name} from another host failed: {problem}. "
                "Restore access or free space, then run the same command again."
            )
    raise_together(error)


def is_here(path: Path, files: Files, name: str) -> bool:
    """Return whether a file of a step is on the disk of this host, by its size."""
    try:
        return (path / name).stat().st_size == files[name]["bytes"]
    except OSError:
        return False


def _send(path: Path, size: int, sender: int, is_wanted: bool) -> None:
    """Send a file from one process to all, piece by piece. The processes that want it write it.

    Raises:
        OSError: when all is sent: this process could not read or write the file.
    """
    error = None
    # The new file, under a name that nobody can guess; None: this process writes none.
    file: BinaryIO | None = None
    if is_wanted:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open_beside(path)
        except OSError as problem:
            error = problem
    for start in range(0, max(size, 1), _LARGEST):
        length = min(_LARGEST, size - start)
        piece = np.zeros(max(_SMALLEST, 1 << length.bit_length()), np.uint8)
        # A process that can't read or write goes on sending: the others wait for it.
        try:
            if jax.process_index() == sender:
                piece[:length] = _read(path, start, length)
        except (OSError, ValueError) as problem:
            error = OSError(str(problem))
        piece = from_one(piece, sender)
        try:
            if file is not None and error is None:
                file.write(piece[:length].tobytes())
        except OSError as problem:
            error = problem
    if file is not None:
        try:
            file.close()
            if error is None:
                os.rename(file.name, path)
        except OSError as problem:
            error = error or problem
        finally:
            # Nothing has this name any more once the file is renamed.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(file.name)
    if error is not None:
        raise error


def _read(path: Path, start: int, length: int) -> np.ndarray:
    """Return `length` bytes of a file from `start` on. OSError: the file can't be read."""
    with path.open("rb") as file:
        file.seek(start)
        return np.frombuffer(file.read(length), np.uint8)
