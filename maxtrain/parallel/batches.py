"""From this host's rows to global arrays on the mesh."""

import collections
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from maxtrain.parallel.sharding import named_sharding


class BatchLayout:
    """Which rows of a global batch [batch_size, length] this host reads, and how they become global arrays.

    Rows come from the sharding itself, so that uneven rows per host and a tensor axis across hosts (the same rows on
    several of them) need no thought elsewhere.
    """

    def __init__(self, mesh: Mesh, batch_size: int, length: int):
        self.shape = (batch_size, length)
        self.sharding: NamedSharding = named_sharding(mesh, ("activation_batch", "activation_length"), self.shape, "batch")
        self.by_row: NamedSharding = named_sharding(mesh, ("activation_batch",), self.shape[:1], "batch")
        indices = self.sharding.addressable_devices_indices_map(self.shape).values()
        self.rows = np.unique(np.concatenate([np.arange(batch_size)[index[0]] for index in indices if index]))

    def to_global(self, arrays: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """Global arrays [batch_size, length], or [batch_size], from this host's rows, in the order of `rows`."""

        def one(local: np.ndarray) -> jax.Array:
            def part(index: Any) -> np.ndarray:
                wanted = np.arange(self.shape[0])[index[0]]
                first = int(np.searchsorted(self.rows, wanted[0]))
                return local[first : first + len(wanted), *index[1:]]

            sharding = self.sharding if local.ndim == 2 else self.by_row
            return jax.make_array_from_callback(self.shape[: local.ndim], sharding, part)

        return {name: one(array) for name, array in arrays.items()}


def prefetch[T](items: Iterable[T], ahead: int) -> Iterator[T]:
    """The same items, taken `ahead` earlier than they are asked for, so that copies to the device overlap with steps."""
    waiting: collections.deque[T] = collections.deque()
    for item in items:
        waiting.append(item)
        if len(waiting) > ahead:
            yield waiting.popleft()
    yield from waiting
