"""Attention: every kernel against the equations in float64, and what must hold of any of them,
forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.config.kernels import ATTENTION
from maxtrain.config.schema import MeshConfig
from maxtrain.ops.attention import KERNELS, attention, with_cache
from maxtrain.ops.attention.flash import flash_attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.mesh import make_mesh
from tests.ops.attention.masks import of_cache

H = 8
EVERYWHERE = sorted(
    name
    for name, kernel in ATTENTION.items()
    if kernel.segments and kernel.platform is None and not kernel.context
)
KERNEL = pytest.mark.parametrize("kernel", EVERYWHERE)


@functools.partial(jax.jit, static_argnames=("kernel", "dtype"))
def run(q, k, v, mask, g, *, kernel, dtype):
    """Output, and the gradients of sum(output * g) by queries, keys and values."""
    call = functools.partial(attention, mask=mask, kernel=kernel, dtype=dtype)
    out, vjp = jax.vjp(call, q, k, v)
    return out, *vjp(g)


def example(B, T, N, K, *, S=None, seed=0):
    """Queries, keys, values and the gradient of the output."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (B, S or T, K, H), (B, S or T, K, H), (B, T, N, H)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def ragged(B, T, seed=0, padding=True):
    """Segment ids [B, T]: documents of random lengths, numbered from 1; zeros at the end."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        end = rng.integers(T // 2, T) if padding else T
        row[:end] = 1 + np.cumsum(rng.uniform(size=end) < 6 / T)
    return jnp.asarray(segments)


def equations(q, k, v, q_segments, kv_segments, offset, g):
    """Float64: output and gradients, and for each what its error is bounded by when its factors are
    rounded (relative 1)."""
    q, k, v, g = (np.asarray(x, np.float64) for x in (q, k, v, g))
    (_, T, N, _), S, groups = q.shape, k.shape[1], q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    visible = np.arange(S) <= np.arange(T)[:, None] + offset
    visible = visible & (np.asarray(q_segments)[:, :, None] == np.asarray(kv_segments)[:, None, :])
    scores = np.where(visible[:, None], np.einsum("btnh,bsnh->bnts", q, k) * H**-0.5, -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)

    def products(q, k, v, g, sign):
        dp = np.einsum("btnh,bsnh->bnts", g, v)
        ds = p * (dp + sign * (p * dp).sum(-1, keepdims=True)) * H**-0.5
        out, dq = np.einsum("bnts,bsnh->btnh", p, v), np.einsum("bnts,bsnh->btnh", ds, k)
        dk, dv = np.einsum("bnts,btnh->bsnh", ds, q), np.einsum("bnts,btnh->bsnh", p, g)
        return [
            out,
            dq,
            *(x.reshape(*x.shape[:2], N // groups, groups, H).sum(3) for x in (dk, dv)),
        ]

    return products(q, k, v, g, -1), products(*map(np.abs, (q, k, v, g)), +1)


# Batch, T, N, K, S, offset. Blocks are 128 queries or more: one, several, a last one of a few, and
# a cache with S > T.
CASES = {
    "one block": (2, 24, 4, 2, 24, 0),
    "a full block": (1, 128, 2, 2, 128, 0),
    "several blocks, one key head": (1, 300, 4, 1, 300, 0),
    "many blocks, a short last one": (1, 1050, 2, 1, 1050, 0),
    "one token": (2, 1, 4, 2, 1, 0),
    "cache, prompt": (2, 20, 4, 2, 64, 0),
    "cache, one more token": (2, 1, 4, 2, 64, 37),
    "cache, several blocks more": (1, 150, 2, 1, 333, 101),
}
# Those that are like another one where time is short.
LIKE_OTHERS = ("a full block", "many blocks, a short last one", "one token", "cache, prompt")


def cases():
    for name in CASES:
        marks = ()
        if name in LIKE_OTHERS:
            marks = (pytest.mark.long,)
        yield pytest.param(name, marks=marks)


# bfloat16: inputs are rounded for the oracle too. Beyond that, scores' gradients, weights and g are
# rounded to 2**-8 of themselves before a product, at most two of its factors; `bounds` is the sum
# of the products' absolute values.
@KERNEL
@pytest.mark.parametrize(
    ("dtype", "unit"),
    [("float32", 1e-6), pytest.param("bfloat16", 2.0**-7, marks=pytest.mark.long)],
)
@pytest.mark.parametrize("case", list(cases()))
def test_equals_the_equations_forward_and_backward(case, dtype, unit, kernel):
    B, T, N, K, S, offset = CASES[case]
    *qkv, g = example(B, T, N, K, S=S)
    kv_segments = ragged(B, S, padding=S == T).at[:, offset + T :].set(-1)
    q_segments = kv_segments[:, offset : offset + T]
    if S == T:
        mask = Mask.of_rows(q_segments)
    else:
        mask = of_cache(kv_segments, offset, T)
    actual = run(*qkv, mask, g, kernel=kernel, dtype=dtype)
    rounded = [np.asarray(x).astype(jnp.dtype(dtype)) for x in qkv]
    expected, bounds = equations(*rounded, q_segments, kv_segments, offset, g)
    for name, ours, theirs, bound in zip(
        ["out", "dq", "dk", "dv"], actual, expected, bounds, strict=True
    ):
        assert ours.dtype == jnp.float32
        error = np.abs(np.asarray(ours, np.float64) - theirs)
        assert (error <= unit * (bound + 1e-3)).all(), (name, (error / (bound + 1e-3)).max() / unit)
        if dtype == "float32":
            np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_xla_equals_eager_where_a_query_sees_nothing(dtype):
    """This does not occur in training, but a cache may hold nothing for a row's segment: the result
    is finite, and hidden keys get no gradient."""
    *qkv, g = example(1, 4, 2, 2, S=16)
    q_segments, kv_segments = jnp.full((1, 4), 7, jnp.int32), jnp.ones((1, 16), jnp.int32)
    mask = Mask(jnp.arange(4) + 3, jnp.arange(16), q_segments, kv_segments)
    for kernel in EVERYWHERE:
        results = run(*qkv, mask, g, kernel=kernel, dtype=dtype)
        assert all(np.isfinite(x).all() for x in results)


LENGTHS = (5, 130, 1, 60, 33)  # 229 tokens, then padding to 270: three blocks of queries


@pytest.mark.long
@pytest.mark.every_dose
@KERNEL
def test_packed_documents_are_as_if_each_were_alone_forward_and_backward(kernel):
    T = 270
    *qkv, g = example(1, T, 4, 2)
    segments = jnp.asarray(
        np.repeat([*range(1, len(LENGTHS) + 1), 0], [*LENGTHS, T - sum(LENGTHS)]), jnp.int32
    )[None]
    packed = run(*qkv, Mask.of_rows(segments), g, kernel=kernel, dtype="float32")
    for start, length in zip(np.cumsum((0, *LENGTHS)), LENGTHS):
        part = slice(start, start + length)
        alone = Mask.of_rows(jnp.ones((1, length), jnp.int32))
        separate = run(
            *(x[:, part] for x in qkv), alone, g[:, part], kernel=kernel, dtype="float32"
        )
        for ours, theirs in zip(packed, separate, strict=True):
            np.testing.assert_allclose(ours[:, part], theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.long
@KERNEL
@settings(deadline=None, max_examples=15)
@given(
    changed=st.integers(0, 199),
    seed=st.integers(0, 99),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_nothing_before_a_changed_token_changes_and_nothing_outside_its_document(
    kernel, changed, seed, dtype
):
    T = 200
    q, k, v, g = example(1, T, 2, 1, seed=seed)
    segments = ragged(1, T, seed)
    call = functools.partial(run, mask=Mask.of_rows(segments), kernel=kernel, dtype=dtype)
    before = call(q, k, v, g=g)[0]
    after = call(q, k.at[:, changed].multiply(-3), v.at[:, changed].add(100), g=g)[0]
    sees = (np.arange(T) >= changed) & np.asarray(segments[0] == segments[0, changed])
    differs = np.abs(np.asarray(after - before)).max((0, 2, 3)) > 0
    assert (differs == sees).all()  # bitwise: a hidden key has no weight at all
    # Backward the other way round: the output at `changed` gives gradients to what it sees and
    # exactly none to the rest.
    only = jnp.zeros_like(g).at[:, changed].set(g[:, changed])
    _, dq, dk, dv = call(q, k, v, g=only)
    seen = (np.arange(T) <= changed) & np.asarray(segments[0] == segments[0, changed])
    assert ((np.abs(np.asarray(dv)).max((0, 2, 3)) > 0) == seen).all()
    assert (np.asarray(dk)[:, ~seen] == 0).all()
    assert (np.asarray(dq)[:, np.arange(T) != changed] == 0).all()


def test_the_mask_is_causal_from_the_offset_and_inside_segments():
    mask = of_cache(jnp.array([[1, 1, 2, 2, -1]]), 1, 3)
    expected = [[1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0]]
    np.testing.assert_array_equal(mask.q_segments, [[1, 2, 2]])
    np.testing.assert_array_equal(mask.visible()[0], np.array(expected, bool))


@KERNEL
def test_gradients_have_the_types_of_their_arguments(kernel):
    q, k, v, g = example(1, 4, 2, 1)
    cache_type = jnp.bfloat16
    segments = jnp.ones((1, 4), jnp.int32)
    results = jax.eval_shape(
        functools.partial(run, kernel=kernel, dtype="bfloat16"),
        q,
        k.astype(cache_type),
        v.astype(cache_type),
        Mask.of_rows(segments),
        g,
    )
    assert [x.dtype for x in results] == [jnp.float32, jnp.float32, cache_type, cache_type]


@pytest.mark.long
def test_the_square_of_scores_is_never_in_memory():
    """Compiled, forward and backward, xla needs a fraction of one float32 array of all scores;
    eager needs more than one."""
    B, T, N = 1, 2048, 4
    x, segments = (
        jax.ShapeDtypeStruct((B, T, N, H), jnp.float32),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )

    mask = jax.eval_shape(Mask.of_rows, segments)

    def temporary_bytes(kernel):
        compiled = run.lower(x, x, x, mask, x, kernel=kernel, dtype="bfloat16").compile()
        return compiled.memory_analysis().temp_size_in_bytes

    scores = B * N * T * T * 4
    assert temporary_bytes("eager") > scores
    assert temporary_bytes("xla") < scores / 2


def test_every_kernel_is_in_the_table():
    assert KERNELS.keys() == ATTENTION.keys() and EVERYWHERE == ["eager", "xla"]
    names = ("eager", "xla", "cudnn", "triton", "mosaic", "flash", "ring")
    assert [with_cache(name) for name in names] == [
        "eager",
        "xla",
        "xla",
        "xla",
        "xla",
        "xla",
        "xla",
    ]


def test_cudnn_is_lowered_for_gpus_forward_and_backward(monkeypatch):
    """It is not run, which takes a GPU. The custom calls are causal, with grouped keys."""
    monkeypatch.setattr(
        "jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91_000
    )
    *qkv, g = (
        jax.ShapeDtypeStruct(shape, jnp.float32)
        for shape in [(2, 128, 4, 64), *[(2, 128, 2, 64)] * 2, (2, 128, 4, 64)]
    )
    segments = jax.ShapeDtypeStruct((2, 128), jnp.int32)

    def lowered(window):
        def both(q, k, v, segments, g):
            mask = Mask.of_rows(segments).within(window)
            call = functools.partial(attention, mask=mask, kernel="cudnn", dtype="bfloat16")
            out, vjp = jax.vjp(call, q, k, v)
            return out, *vjp(g)

        traced = jax.jit(both).trace(*qkv, segments, g)
        return traced.lower(lowering_platforms=("cuda",)).as_text()

    text = lowered(None)
    assert (
        "__cudnn$fmhaSoftmax" in text and "__cudnn$fmhaSoftmaxBackward" in text and "CAUSAL" in text
    )
    # Forward and backward; cuDNN counts the query's own column, as `Mask.window` does.
    assert text.count(r"\22sliding_window_length\22: 0") == 2
    assert lowered(100).count(r"\22sliding_window_length\22: 100") == 2


@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 1, 100])
def test_cudnn_equals_eager_on_a_row_of_one_document(window):
    rng = np.random.default_rng(0)
    *qkv, g = (
        jnp.asarray(rng.standard_normal((2, 256, heads, 64)), jnp.float32) for heads in (4, 2, 2, 4)
    )
    mask = Mask.of_rows(jnp.ones((2, 256), jnp.int32)).within(window)
    for ours, theirs in zip(
        *(run(*qkv, mask, g, kernel=k, dtype="bfloat16") for k in ("cudnn", "eager"))
    ):
        np.testing.assert_allclose(ours, theirs, atol=0.05, rtol=0.05)


@pytest.mark.long
@pytest.mark.parametrize(
    ("dtype", "tolerance", "window"),
    [
        ("float32", 1e-5, None),
        ("bfloat16", 0.05, None),
        ("float32", 1e-5, 1),
        ("float32", 1e-5, 37),
        ("bfloat16", 0.05, 200),
        ("float32", 1e-5, 300),
    ],
)
def test_flash_interpreted_equals_eager_forward_and_backward_on_a_mesh_too(
    dtype, tolerance, window
):
    """TPUs' kernel without a TPU: ragged documents, padding, grouped queries, windows, rows and
    heads split over devices."""
    *qkv, g = (x * 1.0 for x in example(2, 256, 4, 2))
    mask = Mask.of_rows(ragged(2, 256)).within(window)

    @functools.partial(jax.jit, static_argnames="kernel")
    def both(q, k, v, g, kernel):
        call = functools.partial(kernel, mask=mask, dtype=dtype, scale=H**-0.5)
        out, vjp = jax.vjp(call, q, k, v)
        return out, *vjp(g)

    interpreted = functools.partial(flash_attention, interpret=True)
    expected = both(*qkv, g, kernel=KERNELS["eager"])
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])):
        split = both(*qkv, g, kernel=interpreted)
    for alone, there, theirs in zip(
        both(*qkv, g, kernel=interpreted), split, expected, strict=True
    ):
        np.testing.assert_allclose(alone, theirs, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(there, theirs, atol=tolerance, rtol=tolerance)
