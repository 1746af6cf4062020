"""From this host's rows to global arrays on the mesh."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from zlib_ng.zlib_ng import crc32

from data_pipeline.packing import Part
from maxtrain.parallel.sharding import named_sharding


class BatchLayout:
    """Which part of a global batch [batch_size, length] this host reads, and how it becomes global
    arrays.

    The part comes from the sharding itself, so that uneven rows per host, rows that lie on several
    hosts and a tensor axis across hosts (the same part on several of them) need no thought
    elsewhere. `identity` is alike for equal parts.
    """

    def __init__(self, mesh: Mesh, batch_size: int, length: int):
        self.shape = (batch_size, length)
        self.sharding: NamedSharding = named_sharding(
            mesh, ("activation_batch", "activation_length"), self.shape, "batch"
        )
        self.by_row: NamedSharding = named_sharding(
            mesh, ("activation_batch",), self.shape[:1], "batch"
        )
        indices = [
            index
            for index in self.sharding.addressable_devices_indices_map(self.shape).values()
            if index
        ]
        rows = np.unique(np.concatenate([np.arange(batch_size)[index[0]] for index in indices]))
        columns = [index[1].indices(length) for index in indices]
        first, end = min(start for start, _, _ in columns), max(stop for _, stop, _ in columns)
        self.part = Part(rows, slice(first, end))
        self.identity = f"{crc32(rows.tobytes()):08x} {first} {end}"

    def to_global(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays [batch_size, length], or [batch_size], from this host's part of them."""
        rows, columns = self.part

        def one(local: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                wanted = np.arange(self.shape[0])[index[0]]
                first = int(np.searchsorted(rows, wanted[0]))
                of_rows = local[first : first + len(wanted)]
                if local.ndim == 1:
                    return of_rows
                start, stop, _ = index[1].indices(self.shape[1])
                return of_rows[:, start - columns.start : stop - columns.start]

            sharding = self.sharding if local.ndim == 2 else self.by_row
            return jax.make_array_from_callback(self.shape[: local.ndim], sharding, part)

        return {name: one(array) for name, array in arrays.items()}


def abstract_batch(mesh: Mesh, batch_size: int, length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """A global batch as shapes with shardings, for programs that are only compiled; see
    data_pipeline.loader.Batch."""
    whole = named_sharding(
        mesh, ("activation_batch", "activation_length"), (batch_size, length), "batch"
    )
    by_row = named_sharding(mesh, ("activation_batch",), (batch_size,), "batch")
    names = dict.fromkeys(("inputs", "targets", "segment_ids", "positions"), np.int32) | {
        "loss_mask": np.float32
    }
    batch = {
        name: jax.ShapeDtypeStruct((batch_size, length), dtype, sharding=whole)
        for name, dtype in names.items()
    }
    return batch | {"source": jax.ShapeDtypeStruct((batch_size,), np.int32, sharding=by_row)}


def prefetch[T](items: Iterable[T], ahead: int) -> Iterator[T]:
    """The same items, taken `ahead` earlier than they are asked for, so that copies to the device
    overlap with steps."""
    waiting: collections.deque[T] = collections.deque()
    failure = None
    try:
        for item in items:
            waiting.append(item)
            if len(waiting) > ahead:
                yield waiting.popleft()
    except Exception as error:  # comes after the items before it
        failure = error
    yield from waiting
    if failure:
        raise failure
