"""Steps of a run that is behind a URL: what is there counts, and a directory of this host holds as
much of it as is needed.

    URL/checkpoints/00001000/...      as a step on a disk; commit.json is written last
    DIRECTORY/00001000/url            the URL of the step: what is not here, is there
    DIRECTORY/00001000/commit.json    its small files are always here, its arrays when somebody
                                      reads them

So whatever looks at steps looks at DIRECTORY. `pull` makes it like the URL, and `fetch` brings
files before they are read. Needs no device.

A file `url` counts only in a directory that this process itself has made a copy of a URL, and only
with the URL that the step has there. Otherwise a run folder of a stranger could name any URL, from
which files would be read, and at which steps would be removed, with the credentials of the user.
"""

import concurrent.futures
import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from data_pipeline.base.errors import DamagedError, StorageError
from data_pipeline.base.inner_names import require_no_way_out
from data_pipeline.base.remote import RemoteFile, RemotePath
from data_pipeline.shards import write_atomic
from maxtrain.checkpoint.integrity import (
    FORMAT,
    SMALL_FILES,
    URL_FILE,
    Files,
    defect,
    find_damage,
    read_commit,
)

COMMIT = "commit.json"
# Times that small files are fetched before what is at the URL is taken for damaged.
_TRIES = 3
# Files that are carried at the same time.
_THREADS = 8
# Names of steps, and of arrays that no step changes, below the folder of checkpoints.
_STEP = re.compile(r"(frozen/\w+/)?\d{8,}")
_IN_STEP = re.compile(rf"({_STEP.pattern})/(.+)")
# The small files of a step.
_SMALL = (COMMIT, *SMALL_FILES)


class UncommittedSteps(NamedTuple):
    """Parts below the URL that do not count as steps, by the name of their folder.

    Attributes:
        unfinished: uploads that were killed.
        lacking: steps with a commit record that are not whole, and why.
    """

    unfinished: list[str]
    lacking: dict[str, str]


# The URL of each directory that this process has made a copy, by its path without symbolic links.
_homes: dict[Path, RemotePath] = {}


def note_copy(directory: Path, home: RemotePath) -> None:
    """Make the files `url` in the steps of a directory count, for the steps at this URL."""
    _homes[Path(os.path.realpath(directory))] = home


def home_of(directory: Path) -> RemotePath | None:
    """The URL that this process has made a directory of steps a copy of; None: it has not."""
    return _homes.get(Path(os.path.realpath(directory)))


def url_of(step: Path) -> RemotePath | None:
    """Return where a step directory of this host has come from; None: nowhere, it is the step
    itself, or it is a copy that another process has made.
    """
    written = _written_url(step)
    if written is None:
        return None
    real = Path(os.path.realpath(step))
    # A step, or `frozen/HASH/00000000`.
    for directory in (real.parent, *real.parents[2:3]):
        home = _homes.get(directory)
        if home is not None and written == (home / real.relative_to(directory).as_posix()).url:
            return RemotePath(written)
    return None


def _written_url(step: Path) -> str | None:
    """Return what the file `url` of a step says, whoever wrote it; None: there is none."""
    try:
        return (step / URL_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError):
        return ""


def write_url(step: Path, home: RemotePath) -> None:
    """Record that files missing from a step directory are at this URL."""
    write_atomic(step / URL_FILE, home.url.encode())


def pull(
    home: RemotePath, directory: Path, listing: Mapping[str, RemoteFile] | None = None
) -> UncommittedSteps:
    """Makes the steps below a directory those that are at a URL, without their arrays.

    Args:
        home: URL/checkpoints.
        directory: of this host.
        listing: what is below `home`, by name; None: it is looked up.

    Raises:
        StorageError: the URL can't be read, other bytes are read than it holds, or the directory
            can't be written.
    """
    note_copy(directory, home)
    if listing is None:
        listing = home.tree()
    sizes: dict[str, dict[str, int]] = {}
    for name, found in listing.items():
        in_step = _IN_STEP.fullmatch(name)
        if in_step:
            sizes.setdefault(in_step[1], {})[in_step[3]] = found.size
    unfinished = []
    lacking = {}
    good = set()
    for name, files in sizes.items():
        if COMMIT not in files:
            unfinished.append(name)
            continue
        why = _bring(home / name, directory / name, files)
        if why:
            lacking[name] = why
        else:
            good.add(name)
    for pattern in ("*", "frozen/*/*"):
        for path in directory.glob(pattern):
            name = path.relative_to(directory).as_posix()
            if _STEP.fullmatch(name) and name not in good:
                shutil.rmtree(path)
    return UncommittedSteps(unfinished, lacking)


