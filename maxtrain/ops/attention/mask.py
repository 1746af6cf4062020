"""Attention masks as data.

A query sees a key if the key's column is not later than its own, is not before its window, and
belongs to the same segment. Columns and segments are numbers in arrays, independent of where in an
array a query or key is. So packed rows, windows, rings, zigzag orders and paged caches only need
other masks, and no other kernels.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@dataclasses.dataclass(frozen=True, eq=False)
class Mask:
    """An attention mask. `of_rows` builds that of training.

    Args:
        q_columns: [T] or [B, T] column of each query.
        kv_columns: [S] or [B, S] column of each key.
        q_segments: [B, T] segment of each query: a document's number inside its row, 0 for padding,
            which sees padding.
        kv_segments: [B, S] segment of each key; negative for empty columns.
        window: a query at column i sees keys at columns i - window + 1 to i; None: all columns up
            to i. Static.
        in_order: whether queries and keys are the same tokens, in the order of their columns 0, 1,
            2, ... Static, so that kernels can skip masked blocks.
        exchange: what devices exchange if rows are sharded: "keys" (ring) or "heads" (all-to-all);
            None: nothing, or XLA's choice. Static.

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
        """Return the mask of rows that attend to themselves: token t has column t."""
        columns = jnp.arange(segments.shape[1])
        return cls(columns, columns, segments, segments, in_order=True, exchange=exchange)

    def within(self, window: int | None) -> "Mask":
        """Return the same mask with another window."""
        return dataclasses.replace(self, window=window)

    def part(self, queries: slice, keys: slice) -> "Mask":
        """Return the mask of some queries and some keys, by their indices."""
        return Mask(
            self.q_columns[..., queries],
            self.kv_columns[..., keys],
            self.q_segments[:, queries],
            self.kv_segments[:, keys],
            self.window,
        )

    def visible(self) -> Bool[Array, "B T S"]:
        """Return whether each query sees each key."""
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
    # __init__ is skipped, because it needs arrays, and jax also builds trees of shapes and other
    # objects.
    mask = object.__new__(Mask)
    for name, value in zip((*_DATA, *_STATIC), (*data, *static), strict=True):
        object.__setattr__(mask, name, value)
    return mask


jax.tree_util.register_pytree_with_keys(Mask, _flatten, _unflatten)
