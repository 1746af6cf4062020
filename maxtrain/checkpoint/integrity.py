"""Integrity checks of step directories: sizes and crc32 of every file. Needs no device.

`commit.json` lists every other file with its size and the crc32 of each of its blocks, and has a
crc32 of itself. The small files (commit and record) are checked whenever steps are listed; the
arrays' files before they are read, since the array store would read flipped bits without a word.
What the arrays themselves must hold is in `maxtrain.ops.digest`.
"""

import concurrent.futures
import contextlib
import json
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from data_pipeline.base.errors import StorageError
from data_pipeline.base.inner_names import is_file_name, leads_out, why_outside
from maxtrain.checkpoint.run_state import wrong_type

# The number of what commit.json and record.json say. Formats before it were never released.
FORMAT = 4
# Hashed at once: files of gigabytes are hashed by several threads.
BLOCK_BYTES = 64 << 20
# Mapped at once: what is mapped counts as memory of the process.
_MAPPED_BYTES = 4 << 20
# Stays in a core's cache between reading and hashing.
CHUNK_BYTES = 1 << 20
# What a step remembers of its run.
RECORD = "record.json"
SMALL_FILES = (RECORD,)
# The other files of a step are below this folder of it.
ARRAYS = "arrays/"
# In a step directory, says that its files are at this URL where they are not here; see at_url.py.
URL_FILE = "url"
# In a step directory, says that files which are not here are on the disks of other hosts; see
# local.py.
LOCAL_FILE = "local.json"

# By path below the step directory: `bytes`, and `crc32` of each block as 8 hex digits.
Files = dict[str, dict[str, Any]]


def encode_commit(commit: dict[str, Any]) -> bytes:
    """The text of a commit record, with the crc32 of the rest in front."""
    rest = {name: value for name, value in commit.items() if name != "crc32"}
    crc = crc32(json.dumps(rest).encode())
    return json.dumps({"crc32": f"{crc:08x}", **rest}, indent=1).encode()


def read_commit(path: Path) -> dict[str, Any]:
    """The commit record of a step directory.

    Raises:
        ValueError: it is not what was written.
        OSError: it can't be read.
    """
    text = (path / "commit.json").read_bytes()
    commit = strict_json.loads(text)
    if not isinstance(commit, dict):
        raise ValueError("it is not a commit record")
    number = commit.get("format")
    if type(number) is not int:
        raise ValueError("it is not a commit record")
    if number < FORMAT:
        raise ValueError(f"it has format {number}, which no released version has written")
    # What a newer format has instead of a crc32 is not known here.
    has_no_crc32 = "crc32" not in commit and number > FORMAT
    if not has_no_crc32 and encode_commit(commit) != text:
        raise ValueError("it is not what was written: its crc32 is another")
    _check_names(commit.get("files"))
    # The folder of the frozen arrays; see frozen.py.
    frozen = commit.get("frozen")
    if frozen is not None and not is_file_name(frozen):
        raise ValueError("frozen must be the name of a folder")
    if number == FORMAT:
        _check_types(commit)
    return commit


def _check_names(files: Any) -> None:
    """Check the names of a step's files, also of a newer format: they are read, copied and fetched
    by these names. ValueError: one is not a file that a step has."""
    if not isinstance(files, dict):
        return
    for name in files:
        why = why_outside(name)
        if not why and name not in SMALL_FILES and not name.startswith(ARRAYS):
            why = f"is neither record.json nor below {ARRAYS}"
        if why:
            raise ValueError(f"files: {name!r:.80} {why}")


def _check_types(commit: dict[str, Any]) -> None:
    """ValueError: a field that the program goes by is not there, or is not of its type."""
    if type(commit.get("step")) is not int:
        raise ValueError("step must be a whole number")
    for field in ("files", "arrays"):
        if not _is_objects_by_name(commit.get(field)):
            raise ValueError(f"{field} must be objects by name")
    for name, entry in commit["files"].items():
        if type(entry.get("bytes")) is not int or not _is_list(entry.get("crc32"), str):
            raise ValueError(f"files: {name!r:.80} must have bytes and crc32")
    for name, entry in commit["arrays"].items():
        # Arrays lie in folders of these names.
        if why_outside(name):
            raise ValueError(f"arrays: {name!r:.80} {why_outside(name)}")
        has_texts = all(isinstance(entry.get(field), str) for field in ("dtype", "digest"))
        if not _is_list(entry.get("shape"), int) or not has_texts:
            raise ValueError(f"arrays: {name!r:.80} must have shape, dtype and digest")


def _is_objects_by_name(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, dict) for entry in value.values())


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def survey(directory: Path) -> dict[int, str]:
    """Steps that have a directory, ascending, and why they don't count; empty for those that do.

    One that a training removes meanwhile is passed over.
    """
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
    defects = {step: defect(directory / f"{step:08d}") for step in steps}
    found = {}
    for step, why in defects.items():
        if not why or (directory / f"{step:08d}").exists():
            found[step] = why
    return found


def damaged(directory: Path) -> list[Path]:
    """Return what was put aside, or is in the place of a step and is none."""
    aside = sorted(directory.glob("*.damaged-*"))
    return aside + [directory / f"{step:08d}" for step, why in survey(directory).items() if why]


