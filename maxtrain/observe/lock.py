"""One run folder, one run that writes there."""

import contextlib
import errno
import fcntl
import os
import platform
import threading
from pathlib import Path
from typing import IO

from data_pipeline.errors import LockedError, StorageError

FILE_NAME = "lock"
_PATIENCE = 10.0  # seconds


class RunLock:
    """Use as `with RunLock(folder):`. The system frees the lock when its process ends, however it
    ends.

    A POSIX lock: also between hosts, where the file system has them; not inherited by worker
    processes. If it is not `needed`, a folder that can't have one is taken without.

    Raises:
        LockedError: another process has it; says which. StorageError: there are no locks in that
            folder.
    """

    def __init__(self, folder: Path, needed: bool = True):
        self._path, self._needed = folder / FILE_NAME, needed
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        try:
            self._take()
        except (StorageError, OSError) as error:
            if self._needed or isinstance(error, LockedError):
                raise
        return self

    def _take(self) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("a+", encoding="utf-8")
        except OSError as error:
            mend = "Set output_dir to a folder that you may write to"
            raise StorageError(f"{self._path}: {error.strerror}. {mend}.") from error
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._file.close()
            self._file = None
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                rule = (
                    f"can't be locked ({error.strerror}), so two runs could write there at a time"
                )
                raise StorageError(
                    f"{self._path} {rule}. Set output_dir to a file system with locks."
                ) from error
            who = holder(self._path.parent)
            elsewhere = not who.endswith(f" on {platform.node()}")
            gone = f" If that host is gone for good, delete {self._path}." if elsewhere else ""
            rule = f"{self._path.parent} is being written by {who or 'a process that has not said which it is'}"
            raise LockedError(
                f"{rule}. Wait for it or end it, or set run_name to another name.{gone}"
            ) from error
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {platform.node()}")
        self._file.flush()

    def __exit__(self, *_: object) -> None:
        # Apart: a file system that hangs does not keep a process from ending that may do without
        #     the lock.
        free = threading.Thread(target=self._free, daemon=True)
        free.start()
        free.join(None if self._needed else _PATIENCE)

    def _free(self) -> None:
        if self._file:
            with contextlib.suppress(OSError):  # who had it is of no use any more
                self._file.truncate(0)
                self._file.close()


def holder(folder: Path) -> str:
    """Who writes to a run, or did when it was killed; empty if nobody."""
    path = folder / FILE_NAME
    return path.read_text("utf-8", "replace") if path.exists() else ""
