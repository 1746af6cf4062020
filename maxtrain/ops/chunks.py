"""Sequences cut in parts, so that the logits of only a few tokens exist at a time."""

from jaxtyping import Array


def num_chunks(length: int, rows: int, chunk: int) -> int:
    """Smallest number of equal parts of `length` columns with at most `chunk` tokens each (0: no
    bound), in a device's rows."""
    if chunk == 0:
        return 1
    for n in range(1, length):
        if length % n == 0 and rows * length // n <= chunk:
            return n
    return length


def split_sequence(chunks: int, *arrays: Array) -> tuple[Array, ...]:
    """Each [B, T, ...] as [chunks, B, T / chunks, ...]; rows stay on their devices, only the
    sequence is cut."""
    parts = []
    for x in arrays:
        B = x.shape[0]
        parts.append(x.reshape(B, chunks, -1, *x.shape[2:]).swapaxes(0, 1))
    return tuple(parts)


def join_sequence(parts: Array) -> Array:
    """[chunks, B, T / chunks, ...] as [B, T, ...]: what `split_sequence` has cut."""
    chunks, B, length = parts.shape[:3]
    return parts.swapaxes(0, 1).reshape(B, chunks * length, *parts.shape[3:])
