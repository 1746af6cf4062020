"""Rows that are split over devices, on their way through the layers.

For a ring, tokens are put in zig-zag order, in which every device has as much to do as the others:
a row is cut into 2 C pieces for C devices, and device i has the pieces i and 2 C - 1 - i, of the
beginning, which see little, and of the end, which see much. Tokens come in order and leave in
order; what is between sees columns as data (`Mask`). Sent, once each way: the hidden states of a
device.

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
    """How rows are split; without a mesh that does, everything stays as it is.

    Attributes:
        exchange: as of `Mask`.
    """

    exchange: str | None

    @classmethod
    def of_rows(cls, length: int, kernel: str) -> "ContextSplit":
        """Of rows of so many tokens on the current mesh.

        Args:
            length: T. Rows that the mesh can't split, such as those of a prompt, are whole.
            kernel: that attends: `ring` meets all keys, others get whole rows of some heads, and
                `eager` leaves it to XLA.
        """
        shards = length_shards()
        if shards == 1 or length % (2 * shards) or kernel == "eager":
            return cls(None)
        if kernel == "ring":
            return cls("keys")
        return cls("heads")

    def enter(self, x: Array) -> Array:
        """An array [B, T, ...] in the order in which it goes through the layers."""
        if self.exchange != "keys":
            return x
        return _moved(x, _enter)

    def leave(self, x: Array) -> Array:
        """An array in the order of the layers, in its own again."""
        if self.exchange != "keys":
            return x
        return _moved(x, _leave)

    def mask(self, segments: Int[Array, "B T"]) -> Mask:
        """Rows that see themselves, by their segments in the order of the layers."""
        if self.exchange != "keys":
            return Mask.of_rows(segments, self.exchange)
        columns = zigzag_columns(segments.shape[1], length_shards())
        return Mask(columns, columns, segments, segments, exchange=self.exchange)


def zigzag_columns(length: int, parts: int) -> Int[Array, " T"]:
    """The column of each token in zig-zag order, over so many devices."""
    piece = length // (2 * parts)
    pieces = jnp.arange(length).reshape(2 * parts, piece)
    order = []
    for i in range(parts):
        order += [i, 2 * parts - 1 - i]
    return pieces[jnp.array(order)].reshape(-1)


def _moved(x: Array, move: Callable[[Array], Array]) -> Array:
    mesh = jax.sharding.get_abstract_mesh()
    rest = (None,) * (x.ndim - 2)
    spec = partition_spec(("activation_batch", LENGTH, *rest), mesh.shape)
    return jax.shard_map(move, in_specs=spec, out_specs=spec, check_vma=False)(x)


def _owner(piece: int, parts: int) -> int:
    """The device that has a piece."""
    return min(piece, 2 * parts - 1 - piece)


def _enter(x: Array) -> Array:
    """A device has the pieces 2 i and 2 i + 1, and gets i and 2 C - 1 - i. Of these one is even and
    one is odd, so that each device sends and gets one of both kinds."""
    parts = jax.lax.axis_size(AXIS)
    even, odd = jnp.split(x, 2, axis=1)
    even = jax.lax.ppermute(even, AXIS, [(i, _owner(2 * i, parts)) for i in range(parts)])
    odd = jax.lax.ppermute(odd, AXIS, [(i, _owner(2 * i + 1, parts)) for i in range(parts)])
    # Of device i, piece i is even if i is.
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    first = jnp.where(is_even, even, odd)
    second = jnp.where(is_even, odd, even)
    return jnp.concatenate([first, second], axis=1)


def _leave(x: Array) -> Array:
    parts = jax.lax.axis_size(AXIS)
    first, second = jnp.split(x, 2, axis=1)
    is_even = jax.lax.axis_index(AXIS) % 2 == 0
    even = jnp.where(is_even, first, second)
    odd = jnp.where(is_even, second, first)
    even = jax.lax.ppermute(even, AXIS, [(_owner(2 * i, parts), i) for i in range(parts)])
    odd = jax.lax.ppermute(odd, AXIS, [(_owner(2 * i + 1, parts), i) for i in range(parts)])
    return jnp.concatenate([even, odd], axis=1)
