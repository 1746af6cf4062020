"""Copies numbers between arrays in memory, with a transposition or a change of type.

Files of Hugging Face have matrices as [outputs, inputs], and ours are [inputs, outputs]. A plain
copy between the two fetches a cache line from memory for each number, and is several times as slow
as one that goes through a tile that stays in the cache.
"""

import jax.numpy as jnp
import numpy as np

# Size of a tile: enough rows that a column is written as a long run of cache lines, and few enough
# columns that the tile stays in the L2 cache of a core.
_TILE_ROWS = 512
_TILE_COLUMNS = 128
# Rows of a tile end in a gap: with rows a power of two apart, the numbers of a column would share a
# few cache lines.
_GAP_BYTES = 64


def copy_numbers(numbers: np.ndarray, out: np.ndarray) -> None:
    """Copy the numbers of an array into memory of the same shape, of any strides and type.

    Args:
        numbers: array of any strides.
        out: array that receives the numbers, rounded to its type; numbers out of its range become
            infinity.
    """
    assert numbers.shape == out.shape, (numbers.shape, out.shape)
    if numbers.ndim < 2 or _is_by_columns(numbers) == _is_by_columns(out):
        _round(numbers, out)
        return
    for place in np.ndindex(numbers.shape[:-2]):
        _transpose(numbers[place], out[place])


def in_c_order(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Return the same numbers in C order, rounded to a type; the array itself if it already has
    this form."""
    if numbers.dtype == dtype and numbers.flags.c_contiguous:
        return numbers
    out = np.empty(numbers.shape, dtype)
    copy_numbers(numbers, out)
    return out


def _is_by_columns(matrix: np.ndarray) -> bool:
    """Return True if the numbers of a column are closer in memory than those of a row."""
    return matrix.strides[-2] < matrix.strides[-1]


def _transpose(numbers: np.ndarray, out: np.ndarray) -> None:
    """Copy a matrix tile by tile, where one array is stored by rows and the other by columns."""
    if _is_by_columns(numbers):
        numbers = numbers.T
        out = out.T
    height = min(_TILE_ROWS, numbers.shape[0])
    width = min(_TILE_COLUMNS, numbers.shape[1])
    gap = _GAP_BYTES // out.itemsize
    memory = np.empty((height, width + gap), out.dtype)
    for row in range(0, numbers.shape[0], _TILE_ROWS):
        for column in range(0, numbers.shape[1], _TILE_COLUMNS):
            here = (slice(row, row + _TILE_ROWS), slice(column, column + _TILE_COLUMNS))
            piece = numbers[here]
            tile = memory[: piece.shape[0], : piece.shape[1]]
            _round(piece, tile)
            # Copy the bits as integers: numpy has no fast loop for bfloat16.
            _words(out[here])[...] = _words(tile)


def _words(numbers: np.ndarray) -> np.ndarray:
    """Return the bits of numbers as unsigned integers."""
    return numbers.view(f"u{numbers.itemsize}")


def _round(numbers: np.ndarray, out: np.ndarray) -> None:
    """Copy numbers into memory of another type; numbers out of its range become infinity."""
    if numbers.dtype == out.dtype:
        _words(out)[...] = _words(numbers)
        return
    if numbers.dtype == jnp.bfloat16 and out.dtype == np.float32:
        # Set the upper half of the bits, which is ten times as fast.
        words = _words(out)
        words[...] = _words(numbers)
        np.left_shift(words, 16, out=words)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = numbers
