"""Files that appear whole or not at all, even where two attempts at the same work write them at once."""

import os
from collections.abc import Iterable
from pathlib import Path

ATTEMPT = ".attempt-"  # begins the names of folders that hold what one attempt has not finished yet


def move_into(directory: Path, files: Iterable[Path]) -> None:
    """Move files that are durable where they are, durably, in place of any of the same names."""
    for file in files:
        os.replace(file, directory / file.name)
    sync(directory)


def sync(directory: Path) -> None:
    """Make earlier renames in a directory durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
