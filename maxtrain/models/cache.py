"""What generation keeps of the tokens that it has read: the caches of layers, and where in them a
pass writes and reads.

Rows are documents of their own, and each is as long as it is: its token t stands at column t. There
are two layouts:

* A ring for each row: column c lies at c modulo the ring's size. A ring that is as large as a row
  may become never turns round, and is a plain cache; that of a layer with a window needs no more
  room than the window and the tokens of one pass. The columns of a head lie one after the other,
  [B, K, S, H], as products of one query with all of them want it.
* Pages, for layers without a window: a pool [P, K, S, H] of P pages with S columns each that all
  rows share. A table [B, M] says which pages are a row's: column c lies in its page c // S. Rows
  that begin alike can have pages in common, and none has more than it needs. Pages are gathered
  before a product, which costs reading them once more.
"""

import dataclasses
from collections.abc import Callable, Set
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.sharding import constrain

# Columns of a page.
PAGE = 64


class KVCache(NamedTuple):
    """Keys and values of the newest columns; one layer's, or those of the layers at one place of
    the period, stacked on dim 0."""

    k: Float[Array, "*L B K S H"]
    v: Float[Array, "*L B K S Hv"]


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


def placed(caches: Caches, paged: Set[str] = frozenset()) -> Caches:
    """The same, split over the mesh as rows and heads are; of the layers in `paged`, which have
    pages, as heads are."""

    def place(x: Array, rows: str | None) -> Array:
        heads = "kv_heads"
        if x.shape[-3] == 1:
            # The one key that all heads share.
            heads = None
        stacked = [None] * (x.ndim - 4)
        return constrain(x, *stacked, rows, heads, None, None)

    found = {}
    for name, cache in caches.items():
        rows = None if name in paged else "activation_batch"
        found[name] = KVCache(place(cache.k, rows), place(cache.v, rows))
    return found


def take_rows(caches: Caches, rows: Int[Array, " R"], paged: Set[str] = frozenset()) -> Caches:
    """These rows; for one that is not there, the last one. Pages stay as they are."""

    def take(x: Array) -> Array:
        return jnp.take(x, rows, axis=x.ndim - 4, mode="clip")

    return _of_rings(take, paged, caches)


def put_rows(
    caches: Caches, new: Caches, rows: Int[Array, " R"], paged: Set[str] = frozenset()
) -> Caches:
    """The caches with other contents in these rows; what is for a row that is not there is dropped.
    Pages are the new ones."""

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
    """The caches with zeros in all other rows and pages."""

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
    """The caches with a change to each array that rows have rings in."""
    found = {}
    for name, cache in caches.items():
        if name in paged:
            found[name] = cache
        else:
            found[name] = jax.tree.map(change, cache, *[other[name] for other in others])
    return found


@dataclasses.dataclass(frozen=True)
class Extension:
    """The tokens that a pass adds to rows.

    Args:
        columns: [B, T] where each stands in its row; one after the other.
        is_token: [B, T] false for padding, which is behind a row's tokens and is not kept.
        from_start: all rows begin with this pass, so that its tokens see nothing but each other.
            Known when the program is compiled.
        pages: [B, M] the pages of each row, for layers without a window; None: they have rings.
    """

    columns: Int[Array, "B T"]
    is_token: Bool[Array, "B T"]
    from_start: bool = False
    pages: Int[Array, "B M"] | None = None

    def lengths(self) -> Int[Array, " B"]:
        """Columns of each row when the pass is over."""
        return self.columns[:, 0] + self.is_token.sum(axis=1)

    def mask(self, size: int) -> Mask:
        """Which of so many columns that are kept its tokens see."""
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
        self, kept: Float[Array, "B K S H"], new: Float[Array, "b T K H"], window: int | None
    ) -> Float[Array, "B K S H"]:
        """What is kept for a layer with this window, with the new tokens in it."""
        T = self.columns.shape[1]
        size = kept.shape[2]
        if self.pages is not None and window is None:
            most = self.pages.shape[1] - 1
            numbers = jnp.minimum(self.columns // size, most)
            rows = jnp.take_along_axis(self.pages, numbers, axis=1)
            # Padding goes to pages that are not there.
            nowhere = kept.shape[0] + jnp.arange(self.columns.size).reshape(self.columns.shape)
            rows = jnp.where(self.is_token, rows, nowhere)
            places = self.columns % size
        else:
            rows = jnp.arange(kept.shape[0])[:, None]
            # Padding goes to places that are not there.
            nowhere = size + jnp.arange(T)
            places = jnp.where(self.is_token, self.columns % size, nowhere)
        return kept.at[rows, :, places].set(
            new.astype(kept.dtype), mode="drop", unique_indices=True
        )

    def read(self, kept: Float[Array, "B K S H"], window: int | None) -> Float[Array, "b s K H"]:
        """All columns of each row that are kept for a layer with this window, as `attention` takes
        them; `mask` says which of them a token sees."""
        if self.pages is None or window is not None:
            return kept.swapaxes(1, 2)
        of_rows = jnp.take(kept, self.pages, axis=0, mode="clip")
        B, M, K, S, H = of_rows.shape
        return of_rows.transpose(0, 1, 3, 2, 4).reshape(B, M * S, K, H)
