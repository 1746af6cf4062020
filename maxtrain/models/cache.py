"""What generation keeps of the tokens that it has read: the caches of layers, and where in them a
pass writes and reads.

Rows are documents of their own, and each is as long as it is: its token t stands at column t. A
layer keeps its newest columns in a ring: column c lies at c modulo the ring's size. A ring that is
as large as a row may become never turns round, and is a plain cache; that of a layer with a window
needs no more room than the window and the tokens of one pass. The columns of a head lie one after
the other, [B, K, S, H], as products of one query with all of them want it.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.sharding import constrain


class KVCache(NamedTuple):
    """Keys and values of the newest columns; one layer's, or those of the layers at one place of
    the period, stacked on dim 0."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S Hv"]

    def by_columns(self) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K Hv"]]:
        """Keys and values of one layer, as `attention` takes them."""
        return self.k.swapaxes(1, 2), self.v.swapaxes(1, 2)


# By the name of the layer, or of the place in the period.
Caches = dict[str, KVCache]


def ring_size(columns: int, window: int | None, most_tokens: int) -> int:
    """How many columns a layer keeps.

    Args:
        columns: that a row may have.
        window: how many of them a token sees; None: all.
        most_tokens: of a row in one pass.
    """
    if window is None:
        return columns
    # The first token of a pass sees what is a window before it, when the last one is written.
    return min(columns, window + most_tokens)


def empty(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> KVCache:
    """A cache of keys and values of these shapes."""
    keys, values = shapes
    return KVCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))


def enlarged(caches: Caches, shapes: Caches) -> Caches:
    """Caches with room for more columns, as many as these shapes have. No ring that was too small
    for its rows, and turned round, becomes larger: it has the size of its window."""

    def with_room(old: Array, new: jax.ShapeDtypeStruct) -> Array:
        more = new.shape[-2] - old.shape[-2]
        padding = [(0, 0)] * (old.ndim - 2) + [(0, more), (0, 0)]
        return jnp.pad(old, padding)

    return jax.tree.map(with_room, caches, shapes)


def placed(caches: Caches) -> Caches:
    """The same, split over the mesh as rows and heads are."""

    def place(x: Array) -> Array:
        heads = "kv_heads"
        if x.shape[-3] == 1:
            # The one key that all heads share.
            heads = None
        stacked = [None] * (x.ndim - 4)
        return constrain(x, *stacked, "activation_batch", heads, None, None)

    return jax.tree.map(place, caches)


def take_rows(caches: Caches, rows: Int[Array, " R"]) -> Caches:
    """These rows; for one that is not there, the last one."""
    return jax.tree.map(lambda x: jnp.take(x, rows, axis=x.ndim - 4, mode="clip"), caches)


def put_rows(caches: Caches, new: Caches, rows: Int[Array, " R"]) -> Caches:
    """The caches with other contents in these rows; what is for a row that is not there is
    dropped."""

    def put(old: Array, other: Array) -> Array:
        if old.ndim == 4:
            return old.at[rows].set(other, mode="drop")
        return old.at[:, rows].set(other, mode="drop")

    return jax.tree.map(put, caches, new)


@dataclasses.dataclass(frozen=True)
class Extension:
    """The tokens that a pass adds to rows.

    Args:
        columns: [B, T] where each stands in its row; one after the other.
        is_token: [B, T] false for padding, which is behind a row's tokens and is not kept.
        from_start: all rows begin with this pass, so that its tokens see nothing but each other.
            Known when the program is compiled.
    """

    columns: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]
    from_start: bool = False

    def lengths(self) -> Int[Array, " B"]:
        """Columns of each row when the pass is over."""
        return self.columns[:, 0] + self.is_token.sum(axis=1)

    def mask(self, size: int) -> Mask:
        """Which of the entries of a ring of this size its tokens see."""
        last = self.lengths()[:, None] - 1
        # The newest column that lies at each place; negative where there is nothing yet.
        columns = last - (last - jnp.arange(size)) % size
        return Mask(
            self.columns,
            columns,
            self.is_token.astype(jnp.int32),
            jnp.where(columns >= 0, 1, -1),
        )

    def write(
        self, kept: Float[Array, "B K S H"], new: Float[Array, "B T K H"]
    ) -> Float[Array, "B K S H"]:
        """A ring with what is kept of the new tokens in it."""
        size = kept.shape[2]
        rows = jnp.arange(kept.shape[0])[:, None]
        # Padding goes to places that are not there.
        nowhere = size + jnp.arange(self.columns.shape[1])
        places = jnp.where(self.is_token, self.columns % size, nowhere)
        places_of_kept = kept.at[rows, :, places]
        return places_of_kept.set(new.astype(kept.dtype), mode="drop", unique_indices=True)
