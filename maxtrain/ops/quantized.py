"""Weights of matrix products in eight or four bits, and the products with them.

The inputs of a product are cut into blocks. Each output has a scale for each block, and each weight
is stored as a code:

    int8   the scale is the largest magnitude of the block / 127, the code a whole number
    nf4    the scale is the largest magnitude of the block, the code the number of the nearest of
           sixteen levels between -1 and 1, which are quantiles of a normal distribution; two codes
           to a byte

A scale is rounded to bfloat16 before the weights are divided by it, so that rounding it adds no
error to theirs.

Source: nf4: Dettmers et al. 2023, https://arxiv.org/abs/2305.14314, section 3 and appendix E.
Differs: scales are bfloat16 (0.25 bits a weight in blocks of 64) and are not quantised once more
(0.127 bits).
"""

import functools
import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.einsum import contract
from maxtrain.ops.names import PRODUCT, named

Form = Literal["int8", "nf4"]
# Number of weights in an entry of the codes.
WEIGHTS_PER_CODE: dict[Form, int] = {"int8": 1, "nf4": 2}
LARGEST_INT8 = 127
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class QuantizedArray(NamedTuple):
    """The quantised weights of a product, [*s, I, O], or abstract arrays.

    Attributes:
        codes: [*s, blocks, inputs of a block, O] int8; of nf4 [*s, blocks, half as many, O] uint8,
            where the first half of a block has the lower four bits.
        scales: [*s, blocks, O] bfloat16.
    """

    codes: Array
    scales: Array

    @property
    def form(self) -> Form:
        """Return the number format of the codes."""
        if self.codes.dtype == jnp.int8:
            return "int8"
        return "nf4"

    @property
    def num_inputs(self) -> int:
        """Return I."""
        *_, blocks, width, _ = self.codes.shape
        return blocks * width * WEIGHTS_PER_CODE[self.form]


def quantize(weights: Float[Array, "*s i o"], form: Form, block: int) -> QuantizedArray:
    """Return the nearest weights that a format can express.

    Args:
        weights: weights of a product, any float type. NaN and infinity show in the scales.
        form: the number format.
        block: inputs that share a scale; it divides I, and is even with nf4.
    """
    *stacked, num_inputs, num_outputs = weights.shape
    assert num_inputs % block == 0, (weights.shape, block)
    shape = (*stacked, num_inputs // block, block, num_outputs)
    blocks = weights.astype(jnp.float32).reshape(shape)
    largest = jnp.abs(blocks).max(-2)
    if form == "int8":
        largest = largest / LARGEST_INT8
    # A compiler would remove a cast there and back.
    scales = jax.lax.reduce_precision(largest, exponent_bits=8, mantissa_bits=7)
    divisors = jnp.where(scales == 0, 1.0, scales)
    relative = blocks / divisors[..., None, :]
    if form == "int8":
        codes = jnp.round(relative).astype(jnp.int8)
    else:
        codes = _packed(_nearest_level(relative))
    return QuantizedArray(codes, scales.astype(jnp.bfloat16))


def dequantize(weights: QuantizedArray, dtype: str | jnp.dtype = "float32") -> Float[Array, "..."]:
    """Return the weights [*s, I, O]: level times scale in float32, rounded once to a type."""
    if weights.form == "int8":
        values = weights.codes.astype(jnp.float32)
    else:
        values = _levels_of(_unpacked(weights.codes))
    blocks = values * weights.scales.astype(jnp.float32)[..., None, :]
    *stacked, _, _, num_outputs = blocks.shape
    return blocks.reshape(*stacked, weights.num_inputs, num_outputs).astype(dtype)


def _nearest_level(relative: Float[Array, "..."]) -> UInt8[Array, "..."]:
    """Return the index of the nearest level; of two equally near levels the lower one."""
    number = jnp.zeros(relative.shape, jnp.uint8)
    for low, high in itertools.pairwise(NF4_LEVELS):
        is_beyond = relative > (low + high) / 2
        number = number + is_beyond.astype(jnp.uint8)
    return number


def _levels_of(numbers: UInt8[Array, "..."]) -> Float[Array, "..."]:
    """Return the levels with these indices, float32.

    CPUs use a lookup. Accelerators select one after another, which is vector arithmetic; XLA's CPU
    compiler would write each selection to memory.
    """
    return jax.lax.platform_dependent(numbers, cpu=_looked_up, default=_chosen)


def _looked_up(numbers: UInt8[Array, "..."]) -> Float[Array, "..."]:
    return jnp.asarray(NF4_LEVELS, jnp.float32)[numbers]


def _chosen(numbers: UInt8[Array, "..."]) -> Float[Array, "..."]:
    values = jnp.full(numbers.shape, NF4_LEVELS[0], jnp.float32)
    for number, level in enumerate(NF4_LEVELS):
        values = jnp.where(numbers == number, jnp.float32(level), values)
    return values


def _packed(numbers: UInt8[Array, "*s block o"]) -> UInt8[Array, "*s half o"]:
    low, high = jnp.split(numbers, 2, axis=-2)
    return low | (high << 4)


def _unpacked(codes: UInt8[Array, "*s half o"]) -> UInt8[Array, "*s block o"]:
    return jnp.concatenate([codes & 15, codes >> 4], axis=-2)


def again(weights: QuantizedArray, g: Array) -> tuple[QuantizedArray, Array]:
    """Put a barrier between weights and a backward pass: dequantised weights are computed when the
    gradient has arrived. Otherwise a compiler would keep the result of the forward pass."""
    return jax.lax.optimization_barrier((weights, g))


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def quantized_dot(
    x: Float[Array, "*b i"], weights: QuantizedArray, recipe: MatmulPrecision
) -> Float[Array, "*b o"]:
    """Return x @ weights, without a gradient of the weights; types as in `ops.dot`. The backward
    pass only stores the codes, and dequantises them again."""
    matrix = dequantize(weights, recipe.inputs)
    out = contract("...i,io->...o", x.astype(recipe.inputs), matrix)
    return out.astype(recipe.result)


def _forward(x: Array, weights: QuantizedArray, recipe: MatmulPrecision) -> tuple[Array, tuple]:
    out = named(quantized_dot(x, weights, recipe), PRODUCT)
    return out, (weights, jnp.zeros((), x.dtype))


def _backward(recipe: MatmulPrecision, saved: tuple, g: Array) -> tuple[Array, None]:
    weights, like_x = saved
    weights, g = again(weights, g)
    matrix = dequantize(weights, recipe.gradient)
    dx = contract("...o,io->...i", g.astype(recipe.gradient), matrix)
    return dx.astype(like_x.dtype), None


quantized_dot.defvjp(_forward, _backward)
