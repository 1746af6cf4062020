"""Products of tokens with the weights of their experts against a loop over tokens."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.experts import (
    add_bias,
    block_size,
    combine,
    dispatch,
    expert_dot,
    expert_of_rows,
    grouped_dot,
    order_by_expert,
    order_by_pair,
    order_by_place,
)
from maxtrain.ops.routing import within_capacity

E, IN, OUT = 5, 12, 7
EXACT = MatmulPrecision.of("float32")


def choices(seed, num_tokens, num_choices, like="any"):
    rng = np.random.default_rng(seed)
    found = rng.integers(0, E + 1, (num_tokens, num_choices))
    if like == "one expert":
        found = np.full((num_tokens, num_choices), 3)
    if like == "none":
        found = np.full((num_tokens, num_choices), E)
    return jnp.asarray(found)


@pytest.mark.long
@given(
    st.integers(0, 2**16),
    st.integers(1, 40),
    st.integers(1, 3),
    st.sampled_from([1, 8, 16]),
    st.sampled_from(["any", "one expert", "none"]),
)
def test_choices_lie_in_blocks_of_their_experts_in_their_order(seed, tokens, count, block, like):
    experts = np.asarray(choices(seed, tokens, count, like))
    order = order_by_expert(jnp.asarray(experts), E, block)
    rows = np.asarray(order.rows)
    back = np.asarray(order.choices)
    starts = np.asarray(order.starts)
    blocks = np.asarray(order.blocks)
    for expert in range(E):
        own = rows[experts == expert]
        np.testing.assert_array_equal(own, starts[expert] + np.arange(len(own)))
        assert blocks[expert] == -(-len(own) // block)
    assert (starts % block == 0).all()
    assert (starts[1:] == starts[:-1] + blocks[:-1] * block).all()
    assert (rows[experts == E] == len(back)).all()
    for number, row in enumerate(rows.ravel()):
        if row < len(back):
            assert back[row] == number
    assert (back < tokens * count).sum() == (experts < E).sum()


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("block", [1, 8])
def test_choices_of_an_expert_are_sorted_by_the_number_of_their_token(block):
    num_sets = 3
    experts = choices(5, 23, 3)
    numbers = jnp.asarray(np.random.default_rng(6).integers(0, num_sets, 23))
    order, pairs = order_by_pair(experts, numbers, E, num_sets, block)
    np.testing.assert_array_equal(order.rows, pairs.rows)
    np.testing.assert_array_equal(order.choices, pairs.choices)
    has_choice = np.asarray(order.choices) < experts.size
    taken = np.asarray(order.choices)[has_choice]
    expert = np.asarray(experts).ravel()[taken]
    pair = expert * num_sets + np.asarray(numbers)[taken // experts.shape[1]]
    assert len(taken) == (np.asarray(experts) < E).sum() > 0
    np.testing.assert_array_equal(expert_of_rows(order, block)[has_choice], expert)
    np.testing.assert_array_equal(expert_of_rows(pairs, block)[has_choice], pair)
    # Where all tokens have one number, it is as if there were none.
    for alone in order_by_pair(experts, jnp.zeros_like(numbers), E, 1, block):
        for ours, theirs in zip(alone, order_by_expert(experts, E, block), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_block_is_a_part_of_a_share_and_a_power_of_two():
    sizes = [block_size(count, 8) for count in (1, 500, 1024, 4096, 10**6)]
    assert sizes == [8, 8, 16, 64, 256]


def forward(x, w, bias, weights, experts, block, kernel, recipe=EXACT):
    order = order_by_expert(experts, E, block)
    y = grouped_dot(dispatch(x, order), w, order, block, kernel, recipe)
    y = add_bias(y, bias, expert_of_rows(order, block))
    return combine(y, weights, order)


def expected(x, w, bias, weights, experts):
    """Every expert for every token, by plain products."""
    chosen = jax.nn.one_hot(experts, E) * weights[..., None]
    all_of_them = jnp.einsum("ni,eio->neo", x, w, precision="highest") + bias
    return jnp.einsum("nce,neo->no", chosen, all_of_them, precision="highest")


def arrays(seed, experts):
    rng = np.random.default_rng(seed)
    shapes = [(experts.shape[0], IN), (E, IN, OUT), (E, OUT), experts.shape]
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["blocks", "ragged"])
@pytest.mark.parametrize(
    "like",
    ["any", *(pytest.param(name, marks=pytest.mark.long) for name in ("one expert", "none"))],
)
@pytest.mark.parametrize("block", [pytest.param(1, marks=pytest.mark.long), 8])
def test_products_equal_those_of_every_expert_forward_and_backward(kernel, like, block):
    experts = choices(0, 23, 3, like)
    found = arrays(1, experts)

    def loss(function):
        # A quarter: slopes of large arguments would have the rounding of these.
        return lambda *values: (jnp.sin(function(*values) / 4) ** 2).sum()

    def fast(x, w, bias, weights):
        return forward(x, w, bias, weights, experts, block, kernel)

    def slow(x, w, bias, weights):
        return expected(x, w, bias, weights, experts)

    np.testing.assert_allclose(jax.jit(fast)(*found), slow(*found), rtol=2e-5, atol=2e-5)
    numbers = (0, 1, 2, 3)
    ours = jax.jit(jax.grad(loss(fast), numbers))(*found)
    theirs = jax.grad(loss(slow), numbers)(*found)
    real = experts < E
    for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        if index == 3:  # The weight of a choice without an expert is 0, whatever its slope.
            one = jnp.where(real, one, 0)
            other = jnp.where(real, other, 0)
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["blocks", "ragged"])
def test_bfloat16_products_accumulate_in_float32(kernel):
    experts = choices(0, 40, 2)
    x, w, bias, weights = arrays(2, experts)
    recipe = MatmulPrecision.of("bfloat16")

    def fast(x, w):
        return forward(x, w, bias, weights, experts, 8, kernel, recipe)

    rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (x, w)]
    np.testing.assert_allclose(
        jax.jit(fast)(x, w), expected(*rounded, bias, weights, experts), rtol=1e-5, atol=1e-5
    )

    def loss(x, w):
        return fast(x, w).sum()

    dx, dw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert dx.dtype == dw.dtype == jnp.float32

    def loss_of_all(x, w):
        return expected(x, w, bias, weights, experts).sum()

    wanted = jax.grad(loss_of_all, (0, 1))(*rounded)
    for one, other in zip((dx, dw), wanted, strict=True):
        error = np.abs(np.asarray(one - other)).max()
        assert error <= 2**-7 * np.abs(np.asarray(other)).max()


def test_results_are_stored_in_the_type_of_the_recipe():
    experts = choices(0, 9, 2)
    x, w, _, _ = arrays(0, experts)
    order = order_by_expert(experts, E, 8)
    recipe = MatmulPrecision.of("bfloat16", "bfloat16")
    inputs = dispatch(x.astype(jnp.bfloat16), order)
    assert inputs.dtype == jnp.bfloat16
    assert grouped_dot(inputs, w, order, 8, "blocks", recipe).dtype == jnp.bfloat16
    rows = inputs.reshape(1, -1, IN)
    assert expert_dot(rows, w[:1], recipe).dtype == jnp.bfloat16


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("capacity", [1, 3, 17])
def test_with_a_capacity_the_products_are_those_of_what_is_kept(capacity):
    rows, length, count = 3, 11, 2
    experts = choices(3, rows * length, count).reshape(rows, length, count)
    kept = within_capacity(experts, E, capacity)
    flat = kept.experts.reshape(-1, count)
    found = arrays(4, flat)

    def fast(x, w, bias, weights):
        order = order_by_place(kept.experts, kept.places, E, capacity)
        inputs = dispatch(x, order).reshape(E, -1, IN)
        y = expert_dot(inputs, w, EXACT).reshape(-1, OUT)
        return combine(add_bias(y, bias, expert_of_rows(order, capacity)), weights, order)

    def slow(x, w, bias, weights):
        return expected(x, w, bias, weights, flat)

    np.testing.assert_allclose(jax.jit(fast)(*found), slow(*found), rtol=2e-5, atol=2e-5)
    ours = jax.jit(jax.grad(lambda *a: jnp.sin(fast(*a)).sum(), (0, 1, 2)))(*found)
    theirs = jax.grad(lambda *a: jnp.sin(slow(*a)).sum(), (0, 1, 2))(*found)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=2e-5)


def test_the_same_bits_every_time():
    experts = choices(5, 64, 3)
    found = arrays(5, experts)

    @jax.jit
    def slopes(x, w, bias, weights):
        def loss(*values):
            return forward(*values, experts, 8, "blocks").sum()

        return jax.grad(loss, (0, 1, 2, 3))(x, w, bias, weights)

    first = slopes(*found)
    for _ in range(3):
        for one, other in zip(slopes(*found), first, strict=True):
            np.testing.assert_array_equal(one, other)