def _bring(home: RemotePath, step: Path, sizes: Mapping[str, int]) -> str:
    """Makes a step directory of this host the one at a URL; why that one does not count, empty if
    it does.

    StorageError: what was read is not what is there.
    """
    try:
        why = _bring_whole(home, step, sizes)
    except FileNotFoundError:
        return "it is being removed"
    if why:
        return why
    commit = read_commit(step)
    # Only a newer version knows what its files have to be.
    if commit["format"] > FORMAT:
        return ""
    for name, entry in commit["files"].items():
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != entry["bytes"]:
            return f"{name} has {sizes[name]:,} bytes instead of {entry['bytes']:,}"
    return ""


def _bring_whole(home: RemotePath, step: Path, names: Iterable[str]) -> str:
    """Brings the small files of a step; why they are damaged at the URL, empty if they are not.

    Raises:
        FileNotFoundError: one is not at the URL any more.
        StorageError: what was read is not what is there.
    """
    why = ""
    # Again, if they were damaged here, or on their way.
    for _ in range(_TRIES):
        if why:
            shutil.rmtree(step)
        _bring_small_files(home, step, names)
        why = defect(step)
        if not why:
            return ""
    try:
        for name in _SMALL:
            if (step / name).exists():
                (home / name).require_like(step / name)
    finally:
        shutil.rmtree(step)
    return why


def _bring_small_files(home: RemotePath, step: Path, names: Iterable[str]) -> None:
    """Download the files that are not here already. FileNotFoundError: a file is gone from the
    URL.
    """
    content = (home / COMMIT).read_bytes()
    with contextlib.suppress(FileNotFoundError):
        if (step / COMMIT).read_bytes() == content and url_of(step) == home:
            return
    partial = step.with_name(f".{step.name}.partial")
    for path in (partial, step):
        shutil.rmtree(path, ignore_errors=True)
    partial.mkdir(parents=True)
    for name in _SMALL:
        if name in names:
            (home / name).download(partial / name)
    write_url(partial, home)
    partial.rename(step)


def fetch(step: Path, files: Files, names: Iterable[str]) -> None:
    """Brings files of a step that are not here from its URL, and checks them; nothing happens to a
    step that has none.

    Raises:
        DamagedError: what is at the URL is not what was saved.
        StorageError: it can't be read, other bytes are read than it holds, or there is no room
            here; or a symbolic link leads out of the step, or the step is a copy that another
            process has made.
    """
    missing = _missing(step, files, names)
    home = url_of(step)
    if home is None or not missing:
        return

    def bring(name: str) -> None:
        (step / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).download(step / name)

    damage = ""
    # A second time, if bytes were damaged on their way.
    for _ in range(2):
        try:
            with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
                list(threads.map(bring, missing))
        except FileNotFoundError as error:
            raise DamagedError(step, f"{error.filename} is missing") from error
        except OSError as error:
            fix = "Free space, or set local_dir (or TMPDIR) to a larger disk"
            raise StorageError(
                f"{home}: can't be brought to {step}: {error.strerror}. {fix}."
            ) from error
        damage = find_damage(step, {name: files[name] for name in missing})
        if not damage:
            return
    try:
        for name in missing:
            if find_damage(step, {name: files[name]}):
                (home / name).require_like(step / name)
    except FileNotFoundError as error:
        raise DamagedError(step, f"{error.filename} is missing") from error
    finally:
        # What is left here is not damaged.
        for name in missing:
            (step / name).unlink()
    raise DamagedError(step, f"at {home}: {damage}")


def _missing(step: Path, files: Files, names: Iterable[str]) -> list[str]:
    """Return the files of a step that are not here.

    StorageError: a symbolic link leads out of the step, or they would have to come from a URL that
    this process has not made a copy of.
    """
    missing = []
    for name in names:
        path = require_no_way_out(step, name)
        if not _is_here(path, files[name]["bytes"]):
            missing.append(name)
    written = _written_url(step)
    if missing and written is not None and url_of(step) is None:
        raise StorageError(
            f"{step} is a copy without its arrays, which says that they are at {written!r:.200}. "
            "Such a copy is read only by the process that made it. If that is your own run, name "
            "its URL instead of this folder."
        )
    return missing


def _is_here(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def upload(source: Path, home: RemotePath, names: Iterable[str]) -> None:
    """Copies files of a step to its URL. StorageError: that failed."""

    def put(name: str) -> None:
        (home / name).upload(source / name)

    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        list(threads.map(put, names))


def remove(home: RemotePath) -> None:
    """Removes a step at a URL, its commit record first, so that half of it never counts."""
    (home / COMMIT).remove()
    home.remove()


def put_aside(home: RemotePath) -> str:
    """Gives a step at a URL another name, its commit record first; nothing is deleted.

    Returns:
        The name.
    """
    aside = home.with_name(f"{home.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    found = home.tree()
    for file in sorted(found, key=lambda file: file != COMMIT):
        (home / file).move(aside / file)
    return aside.name


def drop_arrays(step: Path) -> None:
    """Removes what of a step of this host can be fetched again."""
    if url_of(step) is not None:
        shutil.rmtree(step / "arrays", ignore_errors=True)
