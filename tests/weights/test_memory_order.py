"""Copies to another order in memory equal numpy's, bit for bit."""

import ml_dtypes
import numpy as np
import pytest

from maxtrain.weights.memory_order import copy_numbers, in_c_order

TYPES = ("float64", "float32", "float16", ml_dtypes.bfloat16)
# Around the sizes of a tile, 128 x 512, and of none of its parts.
SHAPES = [
    (7,),
    (1, 1),
    (1, 1031),
    (1031, 1),
    (0, 5),
    (5, 0),
    (128, 512),
    (127, 511),
    (129, 513),
    (257, 1031),
    (3, 131, 67),
    (2, 3, 5, 7),
]


def random_bits(shape, dtype):
    """Numbers of any bits: zeros of either sign, infinities and NaN among them."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape)) * dtype.itemsize
    bits = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    return bits.view(dtype).reshape(shape)


def same_bits(found, expected):
    return found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def by_columns(shape, dtype):
    """Memory of a shape whose last two dims lie the other way round."""
    return np.zeros((*shape[:-2], shape[-1], shape[-2]), dtype).swapaxes(-1, -2)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_copied(shape, dtype):
    numbers = random_bits(shape, dtype)
    out = np.zeros(shape, dtype)
    copy_numbers(numbers, out)
    assert same_bits(out, numbers)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if len(shape) > 1])
def test_transposed(shape, dtype):
    numbers = random_bits(shape, dtype)
    there = by_columns(shape, dtype)
    copy_numbers(numbers, there)
    assert same_bits(there, numbers)
    back = np.zeros(shape, dtype)
    copy_numbers(there, back)
    assert same_bits(back, numbers)
    assert same_bits(in_c_order(there, there.dtype), numbers)


@pytest.mark.parametrize("dtype", TYPES)
def test_parts_of_memory(dtype):
    """The memory around a part is unchanged."""
    numbers = random_bits((300, 700), dtype)
    memory = np.zeros((800, 400), dtype)
    copy_numbers(numbers[3:293:2, 1:691], memory[5:695, 7:152].T)
    expected = np.zeros((800, 400), dtype)
    expected[5:695, 7:152] = numbers[3:293:2, 1:691].T
    assert same_bits(memory, expected)


@pytest.mark.parametrize("there", TYPES)
@pytest.mark.parametrize("here", TYPES)
def test_rounded(here, there):
    """Numbers out of range become infinity without a warning, and the same in either order."""
    rng = np.random.default_rng(0)
    scales = 10.0 ** rng.integers(-9, 10, (131, 521))
    with np.errstate(over="ignore"):
        numbers = (rng.standard_normal((131, 521)) * scales).astype(here)
        expected = numbers.astype(there)
    assert same_bits(in_c_order(numbers, np.dtype(there)), expected)
    columns = by_columns(numbers.shape, there)
    copy_numbers(numbers, columns)
    assert same_bits(columns, expected)


def test_no_copy_of_what_is_in_order():
    numbers = np.ones((2, 3), np.float32)
    assert in_c_order(numbers, numbers.dtype) is numbers
