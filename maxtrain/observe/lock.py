"""The lock of a run's folder: only one run writes there."""

import contextlib
import errno
import fcntl
import os
import platform
import threading
from pathlib import Path
from typing import IO

from data_pipeline.base.errors import LockedError, StorageError

FILE_NAME = "lock"
# Seconds for freeing a lock that is not needed.
_PATIENCE = 10.0


class RunLock:
    """Use as `with RunLock(folder):`. The system frees the lock when its process ends, however it
    ends. A folder that was made for it, and has nothing else, is removed.

    It is a POSIX lock, which holds between hosts as well if the file system supports that, and is
    not inherited by worker processes.

    Args:
        folder: the run's folder.
        needed: whether a folder that can't be locked is an error; otherwise it is used without a
            lock.
        key: of the config, that says where the folder is.

    Raises:
        LockedError: another process has the lock; the message names it.
        StorageError: the folder can't be locked.
    """

    def __init__(self, folder: Path, needed: bool = True, key: str = "output_dir"):
        self._path = folder / FILE_NAME
        self._key = key
        self._needed = needed
        self._file: IO[str] | None = None
        self._made_folder = False

    def __enter__(self) -> "RunLock":
        try:
            self._take()
        except (StorageError, OSError) as error:
            if self._needed or isinstance(error, LockedError):
                raise
        return self

    def _take(self) -> None:
        self._lock()
        while not self._is_in_folder():
            # It was removed with its folder, after it was opened here: nobody else would see it.
            self._free()
            self._lock()
        assert self._file is not None
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}")
        self._file.flush()

    def _is_in_folder(self) -> bool:
        """Return whether the file that is locked is the one that others find."""
        assert self._file is not None
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False

    def _lock(self) -> None:
        try:
            self._made_folder |= not self._path.parent.is_dir()
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            fix = f"Set {self._key} to a folder that you may write to"
            raise StorageError(f"{self._path}: {error.strerror}. {fix}.") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            self._file = None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                what = f"{self._path} can't be locked ({error.strerror})"
                raise StorageError(
                    f"{what}, so two runs could write there at the same time. "
                    f"Set {self._key} to a file system with locks."
                ) from error
            recorded = holder(self._path.parent)
            who = recorded or "a process that has not identified itself"
            fix = "Wait for it or end it, or set run_name to another name."
            if not recorded.endswith(f" on {platform.node()}"):
                fix += f" If that host is gone for good, delete {self._path}."
            raise LockedError(f"{self._path.parent} is being written by {who}. {fix}") from error

    def __exit__(self, *_: object) -> None:
        # In a thread: a process that does not need the lock ends even if the file system hangs.
        free = threading.Thread(target=self._leave, daemon=True)
        free.start()
        timeout = _PATIENCE
        if self._needed:
            timeout = None
        free.join(timeout)

    def _leave(self) -> None:
        with contextlib.suppress(OSError):
            if self._made_folder and os.listdir(self._path.parent) == [FILE_NAME]:
                self._path.unlink()
                self._path.parent.rmdir()
        self._free()

    def _free(self) -> None:
        if self._file:
            # The name of the last holder is no longer needed.
            with contextlib.suppress(OSError):
                self._file.truncate(0)
                self._file.close()


def holder(folder: Path) -> str:
    """The process that writes to a run, or that did when it was killed; empty if there is none."""
    path = folder / FILE_NAME
    if not path.exists():
        return ""
    return path.read_text("utf-8", "replace")
