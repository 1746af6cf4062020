"""Who may see whom in attention, as data.

A query sees a key if the key's column is not later than its own, is not before its window, and
belongs to the same segment. Columns and segments are numbers that stand in arrays, and say nothing
about where in an array a query or a key lies: packed rows, windows, rings, zig-zag orders and
paged caches have other masks, and need no other kernels.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """Who may see whom. `of_rows` makes that of training.

    Args:
        q_columns: [T] or [B, T] column of each query.
        kv_columns: [S] or [B, S] column of each key.
        q_segments: [B, T] segment of each query: a document's number inside its row, 0 for padding,
            which sees padding.
        kv_segments: [B, S] segment of each key; negative where there is nothing yet.
        window: a query at column i sees keys at columns i - window + 1 to i; None: from the first
            one on. Known when the program is compiled.
        in_order: queries and keys are the same tokens, in the order of their columns, which are
            0, 1, 2, ... Known when the program is compiled, so that kernels can leave out blocks
            that nobody sees.
        exchange: what devices give each other where rows are split over them: "keys" (a ring) or
            "heads" (all to all); None: nothing, or what XLA finds. Known when the program is
            compiled.

    Raises:
        ValueError: the window is not at least 1.
    """

    q_columns: Int[Array, "*rows T"]
    kv_columns: Int[Array, "*rows S"]
    q_segments: Int[Array, "B T"]
    kv_segments: Int[Array, "B S"]
    window: int | None = None
    in_order: bool = False
    exchange: str | None = None

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(
                f"window={self.window} must be at least 1: a query sees its own column. "
                "Set it to 1024, for example, or to None for no window."
            )

    @classmethod
    def of_rows(cls, segments: Int[Array, "B T"], exchange: str | None = None) -> "Mask":
        """Rows that see themselves: token t stands at column t."""
        columns = jnp.arange(segments.shape[1])
        return cls(columns, columns, segments, segments, in_order=True, exchange=exchange)

    def within(self, window: int | None) -> "Mask":
        """The same mask with another window."""
        return dataclasses.replace(self, window=window)

    def part(self, queries: slice, keys: slice) -> "Mask":
        """That of some queries and some keys, by where they lie."""
        return Mask(
            self.q_columns[..., queries],
            self.kv_columns[..., keys],
            self.q_segments[:, queries],
            self.kv_segments[:, keys],
            self.window,
        )

    def visible(self) -> Bool[Array, "B T S"]:
        """True where a query sees a key."""
        q_columns = self.q_columns[..., :, None]
        kv_columns = self.kv_columns[..., None, :]
        seen = kv_columns <= q_columns
        if self.window is not None:
            seen &= kv_columns > q_columns - self.window
        same_segment = self.q_segments[:, :, None] == self.kv_segments[:, None, :]
        return seen & same_segment


_DATA = ("q_columns", "kv_columns", "q_segments", "kv_segments")
_STATIC = ("window", "in_order", "exchange")


def _flatten(mask: Mask) -> tuple[list[Any], tuple[Any, ...]]:
    data = [(jax.tree_util.GetAttrKey(name), getattr(mask, name)) for name in _DATA]
    static = tuple(getattr(mask, name) for name in _STATIC)
    return data, static


def _unflatten(static: tuple[Any, ...], data: Iterable[Any]) -> Mask:
    # Without __init__, which wants arrays: jax has trees of shapes and of other things, too.
    mask = object.__new__(Mask)
    for name, value in zip((*_DATA, *_STATIC), (*data, *static), strict=True):
        object.__setattr__(mask, name, value)
    return mask


jax.tree_util.register_pytree_with_keys(Mask, _flatten, _unflatten)
