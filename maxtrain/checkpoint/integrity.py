"""Whether a step directory is what was saved, known without a device: sizes and crc32 of every
file, and who is put aside.

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

from data_pipeline import strict_json
from data_pipeline.errors import StorageError
from maxtrain.checkpoint.record import wrong_type

# 1 had only the sizes of files; 2 did not say whether arrays are finite, nor of which run they are;
# 3 had layers without the number of their place, and matrices without `.kernel`.
FORMAT = 4
BLOCK_BYTES = 64 << 20  # hashed at once; files of gigabytes are hashed by several threads
CHUNK_BYTES = 1 << 20  # stays in a core's cache between reading and hashing
SMALL_FILES = ("record.json",)

Files = dict[
    str, dict[str, Any]
]  # by path below the step directory: `bytes`, and `crc32` of each block as 8 hex digits


def encode_commit(commit: dict[str, Any]) -> bytes:
    """The text of a commit record, with the crc32 of the rest in front."""
    rest = {name: value for name, value in commit.items() if name != "crc32"}
    return json.dumps(
        {"crc32": f"{crc32(json.dumps(rest).encode()):08x}", **rest}, indent=1
    ).encode()


def read_commit(path: Path) -> dict[str, Any]:
    """The commit record of a step directory; ValueError: it is not what was written. OSError: it
    can't be read."""
    text = (path / "commit.json").read_bytes()
    commit = strict_json.loads(text)
    if (
        not isinstance(commit, dict)
        or type(commit.get("format")) is not int
        or commit["format"] < 1
    ):
        raise ValueError("it is not a commit record")
    intact = (
        encode_commit(commit) == text
        if "crc32" in commit
        else commit["format"] == 1 or commit["format"] > FORMAT
    )
    if not intact:
        raise ValueError("it is not what was written: its crc32 is another")
    if commit["format"] <= FORMAT:
        _check_types(commit)
    return commit


def _check_types(commit: dict[str, Any]) -> None:
    """ValueError: a field that the program goes by is not there, or is not of its type."""
    if type(commit.get("step")) is not int:
        raise ValueError("step must be a whole number")
    for field in ("files", "arrays"):
        entries = commit.get(field)
        if not isinstance(entries, dict) or not all(
            isinstance(entry, dict) for entry in entries.values()
        ):
            raise ValueError(f"{field} must be objects by name")
    for name, entry in commit["files"].items():
        if type(entry.get("bytes")) is not int or not _is_list(entry.get("crc32", []), str):
            raise ValueError(f"files: {name!r:.80} must have bytes and crc32")
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files: {name!r:.80} is not below the step")
    for name, entry in commit["arrays"].items():
        if not _is_list(entry.get("shape"), int) or not isinstance(entry.get("dtype"), str):
            raise ValueError(f"arrays: {name!r:.80} must have shape and dtype")


def _is_list(value: Any, kind: type) -> bool:
    return isinstance(value, list) and all(type(item) is kind for item in value)


def survey(directory: Path) -> dict[int, str]:
    """Steps that have a directory, in ascending order, and why they don't count; empty for those
    that do.

    One that a training removes meanwhile is passed over.
    """
    steps = sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal())
    found = {step: defect(directory / f"{step:08d}") for step in steps}
    return {
        step: why for step, why in found.items() if not why or (directory / f"{step:08d}").exists()
    }


def damaged(directory: Path) -> list[Path]:
    """What was put aside, or is in the place of a step and is none."""
    aside = sorted(directory.glob("*.damaged-*"))
    return aside + [directory / f"{step:08d}" for step, why in survey(directory).items() if why]


