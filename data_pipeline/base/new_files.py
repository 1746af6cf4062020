"""New files under unpredictable hidden names, beside the place that they are renamed to.

Such a file is created only if nothing has its name, and never through a symbolic link: in a folder
where others may write, nobody can have another file written over.
"""

import contextlib
import functools
import os
import re
import secrets
import time
from pathlib import Path
from typing import BinaryIO

# Name prefix of such files, by which readers recognise them.
TEMPORARY = r"\.[0-9a-f]{16}\.tmp"
# What a process that was killed left is removed when it is older than this.
_ABANDONED_SECONDS = 3600
_FOLDERS = 1024


def open_beside(path: Path, private: bool = False) -> BinaryIO:
    """A new file in the folder of `path`, opened for reading and writing; `name` is its path.

    Args:
        private: nobody but the user may read it, nor what it is renamed to.
    """
    mode = 0o666
    if private:
        mode = 0o600

    def create(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL | os.O_NOFOLLOW, mode)

    remove_abandoned(path.parent)
    return open(path.with_name(f".{secrets.token_hex(8)}.tmp"), "w+b", opener=create)


@functools.lru_cache(_FOLDERS)
def remove_abandoned(folder: Path) -> None:
    """Remove new files that killed processes left in a folder; once for each folder."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(folder):
            if re.fullmatch(TEMPORARY, entry.name):
                # Others may be writing theirs just now, or have removed it already.
                with contextlib.suppress(OSError):
                    status = entry.stat(follow_symlinks=False)
                    if status.st_mtime < time.time() - _ABANDONED_SECONDS:
                        os.unlink(entry.path)
