"""KV caches of layers, and the columns that a pass writes and reads.

Rows are documents of their own, with individual lengths: token t of a row has column t. There are
two layouts:

* A ring for each row: column c is at c modulo the ring's size. A ring as large as the longest row
never wraps around, and is a plain cache. That of a layer with a window needs only room for the
window and the tokens of one pass. The columns of a head are contiguous, [B, K, S, H], as needed for
products of one query with all of them.
* Pages, for layers without a window: a pool [P, K, S, H] of P pages with S columns each that all
rows share. A table [B, M] lists the pages of a row: column c is in its page c // S. Rows with an
equal prefix can share pages, and no row has more than it needs. Pages are gathered before a
product, which reads them once more.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.sharding import constrain

# Number of columns of a page.
PAGE = 64


class KVCache(NamedTuple):
    """Keys and values of the newest columns, of one layer, or of the layers at one place of the
    period, stacked on dim 0."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S Hv"]


# Caches by the name of the layer, or of the place in the period.
Caches = dict[str, KVCache]


def ring_size(columns: int, window: int | None, most_tokens: int) -> int:
    """Return how many columns a layer keeps.

    Args:
        columns: most columns of a row.
        window: number of columns that a token sees; None: all.
        most_tokens: most tokens of a row in one pass.
    """
    if window is None:
        return columns
    # The first token of a pass needs a whole window before it, after the last token was written.
    return min(columns, window + most_tokens)


def empty(shapes: tuple[tuple[int, ...], tuple[int, ...]], dtype: str) -> KVCache:
    """Return a cache of keys and values of these shapes."""
    keys, values = shapes
    return KVCache(jnp.zeros(keys, dtype), jnp.zeros(values, dtype))


def enlarged(caches: Caches, shapes: Caches) -> Caches:
    """Return caches with room for more columns, as in these shapes. Rings that have wrapped around
    have the size of their window and do not grow."""

    def with_room(old: Array, new: jax.ShapeDtypeStruct) -> Array:
        more = new.shape[-2] - old.shape[-2]
        padding = [(0, 0)] * (old.ndim - 2) + [(0, more), (0, 0)]
        return jnp.pad(old, padding)

    return jax.tree.map(with_room, caches, shapes)


def placed(caches: Caches, paged: Set[str] = frozenset()) -> Caches:
    """Shard caches over the mesh like rows and heads; caches with pages, of the layers in `paged`,
    like heads only."""

    def place(x: Array, rows: str | None) -> Array:
        heads = "kv_heads"
        if x.shape[-3] == 1:
            # All heads share one key.
            heads = None
        stacked = [None] * (x.ndim - 4)
        return constrain(x, *stacked, rows, heads, None, None)

    found = {}
    for name, cache in caches.items():
        rows = None if name in paged else "activation_batch"
        found[name] = KVCache(place(cache.k, rows), place(cache.v, rows))
    return found


def take_rows(caches: Caches, rows: Int[Array, " R"], paged: Set[str] = frozenset()) -> Caches:
    """Select these rows; an index out of range gives the last row. Pages stay unchanged."""

    def take(x: Array) -> Array:
        return jnp.take(x, rows, axis=x.ndim - 4, mode="clip")

    return _of_rings(take, paged, caches)


def put_rows(
    caches: Caches, new: Caches, rows: Int[Array, " R"], paged: Set[str] = frozenset()
) -> Caches:
    """Replace these rows of the caches; rows out of range are dropped. Pages are the new ones."""

    def put(new: Array, old: Array) -> Array:
        if old.ndim == 4:
            return old.at[rows].set(new, mode="drop")
        return old.at[:, rows].set(new, mode="drop")

    return _of_rings(put, paged, new, caches)


def cleared(
    caches: Caches,
    is_row_kept: Bool[Array, " B"],
    is_page_kept: Bool[Array, " P"] | None,
    paged: Set[str],
) -> Caches:
    """Return the caches with zeros in all other rows and pages."""

    def clear(x: Array, is_kept: Array) -> Array:
        return jnp.where(is_kept[:, None, None, None], x, jnp.zeros((), x.dtype))

    found = {}
    for name, cache in caches.items():
        is_kept = is_row_kept
        if name in paged:
            assert is_page_kept is not None
            is_kept = is_page_kept
        found[name] = KVCache(clear(cache.k, is_kept), clear(cache.v, is_kept))
    return found


def _of_rings(
    change: Callable[..., Array], paged: Set[str], caches: Caches, *others: Caches
) -> Caches:
    """Apply a change to each array of the layers with rings."""
    found = {}
    for name, cache in caches.items():
        if name in paged:
            found[name] = cache
        else:
            found[name] = jax.tree.map(change, cache, *[other[name] for other in others])
    return found


@dataclasses.dataclass(frozen=True)
class CacheExtension:
    """The tokens that a pass adds to rows.

    Args:
        columns: [B, T] column of each token in its row; consecutive.
        is_token: [B, T] false for padding, which follows a row's tokens and is not stored.
        from_start: whether all rows begin with this pass, so that its tokens only see each other.
            Static.
        pages: [B, M] the pages of each row, for layers without a window; None: they have rings.
    """

    columns: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]
    from_start: bool = False
    pages: Int[Array, "B M"] | None = None

    def lengths(self) -> Int[Array, " B"]:
        """Return the number of columns of each row after the pass."""
        return self.columns[:, 0] + self.is_token.sum(axis=1)

    def mask(self, size: int) -> Mask:
        """Return the mask of its tokens over `size` stored columns."""
        last = self.lengths()[:, None] - 1
        # The newest column at each place; negative for empty places.
        columns = last - (last - jnp.arange(size)) % size
        return Mask(
            self.columns,
            columns,
            self.is_token.astype(jnp.int32),
            jnp.where(columns >= 0, 1, -1),
        )

    def write(
        self, kept: Float[Array, "B K S H"], new: Float[Array, "b T K H"], window: int | None
    ) -> Float[Array, "B K S H"]:
        """Write the new tokens into the cache of a layer with this window."""
        T = self.columns.shape[1]
        size = kept.shape[2]
        if self.pages is not None and window is None:
            most = self.pages.shape[1] - 1
            numbers = jnp.minimum(self.columns // size, most)
            rows = jnp.take_along_axis(self.pages, numbers, axis=1)
            # Padding goes to pages out of range.
            nowhere = kept.shape[0] + jnp.arange(self.columns.size).reshape(self.columns.shape)
            rows = jnp.where(self.is_token, rows, nowhere)
            places = self.columns % size
        else:
            rows = jnp.arange(kept.shape[0])[:, None]
            # Padding goes to places out of range.
            nowhere = size + jnp.arange(T)
            places = jnp.where(self.is_token, self.columns % size, nowhere)
        return kept.at[rows, :, places].set(
            new.astype(kept.dtype), mode="drop", unique_indices=True
        )

    def read(self, kept: Float[Array, "B K S H"], window: int | None) -> Float[Array, "b s K H"]:
        """Return all stored columns of each row for a layer with this window, in the layout of
        `attention`; `mask` defines which of them a token sees."""
        if self.pages is None or window is not None:
            return kept.swapaxes(1, 2)
        of_rows = jnp.take(kept, self.pages, axis=0, mode="clip")
        B, M, K, S, H = of_rows.shape
        return of_rows.transpose(0, 1, 3, 2, 4).reshape(B, M * S, K, H)
