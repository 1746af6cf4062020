"""The records of a run behind a URL: everything in its folder but checkpoints and locks.

They are written in a folder of this host, and uploaded as whole files: every INTERVAL seconds,
before a checkpoint counts, and at the end. So the records of all steps before a checkpoint are at
the URL when the checkpoint is.
"""

import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.errors import StorageError
from data_pipeline.base.inner_names import require_inside, require_no_way_out, why_outside
from data_pipeline.base.remote import RemoteFile, RemotePath
from data_pipeline.shards import write_atomic

INTERVAL = 60.0
# Names the URL that a folder of this host is a copy of.
OWNER = ".url"
# What was last the same here and at the URL: [stamp there, size, time of change here] by name.
_INDEX = ".uploaded.json"
_APART = ("checkpoints", "lock")
# Without it there is no run, and nothing is removed at the URL.
_IDENTITY = "run.json"
# Of this host: written by its supervisor, or by a process that has hung.
_OF_THIS_HOST = re.compile(r"attempts(-\d+)?\.jsonl|stalled-\d+\.txt")

Index = dict[str, list[Any]]


def is_record(name: str) -> bool:
    """Return whether a file of a run, by its name in the folder, is one of its records."""
    parts = name.split("/")
    return parts[0] not in _APART and not any(part.startswith(".") for part in parts)


def require_copy_of(folder: Path, url: RemotePath, allowed: set[str]) -> None:
    """Makes a folder of this host the copy of a run.

    StorageError: it holds something else, which would be lost.
    """
    if copied_from(folder) == url:
        return
    others = {name for name in os.listdir(folder) if not _OF_THIS_HOST.fullmatch(name)}
    if copied_from(folder) is not None or others - allowed:
        raise StorageError(
            f"{folder} is not a copy of {url}, for which it is wanted. "
            "Move it away, or set local_dir to another folder."
        )
    write_atomic(folder / OWNER, url.url.encode())


def copied_from(folder: Path) -> RemotePath | None:
    """The URL of the run that a folder of this host is a copy of; None: it is no copy."""
    try:
        return RemotePath((folder / OWNER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def pull_records(folder: Path, url: RemotePath, listing: Mapping[str, RemoteFile]) -> None:
    """Makes the records in a folder of this host those at a URL.

    Args:
        folder: that `require_copy_of` has accepted.
        listing: what is at the URL, by name.

    Raises:
        DataError: a name in the listing leads out of the folder.
        StorageError: the URL can't be read, or a symbolic link leads out of the folder.
    """
    index = _read_index(folder)
    here = _records_in(folder)
    there = {name: found for name, found in listing.items() if is_record(name)}
    for name in there:
        require_inside(name, str(url), "Remove that object, or name another run")
    for name, found in there.items():
        path = require_no_way_out(folder, name)
        entry = index.get(name)
        if name in here and entry == [found.stamp, *here[name]]:
            continue
        # What the supervisor has added is not at the URL yet.
        if name in here and _OF_THIS_HOST.fullmatch(name) and here[name][0] >= found.size:
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            found.path.download_exactly(path)
        except FileNotFoundError:
            # A run that goes on elsewhere has removed it.
            continue
        index[name] = [found.stamp, *_state_of(path)]
    for name in here:
        if name not in there and not _OF_THIS_HOST.fullmatch(name):
            (folder / name).unlink()
    _write_index(folder, {name: entry for name, entry in index.items() if name in there})


class Records:
    """Uploads the records of a run that this process alone writes.

    Args:
        folder: of this host.
        url: of the run.
        require: raises if another process writes there by now.
    """

    def __init__(self, folder: Path, url: RemotePath, require: Callable[[], object]):
        self._folder = folder
        self._url = url
        self._require = require
        self._one_at_a_time = threading.Lock()
        self._ended = threading.Event()
        self._failed = 0
        self._thread = threading.Thread(target=self._work, name="records", daemon=True)
        self._thread.start()

    def push(self) -> None:
        """Makes the records at the URL those of the folder.

        Raises:
            LockedError: another process writes there.
            StorageError: they can't be uploaded.
        """
        with self._one_at_a_time:
            if not (self._folder / _IDENTITY).exists() or not (self._folder / OWNER).exists():
                return
            self._require()
            index = _read_index(self._folder)
            here = _records_in(self._folder)
            try:
                for name, state in here.items():
                    if name not in index or index[name][1:] != state:
                        self._upload(name, state, index)
                for name in sorted(index.keys() - here.keys()):
                    (self._url / name).remove()
                    del index[name]
            finally:
                _write_index(self._folder, index)

    def _upload(self, name: str, state: list[int], index: Index) -> None:
        """Uploads a file as it is now; what is appended meanwhile comes the next time."""
        size, _ = state
        try:
            with (self._folder / name).open("rb") as file:
                content = file.read(size)
        except FileNotFoundError:
            return
        found = (self._url / name).write_bytes(content)
        index[name] = [found.stamp, *state]

    def close(self) -> None:
        """Ends uploading in the background."""
        self._ended.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._ended.wait(INTERVAL):
            try:
                self.push()
            except (StorageError, OSError) as error:
                self._report(error)

    def _report(self, error: Exception) -> None:
        """Report the first failed upload, the second, the fourth, and so on."""
        self._failed += 1
        if self._failed & (self._failed - 1) == 0:
            what = f"the records in {self._folder} can't be uploaded now ({error})"
            print(f"WARNING: {what}; training goes on.", file=sys.stderr, flush=True)


def _records_in(folder: Path) -> dict[str, list[int]]:
    """The records in a folder, each with its size and time of change."""
    found = {}
    for parent, folders, files in os.walk(folder):
        place = Path(parent).relative_to(folder)
        folders[:] = [name for name in folders if is_record((place / name).as_posix())]
        for name in files:
            relative = (place / name).as_posix()
            if not is_record(relative):
                continue
            # One that is replaced or removed just now.
            with contextlib.suppress(FileNotFoundError):
                found[relative] = _state_of(folder / relative)
    return found


def _state_of(path: Path) -> list[int]:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]


def _read_index(folder: Path) -> Index:
    """Return what was uploaded; nothing if that is not known: then everything is carried again."""
    try:
        index = strict_json.read(folder / _INDEX)
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(index, dict):
        return {}
    # What is at the URL by one of these names may be removed.
    return {name: entry for name, entry in index.items() if not why_outside(name)}


def _write_index(folder: Path, index: Index) -> None:
    write_atomic(folder / _INDEX, json.dumps(index).encode())
