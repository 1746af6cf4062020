"""Chunks of sequences, so that the logits of only a few tokens exist at a time."""

import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.parallel.sharding import length_shards


def num_chunks(length: int, rows: int, chunk: int) -> int:
    """Return the smallest number of equal parts of `length` columns with at most `chunk` tokens
    each (0: no bound), for a device's rows and columns."""
    if chunk == 0:
        return 1
    for n in range(1, length):
        if length % n == 0 and rows * length // n <= chunk:
            return n
    return length


def split_sequence(chunks: int, *arrays: Array) -> tuple[Array, ...]:
    """Reshape each [B, T, ...] to [chunks, B, T / chunks, ...]. Rows and columns stay on their
    devices: each device's columns are cut, and a chunk has some of each device."""
    shards = length_shards()
    parts = []
    for x in arrays:
        B = x.shape[0]
        rest = x.shape[2:]
        cut = jnp.moveaxis(x.reshape(B, shards, chunks, -1, *rest), 2, 0)
        parts.append(cut.reshape(chunks, B, -1, *rest))
    return tuple(parts)


def join_sequence(parts: Array) -> Array:
    """Undo `split_sequence`: reshape [chunks, B, T / chunks, ...] to [B, T, ...]."""
    chunks, B, length = parts.shape[:3]
    rest = parts.shape[3:]
    cut = parts.reshape(chunks, B, length_shards(), -1, *rest)
    return jnp.moveaxis(cut, 0, 2).reshape(B, chunks * length, *rest)
