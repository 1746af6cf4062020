"""Arrays in plain files, read and checked in one pass: no byte is read twice, none is copied that
lies where it is needed.

One process saves every shard of an array as a file of its own, `arrays/NAME/1.0` beside
`arrays/NAME/.zarray`: zarr 2, not compressed, which Orbax and others read, too. What is not like
that (steps of several processes, older ones) is read by Orbax.
"""

import concurrent.futures
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from zlib_ng.zlib_ng import crc32

from maxtrain.checkpoint.integrity import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Files,
    describe_damage,
    find_damage,
)

_ALIGNMENT = 64  # bytes; what lies so, a CPU device takes as it is
Arrived = Callable[[str, jax.Array], object]  # is told the name of an array, and the array


class Piece(NamedTuple):
    """A file with a part of an array, in C order: its name, and the part that it has."""

    file: str
    part: tuple[slice, ...]


def read_plain(
    path: Path,
    files: Files,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    arrived: Arrived | None = None,
) -> tuple[dict[str, jax.Array] | None, str]:
    """The arrays as asked for, None if they do not lie in plain files; and what is wrong with the
    files, empty if nothing is.

    `arrived` is called with each array that is there while others are read; one of a damaged file
    may be among them.

    A process reads, of the large files, those with parts that its devices hold, and all small ones;
    what it has read of damaged files is of no use. OSError: one can't be read.
    """
    keys = any(jnp.issubdtype(target.dtype, jax.dtypes.prng_key) for target in targets.values())
    if keys or any(f"arrays/{name}/.zarray" not in files for name in targets):
        return None, ""
    small = {
        name: entry
        for name, entry in files.items()
        if not re.fullmatch(r"arrays/.*/\d[\d.]*", name)
    }
    if what := find_damage(path, small):
        return None, what
    found = {name: _pieces(path, files, name) for name in targets}
    pieces = {name: pieces for name, pieces in found.items() if pieces is not None}
    if len(pieces) < len(targets):
        return None, ""
    arrays, damage = {}, []
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        plans = {name: _Plan(target, pieces[name]) for name, target in targets.items()}
        jobs = {
            name: [
                (piece, flat, _submit(threads, path, files, piece, flat))
                for piece, flat in plan.reads
            ]
            for name, plan in plans.items()
        }
        for name, plan in plans.items():
            for piece, flat, futures in jobs.pop(name):
                damage += filter(None, [future.result() for future in futures])
                plan.spread(piece, flat)
            arrays[name] = plan.to_array()
            if arrived:
                arrived(name, arrays[name])
    return arrays, min(damage, default="")


def _pieces(path: Path, files: Files, name: str) -> list[Piece] | None:
    """The files of an array; None if it is compressed, or its files are not all there."""
    folder = f"arrays/{name}"
    zarr = json.loads((path / folder / ".zarray").read_bytes())
    shape, chunks = zarr["shape"], zarr["chunks"]
    plain = (
        zarr["order"] == "C"
        and not zarr.get("compressor")
        and not zarr.get("filters")
        and zarr["dtype"][0] != ">"
    )
    if not plain or any(n % c for n, c in zip(shape, chunks, strict=True)):
        return None
    pieces = []
    for place in itertools.product(*(range(n // c) for n, c in zip(shape, chunks))):
        part = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks))
        pieces.append(
            Piece(
                f"{folder}/{zarr.get('dimension_separator', '.').join(map(str, place)) or '0'}",
                part,
            )
        )
    return pieces if all(piece.file in files for piece in pieces) else None


class _Plan:
    """What of one array this process needs: a buffer for each part, and the files that fill
    them."""

    def __init__(self, target: jax.ShapeDtypeStruct, pieces: Sequence[Piece]):
        self.target, self.buffers = target, {}
        assert target.sharding is not None
        self.devices = target.sharding.addressable_devices_indices_map(target.shape)
        for index in self.devices.values():
            part = _part(index, target.shape)
            if _key(part) not in self.buffers:
                self.buffers[_key(part)] = (
                    part,
                    _empty([s.stop - s.start for s in part], target.dtype),
                )
        self.reads: list[tuple[Piece, np.ndarray]] = []
        for piece in pieces:
            if views := self._views(piece):
                shape = [s.stop - s.start for s in piece.part]
                fits = (
                    len(views) == 1
                    and list(views[0][0].shape) == shape
                    and views[0][0].flags.c_contiguous
                )
                self.reads.append((piece, views[0][0] if fits else _empty(shape, target.dtype)))

    def _views(self, piece: Piece) -> list[tuple[np.ndarray, tuple[slice, ...]]]:
        """Where the piece overlaps a buffer: that part of the buffer, and the same part of the
        piece."""
        found = []
        for part, buffer in self.buffers.values():
            both = [
                slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(part, piece.part)
            ]
            if all(s.start < s.stop for s in both):
                ours, theirs = (
                    tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(both, origin))
                    for origin in (part, piece.part)
                )
                found.append((buffer[(*ours, ...)], theirs))
        return found

    def spread(self, piece: Piece, read: np.ndarray) -> None:
        """Copies what was read to where it is needed, if it was not read to there."""
        for view, part in self._views(piece):
            if not np.shares_memory(view, read):
                view[...] = read[(*part, ...)]

    def to_array(self) -> jax.Array:
        shards = []
        for device, index in self.devices.items():
            shards.append(
                jax.device_put(self.buffers[_key(_part(index, self.target.shape))][1], device)
            )
        self.buffers.clear()
        return jax.make_array_from_single_device_arrays(
            self.target.shape, self.target.sharding, shards
        )


def _part(index: tuple[slice, ...] | None, shape: Sequence[int]) -> tuple[slice, ...]:
    """What of an array a device has, with both ends of every slice."""
    return tuple(slice(*s.indices(n)[:2]) for s, n in zip(index or (), shape))


def _key(part: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in part)


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _submit(
    threads: concurrent.futures.Executor, path: Path, files: Files, piece: Piece, target: np.ndarray
) -> list[concurrent.futures.Future[str]]:
    flat, entry = memoryview(target.reshape(-1).view(np.uint8)), files[piece.file]
    assert entry["bytes"] == len(flat), piece.file
    blocks = range(0, len(flat), BLOCK_BYTES)
    return [
        threads.submit(_read_block, path, piece.file, entry, flat, number)
        for number in range(len(blocks))
    ]


def _read_block(path: Path, name: str, entry: dict[str, Any], flat: memoryview, number: int) -> str:
    """Reads one block of a file to its place; what is wrong with it."""
    crc, at, stop = 0, number * BLOCK_BYTES, min((number + 1) * BLOCK_BYTES, len(flat))
    with (path / name).open("rb", buffering=0) as file:
        file.seek(at)
        while at < stop and (count := file.readinto(flat[at : min(at + CHUNK_BYTES, stop)])):
            crc, at = crc32(flat[at : at + count], crc), at + count
    return describe_damage(name, entry, number, f"{crc:08x}")
