"""Conversion of this host's rows to global arrays on the mesh."""

import collections
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from zlib_ng.zlib_ng import crc32

from data_pipeline.loader.packing import HostSlice
from maxtrain.parallel.sharding import named_sharding


class BatchLayout:
    """Layout of a global batch [batch_size, length]: the part that this host reads, and its
    placement.

    The part comes from the sharding itself, so that uneven rows per host, rows that lie on several
    hosts and a tensor axis across hosts (the same part on several of them) need no
    special case elsewhere. `identity` is alike for equal parts.
    """

    def __init__(self, mesh: Mesh, batch_size: int, length: int):
        self.shape = (batch_size, length)
        self.sharding: NamedSharding = named_sharding(
            mesh, ("activation_batch", "activation_length"), self.shape, "batch"
        )
        self.by_row: NamedSharding = named_sharding(
            mesh, ("activation_batch",), (batch_size,), "batch"
        )
        of_devices = self.sharding.addressable_devices_indices_map(self.shape).values()
        rows_of_devices = []
        columns = []
        for index in of_devices:
            if index:
                row_slice, column_slice = index
                rows_of_devices.append(np.arange(batch_size)[row_slice])
                columns.append(column_slice.indices(length))
        rows = np.unique(np.concatenate(rows_of_devices))
        first = min(start for start, _, _ in columns)
        end = max(stop for _, stop, _ in columns)
        self.part = HostSlice(rows, slice(first, end))
        self.identity = f"{crc32(rows.tobytes()):08x} {first} {end}"

    def own_part(self, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return this host's part of whole arrays [batch_size, length, ...] or [batch_size]."""
        rows, columns = self.part
        found = {}
        for name, array in arrays.items():
            of_rows = array[rows]
            if array.ndim > 1:
                of_rows = np.ascontiguousarray(of_rows[:, columns])
            found[name] = of_rows
        return found

    def to_global(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays [batch_size, length, ...], or [batch_size], from this host's part."""
        rows, columns = self.part

        def place(local: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                wanted = np.arange(self.shape[0])[index[0]]
                first = int(np.searchsorted(rows, wanted[0]))
                of_rows = local[first : first + len(wanted)]
                if local.ndim == 1:
                    return of_rows
                start, stop, _ = index[1].indices(self.shape[1])
                return of_rows[:, start - columns.start : stop - columns.start]

            sharding = self.sharding
            if local.ndim == 1:
                sharding = self.by_row
            shape = (*self.shape, *local.shape[2:])[: local.ndim]
            return jax.make_array_from_callback(shape, sharding, part)

        return {name: place(array) for name, array in arrays.items()}


class PerToken(NamedTuple):
    """Batch array with `count` numbers for each token, [B, T, count]."""

    count: int
    dtype: str


def abstract_batch(
    mesh: Mesh,
    batch_size: int,
    length: int,
    arrays: Mapping[str, str | PerToken] = MappingProxyType({}),
) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch as shapes with shardings, for programs that are only compiled.

    See data_pipeline.loader.loader.HostBatch. `arrays`: more of them, as `Objective.arrays` has
    them.
    """
    shape = (batch_size, length)
    whole = named_sharding(mesh, ("activation_batch", "activation_length"), shape, "batch")
    by_row = named_sharding(mesh, ("activation_batch",), (batch_size,), "batch")
    batch = {}
    for name in ("inputs", "targets", "segment_ids", "positions"):
        batch[name] = jax.ShapeDtypeStruct(shape, np.int32, sharding=whole)
    batch["loss_mask"] = jax.ShapeDtypeStruct(shape, np.float32, sharding=whole)
    batch["source"] = jax.ShapeDtypeStruct((batch_size,), np.int32, sharding=by_row)
    for name, dims in arrays.items():
        if isinstance(dims, PerToken):
            dtype = np.dtype(dims.dtype)
            batch[name] = jax.ShapeDtypeStruct((*shape, dims.count), dtype, sharding=whole)
        elif dims == "BT":
            batch[name] = jax.ShapeDtypeStruct(shape, np.float32, sharding=whole)
        else:
            batch[name] = jax.ShapeDtypeStruct((batch_size,), np.float32, sharding=by_row)
    return batch


def prefetch[T](items: Iterable[T], ahead: int) -> Iterator[T]:
    """Yield the same items, taken up to `ahead` items before they are requested.

    So copies to the device overlap with steps.
    """
    waiting: collections.deque[T] = collections.deque()
    failure = None
    try:
        for item in items:
            waiting.append(item)
            if len(waiting) > ahead:
                yield waiting.popleft()
    # It is raised after the items before it.
    except Exception as error:
        failure = error
    yield from waiting
    if failure:
        raise failure
