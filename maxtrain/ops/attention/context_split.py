"""The order of sharded rows (context parallelism) on their way through the layers.

For ring attention, tokens are in zigzag order, which balances the work of all devices. A row is cut
into 2 C pieces for C devices, and device i has the pieces i and 2 C - 1 - i: one from the
beginning, with few visible keys, and one from the end, with many. Tokens come and leave in order;
in between, columns are data (`Mask`). Communication: the hidden states of a device, once each way.

Source: Brandon et al. 2023, https://arxiv.org/abs/2311.09431.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.ring import AXIS
from maxtrain.parallel.sharding import LENGTH, length_shards, partition_spec


class ContextSplit(NamedTuple):
    """The sharding of rows along the sequence; without a mesh that shards them, everything is
    unchanged.

    Attributes:
        exchange: as for `Mask`.
    """

    exchange: str | None

    @classmethod
    def of_rows(cls, length: int, kernel: str) -> "ContextSplit":
        """Return the split for rows of this length on the current mesh.

        Args:
            length: T. Rows that the mesh cannot split, such as those of a prompt, stay whole.
            kernel: the attention kernel: `ring` rotates keys, others get whole rows of some heads,
                and `eager` leaves the split to XLA.
        """
        shards = length_shards()
        if shards == 1 or length % (2 * shards) or kernel == "eager":
            return cls(None)
        if kernel == "ring":
            return cls("keys")
        return cls("heads")

    def enter(self, x: Array) -> Array:
        """Reorder an array [B, T, ...] for the layers."""
        if self.exchange != "keys":
            return x
        return _moved(x, _enter)

    def leave(self, x: Array) -> Array:
        """Restore the original order of an array in the order of the layers."""
        if self.exchange != "keys":
            return x
        return _moved(x, _leave)

    def mask(self, segments: Int[Array, "B T"]) -> Mask:
        """Return the mask of rows that attend to themselves, given their segments in the order of
        the layers."""
        if self.exchange != "keys":
            return Mask.of_rows(segments, self.exchange)
        columns = zigzag_columns(segments.shape[1], length_shards())
        return Mask(columns, columns, segments, segments, exchange=self.exchange)


def zigzag_columns(length: int, parts: int) -> Int[Array, " T"]:
    """Return the column of each token in zigzag order, over this number of devices."""
    piece = length // (2 * parts)
    pieces = jnp.arange(length).reshape(2 * parts, piece)
    order = []
    for i in range(parts):
        order += [i, 2 * parts - 1 - i]
    return pieces[jnp.array(order)].reshape(-1)


def _moved(x: Array, move: Callable[[Array], Array]) -> Array:
    """Apply a reordering on all devices."""
    mesh = jax.sharding.get_abstract_mesh()
    rest = (None,) * (x.ndim - 2)
    spec = partition_spec(("activation_batch", LENGTH, *rest), mesh.shape)
    return jax.shard_map(move, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _owner(piece: int, parts: int) -> int:
    """Return the device that has a piece."""
    return min(piece, 2 * parts - 1 - piece)


def _enter(x: Array) -> Array:
    """Exchange pieces: a device with pieces 2 i and 2 i + 1 gets i and 2 C - 1 - i. One of these is
    even and one is odd, so each device sends and receives one of both kinds."""
    parts = jax.lax.axis_size(AXIS)
    even, odd = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(even, AXIS, [(i, _owner(2 * i, parts)) for i in range(parts)])
    odd = jax.lax.ppermute(odd, AXIS, [(i, _owner(2 * i + 1, parts)) for i in range(parts)])
    # Piece i of device i is even if i is.
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    first = jnp.where(is_even, even, odd)
    second = jnp.where(is_even, odd, even)
    return jnp.concatenate([first, second], axis=1)


def _leave(x: Array) -> Array:
    """Undo `_enter`."""
    parts = jax.lax.axis_size(AXIS)
    first, second = jnp.split(x, 2, axis=1)
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    even = jnp.where(is_even, first, second)
    odd = jnp.where(is_even, second, first)
    even = jax.lax.ppermute(even, AXIS, [(_owner(2 * i, parts), i) for i in range(parts)])
    odd = jax.lax.ppermute(odd, AXIS, [(_owner(2 * i + 1, parts), i) for i in range(parts)])
    return jnp.concatenate([even, odd], axis=1)
