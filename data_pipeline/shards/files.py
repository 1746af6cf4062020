"""Files: written whole or not at all; mapped for reading without a descriptor; divided into blocks
that are checked."""

import contextlib
import ctypes
import functools
import mmap
import os
import weakref
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from data_pipeline.base.errors import StorageError
from data_pipeline.base.new_files import open_beside
from data_pipeline.base.remote import RemotePath

BLOCK_BYTES = 1 << 20
# Begins the names of folders that hold what one attempt at some work has not finished yet.
ATTEMPT = ".attempt-"


def write_atomic(path: Path | RemotePath, data: bytes, private: bool = False) -> None:
    """Write a file so that it is either whole or absent, even after a power cut, and even if
    several processes and hosts write the same file at once.

    Args:
        private: nobody but the user may read the file, if it is on a disk.

    Raises:
        StorageError: the file system refuses.
    """
    if isinstance(path, RemotePath):
        path.write_bytes(data)
        return
    try:
        with open_beside(path, private) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.replace(file.name, path)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.unlink(file.name)
                raise
        _sync(path.parent)
    except OSError as error:
        raise StorageError(
            f"{path}: can't be written ({error.strerror}). Free space or choose another place."
        ) from error


def move_into(directory: Path | RemotePath, files: Iterable[Path]) -> None:
    """Move files that are durable where they are, durably, in place of any of the same names; to a
    URL they are copied."""
    if isinstance(directory, RemotePath):
        for file in files:
            (directory / file.name).upload(file)
        return
    for file in files:
        os.replace(file, directory / file.name)
    _sync(directory)


def _sync(directory: Path) -> None:
    """Make this and earlier renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def num_blocks(size: int) -> int:
    """Blocks of a file of this many bytes."""
    return -(-size // BLOCK_BYTES)


@functools.cache
def _libc() -> ctypes.CDLL:
    """The C library, with the types of what is called here."""
    libc = ctypes.CDLL(None, use_errno=True)
    pointer = ctypes.c_void_p
    size = ctypes.c_size_t
    integer = ctypes.c_int
    libc.mmap.argtypes = (pointer, size, integer, integer, integer, ctypes.c_ssize_t)
    libc.mmap.restype = pointer
    libc.munmap.argtypes = (pointer, size)
    return libc


def map_read_only(path: Path | int, size: int) -> np.ndarray:
    """The `size` bytes, uint8, of a file, or of a descriptor, which is closed, mapped; OSError if
    they can't be.

    Keeps no descriptor, as Python's mmap does before 3.13.
    """
    libc = _libc()
    with open(path, "rb") as file:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(path))
    # It lives as long as any array that looks at it.
    memory = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(memory, libc.munmap, address, size).atexit = False
    data = np.frombuffer(memory, np.uint8)
    data.flags.writeable = False
    return data
