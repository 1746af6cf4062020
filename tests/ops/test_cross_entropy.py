"""Chunked cross-entropy against a float64 log-softmax, forward, backward, and in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.ops.chunks import num_chunks
from maxtrain.ops.cross_entropy import (
    CrossEntropyStaticArgs,
    cross_entropy,
    plain_cross_entropy,
    token_nll,
)

B, T, D, V = 3, 12, 16, 50


def example(seed=0):
    """Hidden states, head, targets, and weights of which a third are 0."""
    rng = np.random.default_rng(seed)
    hidden, head = rng.standard_normal((B, T, D)), rng.standard_normal((D, V))
    weights = rng.uniform(0.1, 2, (B, T)) * (rng.uniform(size=(B, T)) > 0.33) / T
    targets = rng.integers(0, V, (B, T))
    return jnp.float32(hidden), jnp.float32(head), jnp.int32(targets), jnp.float32(weights)


def oracle(hidden, head, targets, weights, dtype, mask=None, z_scale=0.0, smoothing=0.0):
    """Loss and gradients of hidden and head in float64, of inputs rounded to `dtype`; sums of nll
    and z by row."""
    x, w = (np.asarray(a).astype(jnp.dtype(dtype)).astype(np.float64) for a in (hidden, head))
    logits, weights, hit = (
        x @ w,
        np.asarray(weights, np.float64)[..., None],
        np.arange(V) == np.asarray(targets)[..., None],
    )
    mask = weights if mask is None else np.asarray(mask, np.float64)[..., None]
    top = logits.max(-1, keepdims=True)
    lse = top + np.log(np.exp(logits - top).sum(-1, keepdims=True))
    wanted = (1 - smoothing) * hit + smoothing / V
    loss = -((logits - lse) * wanted * weights).sum() + z_scale * (lse**2 * mask).sum()
    probabilities = np.exp(logits - lse)
    dlogits = (probabilities - wanted) * weights + probabilities * 2 * z_scale * lse * mask
    rows = -((logits - lse) * hit * mask).sum((1, 2)), (lse**2 * mask).sum((1, 2))
    return loss, dlogits @ w.T, np.einsum("btd,btv->dv", x, dlogits), rows


def form_of(chunks, **options):
    """The loss as a function of (hidden, head, targets, weights, dtype): in chunks, or the plain
    one."""
    if chunks != "plain":
        return lambda *args: cross_entropy(*args[:4], chunks=chunks, dtype=args[4], **options)
    mask, z_scale, smoothing = (options.get(name) for name in ("mask", "z_scale", "smoothing"))
    logits = options.get("logits", "float32")
    return lambda *args: plain_cross_entropy(
        *args[:4],
        args[3] if mask is None else mask,
        z_scale,
        CrossEntropyStaticArgs(1, args[4], logits, smoothing or 0.0),
    )


def chunked(chunks):
    return lambda *args: form_of(chunks)(*args).loss


# bfloat16: beyond the oracle's inputs only dlogits is rounded, each to 2**-8 of itself.
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        ("float32", 1e-5),
        ("bfloat16", 2.0**-8),
        pytest.param("float16", 2.0**-11, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize(
    "terms",
    [{}, {"z_scale": 0.3}, {"smoothing": 0.1}, {"z_scale": 0.3, "smoothing": 0.2, "mask": 1.5}],
)
@pytest.mark.parametrize(
    "form", ["plain", 3, *(pytest.param(rows, marks=pytest.mark.long) for rows in (1, T))]
)
def test_every_form_equals_the_oracle_forward_and_backward(form, terms, dtype, tolerance):
    args = example()
    terms = terms | ({"mask": 1.5 * (args[3] > 0).astype(jnp.float32)} if "mask" in terms else {})
    options = terms | ({"z_scale": jnp.float32(terms["z_scale"])} if "z_scale" in terms else {})

    def loss(
        *args,
    ):  # a factor outside, so that a backward pass that forgets its incoming gradient is found
        result = form_of(form, **options)(*args)
        return 3 * result.loss, result

    (loss_, result), (dx, dw) = jax.jit(
        jax.value_and_grad(loss, (0, 1), has_aux=True), static_argnums=4
    )(*args, dtype)
    assert (loss_.dtype, dx.dtype, dw.dtype) == (jnp.float32,) * 3
    expected, expected_dx, expected_dw, (nll, z) = oracle(*args, dtype, **terms)
    np.testing.assert_allclose(loss_, 3 * expected, rtol=1e-5)
    np.testing.assert_allclose(result.nll, nll, rtol=1e-5)
    np.testing.assert_allclose(result.z, z, rtol=1e-5)
    np.testing.assert_allclose(dx, 3 * expected_dx, atol=tolerance * np.abs(3 * expected_dx).max())
    np.testing.assert_allclose(dw, 3 * expected_dw, atol=tolerance * np.abs(3 * expected_dw).max())


@pytest.mark.parametrize("form", ["plain", 3])
def test_what_is_recorded_has_no_gradient(form):
    def recorded(*args):
        result = form_of(form, z_scale=jnp.float32(0.1))(*args, "float32")
        return result.nll.sum() + result.z.sum()

    assert all((g == 0).all() for g in jax.grad(recorded, (0, 1))(*example()))


def test_logits_are_rounded_to_the_output_type_in_every_form():
    """Equal to the float32 loss of logits that were rounded by hand; and not to that of unrounded
    ones."""
    hidden, head, targets, weights = example()
    rounded = (hidden @ head).astype(jnp.bfloat16).astype(jnp.float32)
    expected = (token_nll(rounded, targets) * weights).sum()
    exact = (token_nll(hidden @ head, targets) * weights).sum()
    for form in ("plain", 1, 3):
        loss = jax.jit(form_of(form, logits="bfloat16"), static_argnums=4)(
            hidden, head, targets, weights, "float32"
        ).loss
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
        assert abs(loss - exact) > 1e-4 * exact


def test_the_loss_without_gradients_is_the_same_number():
    args = example()
    forward = jax.jit(chunked(3), static_argnums=4)(*args, "bfloat16")
    with_gradients = jax.jit(jax.value_and_grad(chunked(3)), static_argnums=4)(*args, "bfloat16")[0]
    np.testing.assert_allclose(forward, with_gradients, rtol=1e-6)


def test_tokens_of_weight_zero_leave_no_trace():
    hidden, head, targets, weights = example()
    step = jax.jit(jax.value_and_grad(lambda *a: chunked(3)(*a, "float32"), (0, 1)))
    loss, (dx, dw) = step(hidden, head, targets, weights)
    ignored = weights == 0
    assert 0 < ignored.sum() < ignored.size
    assert (dx[ignored] == 0).all() and (jnp.abs(dx[~ignored]).max(-1) > 0).all()
    other = step(hidden, head, jnp.where(ignored, 0, targets), weights)
    assert loss == other[0] and (dw == other[1][1]).all()


def test_no_weight_at_all_is_a_loss_of_zero_with_zero_gradients():
    hidden, head, targets, weights = example()
    loss, grads = jax.value_and_grad(chunked(3), (0, 1))(
        hidden, head, targets, weights * 0, "float32"
    )
    assert loss == 0 and all((g == 0).all() for g in grads)


def test_no_gradient_flows_to_the_weights():
    assert (jax.grad(chunked(3), 3)(*example(), "float32") == 0).all()


@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_tiny_and_huge_logits_stay_finite(size):
    hidden, head, targets, weights = example()
    args = (hidden * size, head, targets, weights)
    loss, grads = jax.value_and_grad(chunked(3), (0, 1))(*args, "float32")
    np.testing.assert_allclose(loss, oracle(*args, "float32")[0], rtol=1e-5)
    assert all(np.isfinite(g).all() for g in grads)


def test_gradients_have_the_types_of_their_arguments():
    hidden, head, targets, weights = example()
    dx, dw = jax.grad(chunked(3), (0, 1))(
        hidden, head.astype(jnp.bfloat16), targets, weights, "bfloat16"
    )
    assert (dx.dtype, dw.dtype) == (jnp.float32, jnp.bfloat16)


def test_token_nll_is_of_each_token_and_a_target_outside_the_vocabulary_is_not_looked_up():
    logits = jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.1, 0.8]]))
    np.testing.assert_allclose(
        token_nll(logits, jnp.array([1, 2])), -np.log([0.25, 0.8]), rtol=1e-6
    )
    assert np.isfinite(token_nll(logits, jnp.array([-1, 3]))).all()


@settings(deadline=None, max_examples=200)
@given(length=st.integers(1, 600), rows=st.integers(1, 9), chunk=st.integers(0, 3000))
def test_num_chunks_is_the_smallest_that_fits(length, rows, chunk):
    n = num_chunks(length, rows, chunk)
    assert length % n == 0
    smaller = [m for m in range(1, n) if length % m == 0]
    if chunk == 0:
        assert n == 1
    else:
        assert rows * length // n <= chunk or n == length
        assert all(rows * length // m > chunk for m in smaller)


def test_the_whole_logits_are_never_in_memory():
    """Compiled, forward and backward, the chunked form needs a fraction of the logits; the plain
    one more than them."""
    b, t, d, v = 4, 512, 32, 4096
    shapes = [
        jax.ShapeDtypeStruct(s, d)
        for s, d in [((b, t, d), jnp.float32), ((d, v), jnp.float32), ((b, t), jnp.int32)]
    ]
    shapes.append(jax.ShapeDtypeStruct((b, t), jnp.float32))

    def temporary_bytes(form):
        compiled = (
            jax.jit(jax.value_and_grad(lambda *a: form(*a, "bfloat16"), (0, 1)))
            .lower(*shapes)
            .compile()
        )
        return compiled.memory_analysis().temp_size_in_bytes

    logits = b * t * v * 4
    assert temporary_bytes(chunked("plain")) > logits
    assert temporary_bytes(chunked(16)) < logits / 4
