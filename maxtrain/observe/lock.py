"""One run folder, one run that writes there."""

import fcntl
import os
import platform
from pathlib import Path
from typing import IO

from data_pipeline.errors import StorageError

FILE_NAME = "lock"


class RunLock:
    """Use as `with RunLock(folder):`. The system frees the lock when its process ends, however it ends.

    A POSIX lock: also between hosts, where the file system has them; not inherited by worker processes.

    Raises:
        StorageError: another process has it; says which.
    """

    def __init__(self, folder: Path):
        self._path = folder / FILE_NAME
        self._file: IO[str] | None = None

    def __enter__(self) -> "RunLock":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        file = open(self._path, "a+", encoding="utf-8")
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            file.close()
            rule = f"{self._path.parent} is being written by {holder(self._path.parent)}"
            raise StorageError(f"{rule}. Wait for it or end it, or set run_name to another name.") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {platform.node()}")
        file.flush()
        self._file = file
        return self

    def __exit__(self, *_: object) -> None:
        assert self._file
        self._file.truncate(0)
        self._file.close()


def holder(folder: Path) -> str:
    """Who writes to a run, or did when it was killed; empty if nobody."""
    path = folder / FILE_NAME
    return path.read_text("utf-8") if path.exists() else ""