def defect(path: Path) -> str:
    """Why a step directory is not a complete checkpoint; empty if it is one. Reads its small files
    only."""
    try:
        commit = read_commit(path)
        # Only a newer version knows how to check its own format; the step still exists, and
        # restoring it is refused.
        step, files = commit["step"], commit["files"] if commit["format"] <= FORMAT else {}
    except FileNotFoundError:
        return "commit.json is missing, so it was never finished or not copied whole"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"commit.json is not readable ({error})"
    if path.name.isdecimal() and step != int(path.name):
        return f"it is a copy of step {step}"
    for name, entry in files.items():
        size = _size(path / name)
        if size != entry["bytes"]:
            return (
                f"{name} is missing"
                if size is None
                else f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
            )
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
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def _worthless(path: Path, commit: dict[str, Any]) -> str:
    """Why a step that is what was written can't be gone on from; empty if it can."""
    if commit["format"] > FORMAT or not (path / "record.json").exists():
        return ""
    record = strict_json.loads((path / "record.json").read_bytes())
    if problem := wrong_type(record):
        return problem
    saved = record.get("format")
    if type(saved) is int and saved > commit["format"]:
        return f"commit.json says format {commit['format']}, but the step was saved with format {saved}"
    if commit["format"] == 1 and not record.get("digests"):
        return "commit.json says format 1 and has no hashes, and record.json no digests: nothing says that it is whole"
    return ""


def hash_files(path: Path, names: Iterable[str]) -> Files:
    """Size and block hashes of files below a directory that were just written, by several
    threads."""
    files = {name: {"bytes": (path / name).stat().st_size, "crc32": []} for name in names}
    blocks = [
        (name, start)
        for name, entry in files.items()
        for start in range(0, entry["bytes"], BLOCK_BYTES)
    ]
    for (name, _), crc in zip(blocks, _hash_blocks(path, blocks, _hash_written), strict=True):
        files[name]["crc32"].append(crc)
    return files


def find_damage(path: Path, files: Files, part: int = 0, parts: int = 1) -> str:
    """The first block that is not what was written, of every `parts`-th block from `part` on; empty
    if there is none.

    Files of format 1 have no hashes and pass. OSError: one can't be read.
    """
    expected = [
        (name, i, crc)
        for name, entry in files.items()
        for i, crc in enumerate(entry.get("crc32", []))
    ][part::parts]
    found = _hash_blocks(path, [(name, i * BLOCK_BYTES) for name, i, _ in expected], _hash_block)
    told = (
        describe_damage(name, files[name], i, now)
        for (name, i, _), now in zip(expected, found, strict=True)
    )
    return next(filter(None, told), "")


def describe_damage(name: str, entry: dict[str, Any], block: int, now: str) -> str:
    """What is wrong with a block of a file whose crc32 is `now`; empty: nothing, or it is of format
    1 and has no hashes."""
    crc = entry["crc32"][block] if "crc32" in entry else now
    start, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, entry["bytes"])
    return (
        f"{name}, bytes {start:,} to {end:,}: crc32 {crc} was written, {now} is there"
        if crc != now
        else ""
    )


def _hash_blocks(
    path: Path, blocks: list[tuple[str, int]], hash_block: Callable[[Path, int], str]
) -> list[str]:
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        return list(threads.map(lambda block: hash_block(path / block[0], block[1]), blocks))


def _hash_written(path: Path, start: int) -> str:
    """As `_hash_block`, where the kernel has it: a third faster than a copy. What a disk doesn't
    give would end the process."""
    with contextlib.suppress(OSError), path.open("rb") as file:  # not all file systems can do that
        length = min(BLOCK_BYTES, path.stat().st_size - start)
        with mmap.mmap(
            file.fileno(), length, mmap.MAP_PRIVATE, mmap.PROT_READ, offset=start
        ) as block:
            return f"{crc32(block):08x}"
    return _hash_block(path, start)


def _hash_block(path: Path, start: int) -> str:
    crc, left, buffer = 0, BLOCK_BYTES, memoryview(bytearray(CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (count := file.readinto(buffer[: min(left, CHUNK_BYTES)])):
            crc, left = crc32(buffer[:count], crc), left - count
    return f"{crc:08x}"


def put_aside(path: Path) -> Path:
    """Gives a step directory a name that nothing goes on from; nothing is deleted. StorageError: it
    can't be renamed."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        return path.rename(aside)
    except OSError as error:
        mend = "Permit writing there, or rename it by hand to go on from the checkpoint before it"
        raise StorageError(
            f"{path} is damaged and can't be put aside as {aside.name}: {error.strerror}. {mend}."
        ) from error


def sync(*paths: Path) -> None:
    """Have the kernel put files, and the entries of directories, on the disk."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