def defect(path: Path) -> str:
    """Why a step directory is not a complete checkpoint; empty if it is one.

    Reads its small files only.
    """
    try:
        commit = read_commit(path)
        step = commit["step"]
        files: Files = {}
        # Only a newer version knows how to check its own format; the step still exists, and
        # restoring it is refused.
        if commit["format"] == FORMAT:
            files = commit["files"]
    except FileNotFoundError:
        return "commit.json is missing, so it was never finished or not copied whole"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"commit.json is not readable ({error})"
    if path.name.isdecimal() and step != int(path.name):
        return f"it is a copy of step {step}"
    is_elsewhere = (path / URL_FILE).exists() or (path / LOCAL_FILE).exists()
    for name, entry in files.items():
        if leads_out(path, name):
            return f"{name} leads out of the step through a symbolic link"
        size = _size(path / name)
        if size is None and is_elsewhere and name not in SMALL_FILES:
            continue
        if size is None:
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
    try:
        damage = find_damage(path, {name: files[name] for name in SMALL_FILES if name in files})
        return damage or _worthless(path, commit)
    except (OSError, ValueError) as error:
        return f"a file is not readable ({error})"


def _size(path: Path) -> int | None:
    """Bytes of a file; None if there is none. In one look: between two, it may be removed."""
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        return None
    return found.st_size


def _worthless(path: Path, commit: dict[str, Any]) -> str:
    """Why a step that is what was written can't be gone on from; empty if it can."""
    if commit["format"] > FORMAT or not (path / RECORD).exists():
        return ""
    record = strict_json.loads((path / RECORD).read_bytes())
    problem = wrong_type(record)
    if problem:
        return problem
    number = commit["format"]
    saved = record.get("format")
    if saved != number:
        return f"commit.json says format {number}, but the step was saved with format {saved}"
    return ""


def hash_files(path: Path, names: Iterable[str]) -> Files:
    """Size and block hashes of files that were just written below a directory.

    They are hashed by several threads.
    """
    files: Files = {}
    blocks = []
    for name in names:
        size = (path / name).stat().st_size
        files[name] = {"bytes": size, "crc32": []}
        blocks += [(name, start) for start in range(0, size, BLOCK_BYTES)]
    crcs = _hash_blocks(path, blocks, _hash_written)
    for (name, _), crc in zip(blocks, crcs, strict=True):
        files[name]["crc32"].append(crc)
    return files


def find_damage(path: Path, files: Files, part: int = 0, parts: int = 1) -> str:
    """The first block that is not what was written; empty if there is none.

    Of all blocks, every `parts`-th one is looked at, from `part` on. OSError: one can't be read.
    """
    blocks = []
    for name, entry in files.items():
        blocks += [(name, number) for number in range(len(entry["crc32"]))]
    blocks = blocks[part::parts]
    starts = [(name, number * BLOCK_BYTES) for name, number in blocks]
    found = _hash_blocks(path, starts, _hash_block)
    for (name, number), crc in zip(blocks, found, strict=True):
        damage = describe_damage(name, files[name], number, crc)
        if damage:
            return damage
    return ""


def describe_damage(name: str, entry: dict[str, Any], block: int, now: str) -> str:
    """Return the problem with a block of a file whose crc32 is `now`; empty if there is none."""
    written = entry["crc32"][block]
    if written == now:
        return ""
    start = block * BLOCK_BYTES
    end = min(start + BLOCK_BYTES, entry["bytes"])
    return f"{name}, bytes {start:,} to {end:,}: crc32 {written} was written, {now} is there"


def _hash_blocks(
    path: Path, blocks: list[tuple[str, int]], hash_block: Callable[[Path, int], str]
) -> list[str]:
    files = [path / name for name, _ in blocks]
    starts = [start for _, start in blocks]
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(hash_block, files, starts))


def _hash_written(path: Path, start: int) -> str:
    """Hash a block as `_hash_block` does, but from the kernel's page cache, which is a third
    faster.

    Only for files that were just written: a page that the disk can't give would end the process.
    """
    # Not all file systems can map files.
    with contextlib.suppress(OSError), path.open("rb") as file:
        stop = min(start + BLOCK_BYTES, path.stat().st_size)
        crc = 0
        for at in range(start, stop, _MAPPED_BYTES):
            length = min(_MAPPED_BYTES, stop - at)
            with mmap.mmap(
                file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=at
            ) as piece:
                crc = crc32(piece, crc)
        return f"{crc:08x}"
    return _hash_block(path, start)


def _hash_block(path: Path, start: int) -> str:
    crc = 0
    left = BLOCK_BYTES
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left:
            count = file.readinto(buffer[: min(left, CHUNK_BYTES)])
            if not count:
                break
            crc = crc32(buffer[:count], crc)
            left -= count
    return f"{crc:08x}"


def put_aside(path: Path) -> Path:
    """Gives a step directory a name that nothing goes on from; nothing is deleted.

    StorageError: it can't be renamed.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        return path.rename(aside)
    except OSError as error:
        fix = "Permit writing there, or rename it by hand to go on from the checkpoint before it"
        raise StorageError(
            f"{path} is damaged and can't be put aside as {aside.name}: {error.strerror}. {fix}."
        ) from error


def sync(*paths: Path) -> None:
    """Have the kernel put files, and the entries of directories, on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
