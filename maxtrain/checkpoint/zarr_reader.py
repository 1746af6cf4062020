"""Arrays in plain files, read and checked in one pass.

No byte is read twice, and none is copied that lies where it is needed.

One process saves every shard of an array as a file of its own, `arrays/NAME/1.0` beside
`arrays/NAME/.zarray`: zarr 2, not compressed, which Orbax and others read, too. What is not like
that (steps of several processes, older ones) is read by Orbax.
"""

import concurrent.futures
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding
from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from data_pipeline.base.errors import DamagedError
from maxtrain.checkpoint.integrity import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Files,
    describe_damage,
    find_damage,
)

# In bytes: an array that begins at a multiple of it, a CPU device takes as it is.
_ALIGNMENT = 64
# Files that one array may be divided into. Each device saves one.
_MAX_PIECES = 1 << 20
# Called with the name of an array, and the array.
Arrived = Callable[[str, jax.Array], object]
# Called with the names of files that are about to be read.
Fetch = Callable[[Iterable[str]], object]


class ZarrChunk(NamedTuple):
    """A file with a part of an array, in C order: its name, and the part that it has."""

    file: str
    part: tuple[slice, ...]


def read_plain(
    path: Path,
    files: Files,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    arrived: Arrived | None = None,
    fetch: Fetch | None = None,
) -> tuple[dict[str, jax.Array] | None, str]:
    """Reads arrays from plain files, and checks the files.

    A process reads, of the large files, those with parts that its devices hold, and all small ones.

    Args:
        arrived: is called with each array that is there while others are read; one of a damaged
            file may be among them.
        fetch: is called with the names of files before they are read.

    Returns:
        The requested arrays, None if they do not lie in plain files; and what is wrong with the
        files, empty if nothing is. What was read of damaged files is of no use.

    Raises:
        DamagedError: the metadata of an array is damaged.
        OSError: a file can't be read.
    """
    keys = any(jnp.issubdtype(target.dtype, jax.dtypes.prng_key) for target in targets.values())
    if keys or any(f"arrays/{name}/.zarray" not in files for name in targets):
        return None, ""
    small = {name: entry for name, entry in files.items() if not is_part_of_array(name)}
    if fetch:
        fetch(small)
    damage = find_damage(path, small)
    if damage:
        return None, damage
    pieces = {}
    for name in targets:
        pieces_of_array = _pieces(path, files, name, targets[name])
        if pieces_of_array is None:
            return None, ""
        pieces[name] = pieces_of_array
    return _read_pieces(path, files, targets, pieces, arrived, fetch)


def is_part_of_array(name: str) -> bool:
    """Return whether a file of a step, by its name, is a part of an array and nothing else."""
    return re.fullmatch(r"arrays/.*/\d[\d.]*", name) is not None


def needed_parts(path: Path, files: Files, targets: Mapping[str, jax.ShapeDtypeStruct]) -> set[str]:
    """The files with parts of arrays that devices of this process hold; all files if an array does
    not lie in plain ones.

    Args:
        path: of a step whose small files are here.
    """
    needed = set()
    for name, target in targets.items():
        try:
            pieces = _pieces(path, files, name, target)
        # Damage is reported when the array is read.
        except (OSError, DamagedError):
            pieces = None
        if pieces is None:
            return set(files)
        parts = _parts_here(target)
        for piece in pieces:
            if any(_overlap(part, piece.part) is not None for part in parts):
                needed.add(piece.file)
    return needed


def _parts_here(target: jax.ShapeDtypeStruct) -> list[tuple[slice, ...]]:
    """The parts of an array that devices of this process hold, each once."""
    assert target.sharding is not None
    devices = target.sharding.addressable_devices_indices_map(target.shape)
    parts = {}
    for index in devices.values():
        part = _part(index, target.shape)
        parts[_key(part)] = part
    return list(parts.values())


def _overlap(a: Sequence[slice], b: Sequence[slice]) -> list[slice] | None:
    """Return what two parts have in common; None: nothing."""
    both = [slice(max(x.start, y.start), min(x.stop, y.stop)) for x, y in zip(a, b)]
    if all(s.start < s.stop for s in both):
        return both
    return None


