"""Report of a host: versions, disks, data. No device is used here."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import UserError
from data_pipeline.base.remote import place
from data_pipeline.shards import Manifest

_MIB = 1 << 20
_CHUNK = 4 * _MIB
# Of the file that is written, and of what is read of data.
WRITTEN_MIB = 64
_READ_MIB = 64
_PACKAGES = (
    "jax",
    "jaxlib",
    "libtpu",
    "jax-cuda13-plugin",
    "jax-cuda12-plugin",
    "nvidia-nccl-cu13",
)
_DRIVER = re.compile(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")


def versions(root: Path = Path("/")) -> dict[str, str]:
    """Versions of what computes: Python, jax and its plugins, and NVIDIA's driver."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    with contextlib.suppress(OSError):
        text = (root / "proc/driver/nvidia/version").read_text()
        driver = _DRIVER.search(text)
        if driver:
            found["driver"] = driver[1]
    return found


def disk(folder: Path, mib: int = WRITTEN_MIB) -> dict[str, Any]:
    """Return how much room there is where a run would write, and how fast a file is written there.

    Where the folder is not there yet, the nearest one above it is looked at.

    Args:
        folder: where runs are, or where processes work on runs behind a URL.
        mib: of the file, which is removed again.

    Returns:
        `folder`, `free_bytes` and `bytes_per_second`, with the time of fsync; or `error`.
    """
    folder = folder.absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    found: dict[str, Any] = {"folder": str(folder)}
    try:
        found["free_bytes"] = shutil.disk_usage(folder).free
        chunk = os.urandom(_CHUNK)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-") as file:
            start = time.perf_counter()
            for _ in range(mib * _MIB // _CHUNK):
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - start
        found["bytes_per_second"] = mib * _MIB / max(seconds, 1e-9)
    except OSError as error:
        found["error"] = f"{folder}: {error.strerror}"
    return found


def data(paths: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return whether data can be read, and how fast its beginning is, perhaps from the system's
    memory.

    Args:
        paths: directories of token shards, or their URLs, by their keys in the config.

    Returns:
        For each `key` and `path`, with `bytes_per_second` or `error`.
    """
    return [_readable(key, path) for key, path in paths.items()]


def _readable(key: str, path: str) -> dict[str, Any]:
    found: dict[str, Any] = {"key": key, "path": path}
    try:
        folder = place(path)
        start = time.perf_counter()
        manifest = Manifest.load(folder)
        size = 0
        for shard in manifest.shards:
            if size >= _READ_MIB * _MIB:
                break
            size += _beginning(folder / shard.path)
        seconds = time.perf_counter() - start
        found["bytes_per_second"] = size / max(seconds, 1e-9)
    except UserError as error:
        found["error"] = str(error)
    except OSError as error:
        found["error"] = f"{path}: {error.strerror or error}"
    return found


def _beginning(file: Any) -> int:
    """Return how many bytes of a file were read: at most a part of it, or all of one behind a
    URL.
    """
    if not isinstance(file, Path):
        return len(file.read_bytes())
    size = 0
    with open(file, "rb") as stream:
        while size < _READ_MIB * _MIB:
            read = len(stream.read(_CHUNK))
            if not read:
                break
            size += read
    return size
