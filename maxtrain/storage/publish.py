"""A directory or a file that is published whole: written under a hidden name beside its place,
checked, brought to the disk, and only then given its name. A command that is killed leaves nothing
that looks finished.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from data_pipeline.base.errors import UsageError
from data_pipeline.base.interrupts import unfinished
from maxtrain.checkpoint.integrity import sync


@contextlib.contextmanager
def publishing(out: Path, verb: str, argument: str = "OUT") -> Iterator[Path]:
    """A hidden directory that gets the name `out` when the block ends without an error, and is
    removed when it ends with one.

    The caller brings each file to the disk, and reads it again, inside the block.

    Args:
        out: an absolute path; an empty directory may be there.
        verb: of the command, for the hidden name.
        argument: what the command calls `out`, for messages.

    Raises:
        UsageError: there is something at `out`, at the beginning or at the end.
    """
    require_free(out, argument)
    with _staging(out, verb) as directory:
        yield directory
        sync(directory)
        # Somebody may have written there meanwhile.
        require_free(out, argument)
        directory.rename(out)
        sync(out.parent)


@contextlib.contextmanager
def publishing_file(out: Path, verb: str, argument: str = "OUT") -> Iterator[Path]:
    """Publish one file as `publishing` does: yields the path where the block writes it.

    Raises:
        UsageError: there is something at `out`, at the beginning or at the end.
    """
    require_no_file(out, argument)
    with _staging(out, verb) as directory:
        path = directory / out.name
        yield path
        require_no_file(out, argument)
        path.rename(out)
        sync(out.parent)


def require_no_file(out: Path, argument: str = "OUT") -> None:
    """UsageError: there is something at `out`."""
    if out.is_symlink() or out.exists():
        raise UsageError(f"{argument}={out}: exists. Name a file that is not there yet.")


def require_free(out: Path, argument: str = "OUT") -> None:
    """UsageError: there is something at `out` that would be lost."""
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        raise UsageError(f"{argument}={out}: exists, and is not a directory. Name another one.")
    if out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{argument}={out}: is not empty. Name a directory that is not there yet.")


@contextlib.contextmanager
def _staging(out: Path, verb: str) -> Iterator[Path]:
    """A hidden directory beside `out`, removed at the end unless it was given another name; what
    killed commands of this verb to `out` have left there is removed first."""
    out.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{out.name}.{verb}-"
    for left in out.parent.iterdir():
        if left.name.startswith(prefix) and left.is_symlink():
            left.unlink()
        elif left.name.startswith(prefix):
            with _locked(left) as ours:
                if ours and left.is_dir():
                    shutil.rmtree(left)
                elif ours:
                    # What takes the place of a directory while it is removed.
                    left.unlink()
    directory = out.parent / f"{prefix}{secrets.token_hex(8)}"
    directory.mkdir()
    with unfinished(directory):
        try:
            with _locked(directory):
                yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[bool]:
    """Return whether this process has the lock of a directory, or there are none on its file
    system; the system frees it when the process ends, however it ends.
    """
    descriptor = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = True
        except BlockingIOError:
            taken = False
        yield taken
    finally:
        os.close(descriptor)
