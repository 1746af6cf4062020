"""Numbers copied from one place in memory to another, where they are transposed or of another type.

Files of Hugging Face have matrices as [outputs, inputs], and ours are [inputs, outputs]. A plain
copy between the two takes a line of the cache from memory for each number, and is several times as
slow as one that goes through a tile that stays in the cache.
"""

import jax.numpy as jnp
import numpy as np

# Of a tile: so many rows that what is written of a column is a long run of lines of the cache,
# and so many columns that the tile stays in the second cache of a core.
_TILE_ROWS = 512
_TILE_COLUMNS = 128
# Rows of a tile end in a gap: columns of rows that are a power of two apart would share a few lines
# of the cache.
_GAP_BYTES = 64


def copy_numbers(numbers: np.ndarray, out: np.ndarray) -> None:
    """Puts the numbers of an array into memory of the same shape, of any strides and type.

    Args:
        numbers: of any strides.
        out: gets them, rounded to its type; what is too large for that becomes infinity.
    """
    assert numbers.shape == out.shape, (numbers.shape, out.shape)
    if numbers.ndim < 2 or _is_by_columns(numbers) == _is_by_columns(out):
        _round(numbers, out)
        return
    for place in np.ndindex(numbers.shape[:-2]):
        _transpose(numbers[place], out[place])


def in_c_order(numbers: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The same numbers row after row, rounded to a type; themselves if they are so already."""
    if numbers.dtype == dtype and numbers.flags.c_contiguous:
        return numbers
    out = np.empty(numbers.shape, dtype)
    copy_numbers(numbers, out)
    return out


def _is_by_columns(matrix: np.ndarray) -> bool:
    """Whether numbers of a column are nearer to each other than those of a row."""
    return matrix.strides[-2] < matrix.strides[-1]


def _transpose(numbers: np.ndarray, out: np.ndarray) -> None:
    """Copies a matrix, of which one lies by rows and the other by columns, tile by tile."""
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
            # As whole numbers: numpy has no loop of its own for bfloat16.
            _words(out[here])[...] = _words(tile)


def _words(numbers: np.ndarray) -> np.ndarray:
    """The bits of numbers."""
    return numbers.view(f"u{numbers.itemsize}")


def _round(numbers: np.ndarray, out: np.ndarray) -> None:
    """Puts numbers into memory of another type; what is too large for it becomes infinity."""
    if numbers.dtype == out.dtype:
        _words(out)[...] = _words(numbers)
        return
    if numbers.dtype == jnp.bfloat16 and out.dtype == np.float32:
        # The upper half of its bits, ten times as fast.
        words = _words(out)
        words[...] = _words(numbers)
        np.left_shift(words, 16, out=words)
        return
    with np.errstate(over="ignore", invalid="ignore"):
        out[...] = numbers
