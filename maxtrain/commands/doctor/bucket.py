"""Check that a run can be kept behind a URL: each operation that runs need is tried with objects
that are removed again.
"""

import os
import secrets
import time
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import StorageError, UserError
from data_pipeline.base.remote import RemotePath

_MIB = 1 << 20
# Of the object that is written and read.
WRITTEN_MIB = 32
_LOCK = "lock"
_BYTES = "bytes"


def bucket(url: str, mib: int = WRITTEN_MIB) -> dict[str, Any]:
    """Return whether this host can write, create once (which locks need), read, list and delete
    below a URL, and how fast.

    Args:
        url: of a folder of runs.
        mib: of the object whose upload and download are timed.

    Returns:
        `url`, `uploaded_bytes_per_second` and `downloaded_bytes_per_second`; or `error`.
    """
    found: dict[str, Any] = {"url": url}
    probe = _nearest(url) / f".doctor-{secrets.token_hex(8)}"
    problem = ""
    is_written = False
    try:
        is_made = (probe / _LOCK).create(_LOCK.encode())
        is_written = True
        _require_locks(probe / _LOCK, is_made)
        found |= _rates(probe / _BYTES, os.urandom(mib * _MIB))
        _require_listed(probe)
    except UserError as error:
        problem = str(error)
    finally:
        # Also after an error: the object may be there although the answer was lost.
        try:
            probe.remove()
        except UserError as error:
            if is_written:
                problem = f"{problem or error} What was written to try it may be left in {probe}."
    if problem:
        found["error"] = problem
    return found


def _nearest(url: str) -> RemotePath:
    """The place itself; of folders of this machine, the nearest that is there: none is made."""
    scheme, _, rest = url.partition("://")
    if scheme != "file":
        return RemotePath(url.rstrip("/"))
    folder = Path(rest).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return RemotePath(f"file://{folder}")


def _require_locks(lock: RemotePath, is_made: bool) -> None:
    """Check that an object that was created exists, and cannot be created again.

    StorageError: the store does not keep to that.
    """
    # If the answer to the first try was lost, the second finds the object there.
    if _read(lock) != _LOCK.encode():
        why = "was written, but other bytes are read"
        if not is_made:
            why = "is reported to be there, but other bytes are read"
        raise StorageError(f"{lock}: {why}. Set output_dir to a store that keeps what is written.")
    if lock.create(b"another"):
        raise StorageError(
            f"{lock}: this store writes over what is there despite a conditional "
            "request (If-None-Match), so two runs could write at the same time. "
            "Set output_dir to a store that can do this, or to a path."
        )


def _rates(place: RemotePath, content: bytes) -> dict[str, float]:
    """Return how fast bytes are written, and read again; StorageError: others are read."""
    start = time.perf_counter()
    place.write_bytes(content)
    written = time.perf_counter()
    is_same = _read(place) == content
    read = time.perf_counter()
    if not is_same:
        raise StorageError(
            f"{place}: other bytes are read than were written. Check network and service."
        )
    return {
        "uploaded_bytes_per_second": len(content) / max(written - start, 1e-9),
        "downloaded_bytes_per_second": len(content) / max(read - written, 1e-9),
    }


def _require_listed(probe: RemotePath) -> None:
    names = sorted(found.path.name for found in probe.files(depth=1))
    if names != [_BYTES, _LOCK]:
        raise StorageError(
            f"{probe}: {_BYTES} and {_LOCK} were written, and a listing has {names}. "
            "Set output_dir to a store whose listings are up to date."
        )


def _read(place: RemotePath) -> bytes:
    try:
        return place.read_bytes()
    except FileNotFoundError as error:
        raise StorageError(
            f"{place}: was written, but is not there. "
            "Set output_dir to a store that keeps what is written."
        ) from error
