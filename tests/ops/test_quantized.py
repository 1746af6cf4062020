"""Quantised weights: against a slow oracle, bounds of their errors, and the gradients of products
with them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.experts import (
    expert_dot,
    grouped_dot,
    order_by_expert,
    quantized_expert_dot,
    quantized_grouped_dot,
)
from maxtrain.ops.quantized import (
    NF4_LEVELS,
    QuantizedArray,
    _chosen,
    _looked_up,
    dequantize,
    quantize,
    quantized_dot,
)

FORMS = ("int8", "nf4")
quantized = jax.jit(quantize, static_argnums=(1, 2))
dequantized = jax.jit(dequantize, static_argnums=1)


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def oracle(weights, form, block):
    """Scales [blocks, O] and the level of each weight [I, O], one by one."""
    num_inputs, num_outputs = weights.shape
    scales = np.zeros((num_inputs // block, num_outputs), np.float32)
    levels = np.zeros_like(weights)
    for i in range(0, num_inputs, block):
        for o in range(num_outputs):
            largest = np.abs(weights[i : i + block, o]).max()
            if form == "int8":
                largest = np.float32(largest / np.float32(127))
            scale = np.float32(largest.astype(ml_dtypes.bfloat16))
            scales[i // block, o] = scale
            for row in range(i, i + block):
                relative = np.float32(0.0)
                if scale > 0:
                    relative = weights[row, o] / scale
                if form == "int8":
                    levels[row, o] = np.rint(relative)
                else:
                    distances = [abs(float(relative) - level) for level in NF4_LEVELS]
                    levels[row, o] = NF4_LEVELS[int(np.argmin(distances))]
    return scales, levels


@st.composite
def matrices(draw):
    block = draw(st.sampled_from([2, 4, 16]))
    blocks = draw(st.integers(1, 3))
    outputs = draw(st.integers(1, 4))
    weights = normal(draw(st.integers(0, 1000)), block * blocks, outputs)
    weights *= draw(st.sampled_from([1e-20, 1e-3, 1.0, 1e4]))
    zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
    weights[np.random.default_rng(0).uniform(size=weights.shape) < zeros] = 0
    return weights, block


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", FORMS)
@given(case=matrices())
def test_is_what_the_oracle_finds_one_by_one(form, case):
    weights, block = case
    found = quantized(weights, form, block)
    scales, levels = oracle(weights, form, block)
    np.testing.assert_array_equal(np.asarray(found.scales, np.float32), scales)
    of_rows = np.repeat(scales, block, axis=0)
    ours = np.asarray(dequantized(found))
    # As near as the oracle's level: of two that are as near, either will do.
    error = np.abs(weights.astype(np.float64) - ours)
    least = np.abs(weights.astype(np.float64) - levels.astype(np.float64) * of_rows)
    assert (error <= least + 1e-6 * of_rows).all()


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", FORMS)
@given(case=matrices())
def test_errors_are_bounded_by_the_scale_of_the_block(form, case):
    weights, block = case
    found = quantized(weights, form, block)
    error = np.abs(weights.astype(np.float64) - np.asarray(dequantized(found), np.float64))
    of_rows = np.repeat(np.asarray(found.scales, np.float64), block, axis=0)
    # Half of the widest gap between two levels.
    widest = 0.5
    if form == "nf4":
        widest = max(np.diff(NF4_LEVELS)) / 2
    assert (error <= widest * of_rows * (1 + 1e-6)).all()


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("form", FORMS)
@given(case=matrices())
def test_what_is_quantised_again_keeps_its_bits(form, case):
    weights, block = case
    once = quantized(weights, form, block)
    again = quantized(dequantized(once), form, block)
    np.testing.assert_array_equal(again.scales, once.scales)
    np.testing.assert_array_equal(dequantized(again), dequantized(once))


@pytest.mark.long
@pytest.mark.every_dose
def test_levels_are_those_of_the_paper():
    """Sixteen, 0 among them, eight of each sign but that 0 is one of those that are not negative;
    and the quantiles of appendix E: evenly spaced probabilities from 0.9677083 down to a half,
    eight steps up and seven down, divided by the largest."""
    quantile = jax.scipy.stats.norm.ppf
    top = 0.9677083
    above = quantile(np.linspace(top, 0.5, 9)[:-1])
    below = -quantile(np.linspace(top, 0.5, 8)[:-1])
    levels = np.sort(np.concatenate([above, [0.0], below]))
    np.testing.assert_allclose(levels / levels.max(), NF4_LEVELS, atol=1e-5)


def test_levels_are_the_same_looked_up_and_chosen():
    numbers = jnp.arange(16, dtype=jnp.uint8).reshape(4, 4)
    expected = np.asarray(NF4_LEVELS, np.float32).reshape(4, 4)
    np.testing.assert_array_equal(_looked_up(numbers), expected)
    np.testing.assert_array_equal(_chosen(numbers), expected)


def test_two_codes_of_nf4_are_in_a_byte_and_one_of_int8():
    weights = normal(0, 128, 6)
    four = quantized(weights, "nf4", 64)
    assert (four.codes.shape, four.codes.dtype) == ((2, 32, 6), jnp.uint8)
    assert (four.scales.shape, four.scales.dtype) == ((2, 6), jnp.bfloat16)
    eight = quantized(weights, "int8", 64)
    assert (eight.codes.shape, eight.codes.dtype) == ((2, 64, 6), jnp.int8)
    assert four.num_inputs == eight.num_inputs == 128
    # The first half of a block is in the lower bits.
    numbers = np.concatenate([four.codes[0] & 15, four.codes[0] >> 4])
    expected = np.asarray(NF4_LEVELS, np.float32)[numbers] * np.asarray(four.scales[0], np.float32)
    np.testing.assert_array_equal(dequantized(four)[:64], expected)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_not_finite_is_seen_in_the_scales(form):
    for bad in (np.nan, np.inf):
        weights = normal(0, 8, 2)
        weights[5, 1] = bad
        scales = np.asarray(quantized(weights, form, 4).scales, np.float32)
        assert np.isfinite(scales).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS)
def test_the_product_is_that_with_the_weights_that_it_stands_for(form, dtype):
    recipe = MatmulPrecision.of(dtype)
    x, g = normal(1, 3, 5, 64), normal(2, 3, 5, 24)
    stored = quantized(normal(0, 64, 24), form, 16)
    plain = dequantized(stored)

    @jax.jit
    def ours(x, g):
        out, back = jax.vjp(lambda x: quantized_dot(x, stored, recipe), x)
        return out, *back(g)

    @jax.jit
    def theirs(x, g):
        out, back = jax.vjp(lambda x: dot(x, plain, recipe), x)
        return out, *back(g)

    for found, expected in zip(ours(x, g), theirs(x, g), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_the_backward_pass_keeps_codes_and_neither_weights_nor_activations():
    stored = quantize(jnp.ones((64, 24)), "nf4", 16)

    def product(x):
        return quantized_dot(x, stored, MatmulPrecision.of("float32"))

    _, back = jax.vjp(product, jnp.ones((5, 64)))
    kept = sorted((a.shape, a.dtype.name) for a in jax.tree.leaves(back) if a.shape)
    assert kept == [((4, 8, 24), "uint8"), ((4, 24), "bfloat16")]


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("kernel", ["blocks", "ragged"])
@pytest.mark.parametrize("form", FORMS)
def test_products_of_experts_are_those_with_their_weights(form, kernel):
    recipe = MatmulPrecision.of("float32")
    num_experts = 3
    chosen = jnp.asarray(np.random.default_rng(0).integers(0, num_experts, (11, 2)), jnp.int32)
    order = order_by_expert(chosen, num_experts, 8)
    x = normal(1, order.choices.size, 32)
    g = normal(2, order.choices.size, 12)
    stored = quantized(normal(0, num_experts, 32, 12), form, 8)
    plain = dequantized(stored)

    def ours(x):
        return quantized_grouped_dot(x, stored, order, 8, kernel, recipe)

    def theirs(x):
        return grouped_dot(x, plain, order, 8, kernel, recipe)

    _assert_same(ours, theirs, x, g)


@pytest.mark.parametrize("form", FORMS)
def test_products_of_experts_with_as_many_rows_each(form):
    recipe = MatmulPrecision.of("float32")
    stored = quantized(normal(0, 3, 32, 12), form, 8)
    plain = dequantized(stored)

    def ours(x):
        return quantized_expert_dot(x, stored, recipe)

    def theirs(x):
        return expert_dot(x, plain, recipe)

    _assert_same(ours, theirs, normal(1, 3, 7, 32), normal(2, 3, 7, 12))


def _assert_same(ours, theirs, x, g):
    """Results, and gradients of x."""
    results = []
    for function in (ours, theirs):
        out, back = jax.vjp(jax.jit(function), x)
        results.append((out, *back(g)))
    for found, expected in zip(*results, strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6 * np.abs(expected).max())


def test_dtypes_tell_forms_apart():
    assert (
        QuantizedArray(jnp.zeros((1, 2, 1), jnp.int8), jnp.zeros((1, 1), jnp.bfloat16)).form
        == "int8"
    )
    assert (
        QuantizedArray(jnp.zeros((1, 1, 1), jnp.uint8), jnp.zeros((1, 1), jnp.bfloat16)).form
        == "nf4"
    )