def _read_pieces(
    path: Path,
    files: Files,
    targets: Mapping[str, jax.ShapeDtypeStruct],
    pieces: Mapping[str, Sequence[ZarrChunk]],
    arrived: Arrived | None,
    fetch: Fetch | None,
) -> tuple[dict[str, jax.Array], str]:
    """The arrays, and what is wrong with their files; empty if nothing is."""
    arrays = {}
    damage: list[str] = []
    with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        plans = {name: _ReadPlan(target, pieces[name]) for name, target in targets.items()}
        if fetch:
            fetch([piece.file for plan in plans.values() for piece, _ in plan.reads])
        jobs = {}
        for name, plan in plans.items():
            jobs[name] = [
                (piece, memory, _submit(threads, path, files, piece, memory))
                for piece, memory in plan.reads
            ]
        for name, plan in plans.items():
            for piece, memory, futures in jobs.pop(name):
                problems = [future.result() for future in futures]
                damage += [what for what in problems if what]
                plan.spread(piece, memory)
            arrays[name] = plan.to_array()
            if arrived:
                arrived(name, arrays[name])
    return arrays, min(damage, default="")


def _pieces(
    path: Path, files: Files, name: str, target: jax.ShapeDtypeStruct
) -> list[ZarrChunk] | None:
    """The files of an array; None if it is compressed, or its files are not all there.

    Raises:
        DamagedError: its metadata is damaged, or claims another shape than the target's.
    """
    folder = f"arrays/{name}"
    zarr = _read_zarr(path / folder / ".zarray", target)
    shape = zarr["shape"]
    chunks = zarr["chunks"]
    separator = str(zarr.get("dimension_separator", "."))
    plain = (
        zarr.get("order") == "C"
        and not zarr.get("compressor")
        and not zarr.get("filters")
        and str(zarr.get("dtype"))[:1] != ">"
    )
    if not plain or any(n % c for n, c in zip(shape, chunks)):
        return None
    pieces = []
    for place in itertools.product(*(range(n // c) for n, c in zip(shape, chunks))):
        # An array without dims has one file, by the name of 0.
        name = separator.join(map(str, place)) or "0"
        part = tuple(slice(i * c, (i + 1) * c) for i, c in zip(place, chunks))
        pieces.append(ZarrChunk(f"{folder}/{name}", part))
    if any(piece.file not in files for piece in pieces):
        return None
    num_bytes = math.prod(chunks) * target.dtype.itemsize
    for piece in pieces:
        if files[piece.file].get("bytes") != num_bytes:
            raise DamagedError(path, f"{piece.file} must have {num_bytes:,} bytes")
    return pieces


def _read_zarr(file: Path, target: jax.ShapeDtypeStruct) -> dict[str, Any]:
    """The metadata of an array in zarr 2, whose shape and chunks are bounded by the shape that the
    caller wants. A file may claim any numbers, and memory is taken for what it claims.

    Raises:
        DamagedError: the file is not such metadata, or is of an array with another shape.
    """
    folder = file.parent
    try:
        zarr = strict_json.read(file)
        shape = zarr["shape"]
        chunks = zarr["chunks"]
    except (ValueError, LookupError, TypeError) as error:
        raise DamagedError(
            folder, f"its .zarray is not the metadata of an array ({error})"
        ) from error
    if not isinstance(shape, list) or tuple(shape) != target.shape:
        what = f"its .zarray has the shape {str(shape)[:200]}, not {list(target.shape)}"
        raise DamagedError(folder, what)
    fits = (
        isinstance(chunks, list)
        and len(chunks) == len(shape)
        and all(type(c) is int and 1 <= c <= max(n, 1) for n, c in zip(shape, chunks))
        and math.prod(math.ceil(n / c) for n, c in zip(shape, chunks)) <= _MAX_PIECES
    )
    if not fits:
        what = f"its .zarray divides the shape {shape} into chunks of {str(chunks)[:200]}"
        raise DamagedError(folder, what)
    return zarr


class _ReadPlan:
    """Read plan of one array in this process: a buffer for each part, and the files to fill it."""

    def __init__(self, target: jax.ShapeDtypeStruct, pieces: Sequence[ZarrChunk]):
        self.target = target
        # By the key of the part that a buffer holds: the part, and the buffer.
        self.buffers = {}
        assert target.sharding is not None
        self.devices = target.sharding.addressable_devices_indices_map(target.shape)
        for part in _parts_here(target):
            self.buffers[_key(part)] = (part, aligned_empty(_shape(part), target.dtype))
        self.reads: list[tuple[ZarrChunk, np.ndarray]] = []
        for piece in pieces:
            views = [view for view, _ in self._views(piece)]
            if views:
                self.reads.append((piece, self._memory(piece, views)))

    def _memory(self, piece: ZarrChunk, views: Sequence[np.ndarray]) -> np.ndarray:
        """Return where a piece is read to: at once to the one place that needs it, if it lies there
        in one run; else to memory of its own.
        """
        shape = _shape(piece.part)
        if len(views) == 1:
            view = views[0]
            if list(view.shape) == shape and view.flags.c_contiguous:
                return view
        return aligned_empty(shape, self.target.dtype)

    def _views(self, piece: ZarrChunk) -> list[tuple[np.ndarray, tuple[slice, ...]]]:
        """Return where the piece overlaps a buffer: that part of it, and the same part of the
        piece.
        """
        found = []
        for part, buffer in self.buffers.values():
            both = _overlap(part, piece.part)
            if both is not None:
                ours = _relative(both, part)
                theirs = _relative(both, piece.part)
                found.append((buffer[(*ours, ...)], theirs))
        return found

    def spread(self, piece: ZarrChunk, read: np.ndarray) -> None:
        """Copies what was read to where it is needed, if it was not read to there."""
        for view, part in self._views(piece):
            if not np.shares_memory(view, read):
                view[...] = read[(*part, ...)]

    def to_array(self) -> jax.Array:
        shards = []
        for device, index in self.devices.items():
            key = _key(_part(index, self.target.shape))
            _, buffer = self.buffers[key]
            there = SingleDeviceSharding(device, memory_kind=self.target.sharding.memory_kind)
            shards.append(jax.device_put(buffer, there))
        self.buffers.clear()
        return jax.make_array_from_single_device_arrays(
            self.target.shape, self.target.sharding, shards
        )


def _part(index: tuple[slice, ...] | None, shape: Sequence[int]) -> tuple[slice, ...]:
    """Return what of an array a device has, with both ends of every slice."""
    part = []
    for dim, size in zip(index or (), shape):
        start, stop, _ = dim.indices(size)
        part.append(slice(start, stop))
    return tuple(part)


def _shape(part: Sequence[slice]) -> list[int]:
    return [s.stop - s.start for s in part]


def _relative(part: Sequence[slice], origin: Sequence[slice]) -> tuple[slice, ...]:
    """A part, counted from where `origin` begins."""
    return tuple(slice(s.start - o.start, s.stop - o.start) for s, o in zip(part, origin))


def _key(part: tuple[slice, ...]) -> tuple[tuple[int, int], ...]:
    return tuple((s.start, s.stop) for s in part)


def aligned_empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """New memory for an array that a CPU device takes as it is, without a copy."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _submit(
    threads: concurrent.futures.Executor,
    path: Path,
    files: Files,
    piece: ZarrChunk,
    target: np.ndarray,
) -> list[concurrent.futures.Future[str]]:
    """Has every block of a file read to its place, by several threads."""
    flat = memoryview(target.reshape(-1).view(np.uint8))
    entry = files[piece.file]
    assert entry["bytes"] == len(flat), piece.file
    blocks = range(0, len(flat), BLOCK_BYTES)
    return [
        threads.submit(_read_block, path, piece.file, entry, flat, number)
        for number in range(len(blocks))
    ]


def _read_block(path: Path, name: str, entry: dict[str, Any], flat: memoryview, number: int) -> str:
    """Reads one block of a file to its place; what is wrong with it."""
    crc = 0
    at = number * BLOCK_BYTES
    stop = min(at + BLOCK_BYTES, len(flat))
    with (path / name).open("rb", buffering=0) as file:
        file.seek(at)
        while at < stop:
            count = file.readinto(flat[at : min(at + CHUNK_BYTES, stop)])
            if not count:
                break
            crc = crc32(flat[at : at + count], crc)
            at += count
    return describe_damage(name, entry, number, f"{crc:08x}")
