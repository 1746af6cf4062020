"""Bounded scores and logits: equations in float64, then every fast form against its oracle, forward
and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.ops.attention import attention
from maxtrain.ops.attention.flash import flash_attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.cross_entropy import (
    CrossEntropyStaticArgs,
    cross_entropy,
    plain_cross_entropy,
    soft_capped,
    soft_capped_slope,
)
from maxtrain.ops.divergence import DivergenceStaticArgs as DivergenceForm
from maxtrain.ops.divergence import LogitFormats, Predictor, divergence, plain_divergence

H = 8
SCALE = 0.7
CAP = 1.5


def normal(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def heads(T: int) -> tuple[list[jax.Array], jax.Array, Mask]:
    """Queries, keys and values; the gradient of the output; two documents and padding."""
    q, k, v, g = normal((2, T, 4, H), (2, T, 2, H), (2, T, 2, H), (2, T, 4, H))
    segments = np.ones((2, T), np.int32)
    segments[0, T // 3 :] = 2
    segments[1, -2:] = 0
    return [q, k, v], g, Mask.of_rows(jnp.asarray(segments))


@functools.partial(jax.jit, static_argnames=("kernel", "dtype", "scale", "softcap"))
def run(qkv, mask, g, *, kernel, dtype="float32", scale=SCALE, softcap=CAP):
    """Output, and the gradients of sum(output * g)."""
    call = functools.partial(
        attention, mask=mask, kernel=kernel, dtype=dtype, scale=scale, softcap=softcap
    )
    out, vjp = jax.vjp(call, *qkv)
    return out, *vjp(g)


def test_a_bound_is_kept_and_its_slope_is_that_of_the_equation():
    x = np.linspace(-20, 20, 101)
    capped = np.asarray(soft_capped(jnp.asarray(x, jnp.float32), CAP), np.float64)
    np.testing.assert_allclose(capped, CAP * np.tanh(x / CAP), atol=1e-6)
    assert np.abs(capped).max() <= CAP
    slope = soft_capped_slope(jnp.asarray(capped, jnp.float32), CAP)
    np.testing.assert_allclose(slope, 1 / np.cosh(x / CAP) ** 2, atol=1e-6)
    same = jnp.asarray(x, jnp.float32)
    assert soft_capped(same, None) is same


@pytest.mark.parametrize("kernel", ["eager", "xla"])
@pytest.mark.parametrize("softcap", [None, CAP])
def test_attention_is_its_equation(kernel, softcap):
    T = 11
    (q, k, v), g, mask = heads(T)
    out = run((q, k, v), mask, g, kernel=kernel, softcap=softcap)[0]
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    scores = np.einsum("btnh,bsnh->bnts", q, np.repeat(k, 2, axis=2)) * SCALE
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    scores = np.where(np.asarray(mask.visible())[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    expected = np.einsum("bnts,bsnh->btnh", weights, np.repeat(v, 2, axis=2))
    np.testing.assert_allclose(out, expected, atol=1e-5)


# Blocks are 128 queries or more.
@pytest.mark.parametrize(
    ("T", "window", "dtype"),
    [
        pytest.param(60, None, "float32", marks=pytest.mark.long),
        (300, 130, "float32"),
        pytest.param(300, None, "bfloat16", marks=pytest.mark.long),
    ],
)
def test_blocks_equal_the_oracle_forward_and_backward(T, window, dtype):
    qkv, g, mask = heads(T)
    mask = mask.within(window)
    tolerance = 1e-5
    if dtype == "bfloat16":
        tolerance = 0.05
    ours = run(qkv, mask, g, kernel="xla", dtype=dtype)
    theirs = run(qkv, mask, g, kernel="eager", dtype=dtype)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance, rtol=tolerance)
    plain = run(qkv, mask, g, kernel="eager", dtype=dtype, softcap=None)
    assert np.abs(np.asarray(plain[0] - theirs[0])).max() > 0.01


@pytest.mark.long
def test_flash_interpreted_equals_the_oracle_forward_and_backward():
    qkv, g, mask = heads(128)
    flash = functools.partial(
        flash_attention,
        mask=mask,
        dtype="float32",
        scale=SCALE,
        softcap=CAP,
        interpret=True,
    )
    out, vjp = jax.vjp(flash, *qkv)
    for one, other in zip((out, *vjp(g)), run(qkv, mask, g, kernel="eager"), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-4, rtol=1e-4)


def test_a_kernel_that_cannot_bound_scores_says_so():
    (q, k, v), _, mask = heads(8)
    with pytest.raises(ConfigError, match=r"cudnn can't bound scores.*Set model.attention=xla"):
        attention(q, k, v, mask, kernel="cudnn", dtype="bfloat16", softcap=CAP)


B, D, V = 3, 16, 50


# The oracle's gradient is rounded to bfloat16 where its logits are; that of the chunks is not.
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize(
    ("dtype", "rounded", "tolerance"),
    [
        ("float32", "float32", 1e-5),
        ("bfloat16", "float32", 2.0**-7),
        ("float32", "bfloat16", 2.0**-7),
    ],
)
def test_cross_entropy_in_chunks_equals_the_oracle(chunks, dtype, rounded, tolerance):
    T = 12
    hidden, head, weights = normal((B, T, D), (D, V), (B, T))
    targets = jnp.asarray(np.random.default_rng(1).integers(0, V, (B, T)), jnp.int32)
    weights = jnp.abs(weights) / T
    z_scale = jnp.float32(0.3)

    def fast(hidden, head):
        options = {"z_scale": z_scale, "smoothing": 0.1, "logits": rounded, "softcap": CAP}
        args = (hidden, head, targets, weights)
        return 3 * cross_entropy(*args, chunks=chunks, dtype=dtype, **options).loss

    def plain(hidden, head):
        form = CrossEntropyStaticArgs(1, dtype, rounded, 0.1, CAP)
        args = (hidden, head, targets, weights, weights)
        return 3 * plain_cross_entropy(*args, z_scale, form).loss

    ours = jax.value_and_grad(fast, (0, 1))(hidden, head)
    theirs = jax.value_and_grad(plain, (0, 1))(hidden, head)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-6)
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance * np.abs(other).max())


def test_cross_entropy_of_bounded_logits_is_its_equation():
    hidden, head = normal((1, 4, D), (D, V))
    targets = jnp.asarray([[3, 1, 4, 1]], jnp.int32)
    found = cross_entropy(
        hidden, head, targets, jnp.ones((1, 4)), chunks=2, dtype="float32", softcap=CAP
    )
    logits = CAP * np.tanh(np.asarray(hidden, np.float64) @ np.asarray(head, np.float64) / CAP)
    lse = np.log(np.exp(logits).sum(-1))
    expected = (lse - np.take_along_axis(logits, np.asarray(targets)[..., None], -1)[..., 0]).sum()
    np.testing.assert_allclose(found.loss, expected, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["forward", "reverse"])
@pytest.mark.parametrize("caps", [(CAP, None), (None, CAP), (CAP, 2 * CAP)])
def test_divergence_in_chunks_equals_the_oracle(kind, caps):
    T = 12
    hidden, head, of_teacher, head_of_teacher, weights = normal(
        (B, T, D), (D, V), (B, T, 24), (24, V), (B, T)
    )
    student = Predictor(hidden, head)
    teacher = Predictor(of_teacher, head_of_teacher)
    weights = jnp.abs(weights) / T
    numbers = [LogitFormats("float32", "float32", cap) for cap in caps]

    def fast(student):
        found = divergence(
            student,
            teacher,
            weights,
            weights,
            chunks=3,
            student_numbers=numbers[0],
            teacher_numbers=numbers[1],
            temperature=2.0,
            kind=kind,
        )
        return 3 * found.loss

    def plain(student):
        form = DivergenceForm(1, numbers[0], numbers[1], 2.0, kind)
        return 3 * plain_divergence(student, teacher, weights, weights, form).loss

    ours = jax.value_and_grad(fast)(student)
    theirs = jax.value_and_grad(plain)(student)
    np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
    for one, other in zip(ours[1], theirs[1], strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 * np.abs(other).max())
