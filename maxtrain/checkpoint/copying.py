"""Whole steps as files: copied to another folder, whole or not at all, and removed.

Needs no device.
"""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from data_pipeline.base.errors import DamagedError, StorageError
from maxtrain.checkpoint import at_url
from maxtrain.checkpoint.integrity import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    RECORD,
    encode_commit,
    find_damage,
    hash_files,
    read_commit,
    sync,
)


def copy_step(
    source: Path,
    folder: Path,
    read_back: bool = False,
    before_commit: Callable[[], object] = lambda: None,
) -> Path:
    """Copies a step below another folder, checked while it is read, with its commit record last and
    its name after that.

    A step of that name is replaced. With `read_back` the copy is read again and checked before it
    gets its name. `before_commit` is called when all but the commit record is copied.

    Raises:
        DamagedError: the source is not what was saved.
        StorageError: the copy is not like it.
        OSError: reading or writing failed; nothing of the copy is left but the folder.
    """
    final = folder / source.name
    partial = folder / f".{source.name}.partial"
    folder.mkdir(parents=True, exist_ok=True)
    # What is left of a copy that was killed.
    discard(partial)
    try:
        try:
            text = (source / "commit.json").read_bytes()
            commit = read_commit(source)
        except ValueError as error:
            raise DamagedError(source, f"commit.json: {error}") from error
        at_url.fetch(source, commit["files"], commit["files"])
        partial.mkdir()
        for name, entry in commit["files"].items():
            (partial / name).parent.mkdir(parents=True, exist_ok=True)
            damage = _copy_file(source / name, partial / name, entry)
            if damage:
                raise DamagedError(source, f"{name}: {damage}")
        before_commit()
        (partial / "commit.json").write_bytes(text)
        sync(*sorted(partial.rglob("*")), partial)
        if read_back:
            _require_like(partial, source, final)
        if final.exists():
            remove_step(final)
        os.rename(partial, final)
        sync(folder)
    except BaseException:
        # Ctrl-C, too: the copy is made anew.
        discard(partial)
        raise
    return final


def change_record(step: Path, changes: Mapping[str, Any]) -> None:
    """Change what the record of a copied step says, and write its hash into the commit record.

    Only for a copy that nothing reads yet: a step that counts stays as it was saved.
    """
    record = strict_json.loads((step / RECORD).read_bytes())
    text = json.dumps(record | changes, indent=1, sort_keys=True, allow_nan=False)
    commit = read_commit(step)
    (step / RECORD).write_text(text, encoding="utf-8")
    hashed = hash_files(step, [RECORD])[RECORD]
    known = commit["files"][RECORD]
    # Format 1 has no hashes.
    commit["files"][RECORD] = {name: hashed[name] for name in known}
    (step / "commit.json").write_bytes(encode_commit(commit))
    sync(step / RECORD, step / "commit.json", step)


def _require_like(copy: Path, source: Path, final: Path) -> None:
    """StorageError: what is read of the copy, which is to become `final`, is not what was saved."""
    damage = find_damage(copy, read_commit(copy)["files"])
    if damage:
        raise StorageError(
            f"{final}: the copy is not like {source}: {damage}. Check that disk, then copy again."
        )


def _copy_file(source: Path, target: Path, entry: dict[str, Any]) -> str:
    """Copies one file, and returns what is wrong with the source, by its size and its hashes; empty
    if nothing is.
    """
    size = 0
    crcs: list[int] = []
    with source.open("rb", buffering=0) as read, target.open("wb", buffering=0) as written:
        while chunk := read.read(min(CHUNK_BYTES, BLOCK_BYTES - size % BLOCK_BYTES)):
            if size % BLOCK_BYTES == 0:
                crcs.append(0)
            crcs[-1] = crc32(chunk, crcs[-1])
            view = memoryview(chunk)
            while view:
                view = view[written.write(view) :]
            size += len(chunk)
    if size != entry["bytes"]:
        return f"has {size:,} bytes instead of {entry['bytes']:,}"
    expected = entry["crc32"]
    found = [f"{crc:08x}" for crc in crcs]
    if expected != found:
        return f"crc32 {expected} of its blocks was written, {found} is there"
    return ""


def discard(path: Path) -> None:
    """Remove what is left at a place, as far as possible; of a symbolic link the link alone.

    A folder is then made there by `mkdir`, which refuses what is there: nobody can have files
    written elsewhere through a link.
    """
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


# Ends the name of a step that is being removed.
_REMOVED = ".removed.partial"


def remove_step(path: Path, before_files: Callable[[], object] = lambda: None) -> None:
    """Removes a step. It is renamed first, so that half of it is never taken for a step."""
    partial = path.with_name(f".{path.name}{_REMOVED}")
    discard(partial)
    os.rename(path, partial)
    before_files()
    shutil.rmtree(partial)


def remove_here_and_at_url(path: Path, before_files: Callable[[], object] = lambda: None) -> None:
    """Remove a step as `remove_step` does; first at the URL, if this is a copy of the step
    there.
    """
    url = at_url.url_of(path)
    if url is not None:
        at_url.remove(url)
    remove_step(path, before_files)


def half_removed(folder: Path) -> list[Path]:
    """Return what is left of steps whose removal was interrupted: their space, under a hidden
    name.
    """
    return sorted(folder.glob(f".*{_REMOVED}"))
