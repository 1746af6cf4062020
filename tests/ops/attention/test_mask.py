"""Windows and attention sinks: the oracle against explicit loops in float64, the other kernels
against the oracle, and what a mask says of masks."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from maxtrain.ops.attention import attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.xla import _blocks
from tests.ops.attention.masks import of_cache

H = 8


@functools.partial(jax.jit, static_argnames=("kernel", "dtype"))
def run(q, k, v, sinks, mask, g, *, kernel, dtype="float32"):
    """Output, and the gradients of sum(output * g) by queries, keys, values and sinks."""

    def call(q, k, v, sinks):
        return attention(q, k, v, mask, sinks=sinks, kernel=kernel, dtype=dtype)

    out, vjp = jax.vjp(call, q, k, v, sinks)
    return out, *vjp(g)


@functools.partial(jax.jit, static_argnames="kernel")
def output(q, k, v, mask, sinks=None, *, kernel):
    return attention(q, k, v, mask, sinks=sinks, kernel=kernel, dtype="float32")


def example(B, T, N, K, S, seed=0):
    """Queries, keys, values, sinks and the gradient of the output."""
    rng = np.random.default_rng(seed)
    shapes = [(B, T, N, H), (B, S, K, H), (B, S, K, H), (N,), (B, T, N, H)]
    return [jnp.asarray(rng.standard_normal(shape), jnp.float32) for shape in shapes]


def documents(B, T, seed=0):
    """Segment ids [B, T]: documents of random lengths, numbered from 1; zeros at the end."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        end = rng.integers(T // 2, T + 1)
        row[:end] = 1 + np.cumsum(rng.uniform(size=end) < 6 / T)
    return segments


def loops(q, k, v, sinks, q_columns, kv_columns, q_segments, kv_segments, window):
    """The equation in float64, one query and one head after another."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    S, K = k.shape[1:3]
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(B, T, N):
        head = n // (N // K)
        seen = []
        for s in range(S):
            back = q_columns[b, t] - kv_columns[b, s]
            near = back >= 0 and (window is None or back < window)
            if near and q_segments[b, t] == kv_segments[b, s]:
                seen.append(s)
        scores = [q[b, t, n] @ k[b, s, head] / np.sqrt(H) for s in seen]
        largest = max([*scores, -np.inf if sinks is None else float(sinks[n])])
        weights = [np.exp(score - largest) for score in scores]
        total = sum(weights)
        if sinks is not None:
            total += np.exp(float(sinks[n]) - largest)
        for s, weight in zip(seen, weights, strict=True):
            out[b, t, n] += weight / total * v[b, s, head]
    return out


def check_gradients(ours, theirs, tolerance=1e-5):
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, atol=tolerance, rtol=tolerance)


# B, T, N, K, S, and the column of the first query in keys of more columns than there are queries.
SHAPES = {
    "odd": (2, 23, 6, 3, 23, 0),
    "one key head": (1, 131, 3, 1, 131, 0),
    "as many key heads": (1, 9, 2, 2, 9, 0),
    "cache": (2, 5, 4, 2, 37, 19),
    "one token of a cache": (2, 1, 4, 2, 37, 30),
}
RARE_SHAPES = [name for name in SHAPES if name not in ("odd", "cache")]


@pytest.mark.parametrize(
    ("window", "with_sinks"), [(None, False), (1, False), (None, True), (4, True)]
)
@pytest.mark.parametrize(
    "shape", ["odd", "cache", *(pytest.param(name, marks=pytest.mark.long) for name in RARE_SHAPES)]
)
def test_the_oracle_is_its_equation(shape, window, with_sinks):
    B, T, N, K, S, start = SHAPES[shape]
    q, k, v, sinks, _ = example(B, T, N, K, S)
    if not with_sinks:
        sinks = None
    segments = documents(B, S)
    if S == T:
        mask = Mask.of_rows(jnp.asarray(segments))
    else:
        segments[:] = 1
        segments[0, :20] = 0
        segments[:, start + T :] = -1
        mask = of_cache(jnp.asarray(segments), start, T)
    q_columns = np.broadcast_to(np.arange(start, start + T), (B, T))
    kv_columns = np.broadcast_to(np.arange(S), (B, S))
    expected = loops(
        q, k, v, sinks, q_columns, kv_columns, segments[:, start : start + T], segments, window
    )
    mask = mask.within(window)
    for kernel in ("eager", "xla"):
        out = output(q, k, v, mask, sinks, kernel=kernel)
        np.testing.assert_allclose(out, expected, atol=1e-5, rtol=1e-5)


# Blocks are 128 queries or more. Windows shorter than a block, of a block, over several, and of
# more than all.
@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize(
    ("T", "window", "with_sinks", "dtype"),
    [
        pytest.param(60, 50, True, "float32", marks=pytest.mark.long),
        (515, None, True, "float32"),
        pytest.param(515, 1, False, "float32", marks=pytest.mark.long),
        pytest.param(515, 128, True, "float32", marks=pytest.mark.long),
        (515, 129, False, "float32"),
        pytest.param(515, 300, True, "float32", marks=pytest.mark.long),
        pytest.param(515, 5000, False, "float32", marks=pytest.mark.long),
        (515, 200, True, "bfloat16"),
    ],
)
def test_blocks_equal_the_oracle_forward_and_backward(T, window, with_sinks, dtype):
    tolerance = 1e-5
    if dtype == "bfloat16":
        tolerance = 0.05
    q, k, v, sinks, g = example(2, T, 4, 2, T)
    if not with_sinks:
        sinks = None
    mask = Mask.of_rows(jnp.asarray(documents(2, T))).within(window)
    ours = run(q, k, v, sinks, mask, g, kernel="xla", dtype=dtype)
    theirs = run(q, k, v, sinks, mask, g, kernel="eager", dtype=dtype)
    # The gradient of a sink is a sum over all queries.
    check_gradients(ours[:4], theirs[:4], tolerance)
    if with_sinks:
        np.testing.assert_allclose(ours[4], theirs[4], atol=10 * tolerance, rtol=tolerance)


def test_the_gradient_of_sinks_is_the_slope_of_the_equation():
    q, k, v, sinks, g = example(1, 7, 4, 2, 7)
    segments = np.array([[1, 1, 1, 1, 2, 2, 0]], np.int32)
    columns = np.arange(7)[None]
    mask = Mask.of_rows(jnp.asarray(segments)).within(3)

    def value(sinks):
        out = loops(q, k, v, sinks, columns, columns, segments, segments, 3)
        return (out * np.asarray(g, np.float64)).sum()

    for kernel in ("eager", "xla"):
        actual = run(q, k, v, sinks, mask, g, kernel=kernel)[4]
        for n in range(4):
            step = np.zeros(4)
            step[n] = 1e-5
            middle = np.asarray(sinks, np.float64)
            slope = (value(middle + step) - value(middle - step)) / 2e-5
            np.testing.assert_allclose(actual[n], slope, atol=1e-5, rtol=1e-4)


def test_a_query_that_sees_nothing_gives_nothing_where_there_are_sinks():
    q, k, v, sinks, g = example(1, 3, 2, 1, 5)
    segments = jnp.full((1, 3), 7, jnp.int32)
    mask = Mask(jnp.arange(3) + 2, jnp.arange(5), segments, jnp.ones((1, 5), jnp.int32))
    for kernel in ("eager", "xla"):
        for result in run(q, k, v, sinks, mask, g, kernel=kernel):
            assert (np.asarray(result) == 0).all()


def test_a_sink_that_is_far_below_all_scores_changes_nothing_and_one_far_above_takes_all():
    q, k, v, sinks, _ = example(1, 140, 4, 2, 140)
    mask = Mask.of_rows(jnp.asarray(documents(1, 140))).within(9)
    for kernel in ("eager", "xla"):
        call = functools.partial(output, q, k, v, mask, kernel=kernel)
        np.testing.assert_allclose(call(sinks=sinks * 0 - 1e4), call(), atol=1e-6)
        assert (np.asarray(call(sinks=sinks * 0 + 1e4)) == 0).all()


@pytest.mark.long
@settings(deadline=None, max_examples=8)
@given(
    seed=st.integers(0, 1 << 20),
    T=st.sampled_from([7, 140]),
    S=st.sampled_from([5, 150]),
    per_row=st.booleans(),
    window=st.sampled_from([None, 3, 40]),
)
def test_columns_and_segments_in_any_order_are_the_equation(seed, T, S, per_row, window):
    """Columns that lie in no order, stand there twice or are missing, as in rings and paged
    caches. With sinks, so that a query may see nothing."""
    rng = np.random.default_rng(seed)
    B, N, K = 2, 4, 2
    q, k, v, sinks, g = example(B, T, N, K, S, seed)
    rows = B if per_row else 1
    q_columns = rng.integers(0, 2 * S, (rows, T)).astype(np.int32)
    kv_columns = rng.integers(0, 2 * S, (rows, S)).astype(np.int32)
    q_segments = rng.integers(0, 3, (B, T)).astype(np.int32)
    kv_segments = rng.integers(-1, 3, (B, S)).astype(np.int32)
    mask = Mask(
        jnp.asarray(q_columns if per_row else q_columns[0]),
        jnp.asarray(kv_columns if per_row else kv_columns[0]),
        jnp.asarray(q_segments),
        jnp.asarray(kv_segments),
        window,
    )
    expected = loops(
        q,
        k,
        v,
        sinks,
        np.broadcast_to(q_columns, (B, T)),
        np.broadcast_to(kv_columns, (B, S)),
        q_segments,
        kv_segments,
        window,
    )
    oracle = run(q, k, v, sinks, mask, g, kernel="eager")
    blocks = run(q, k, v, sinks, mask, g, kernel="xla")
    np.testing.assert_allclose(oracle[0], expected, atol=1e-5, rtol=1e-5)
    check_gradients(blocks, oracle, 2e-5)


LENGTHS = (5, 130, 1, 60, 33)  # 229 tokens, then padding to 270: three blocks of queries


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["eager", "xla"])
@pytest.mark.parametrize("window", [3, pytest.param(100, marks=pytest.mark.long)])
def test_packed_documents_are_as_if_each_were_alone_with_a_window(kernel, window):
    T = 270
    q, k, v, sinks, g = example(1, T, 4, 2, T)
    numbers = [*range(1, len(LENGTHS) + 1), 0]
    segments = np.repeat(numbers, [*LENGTHS, T - sum(LENGTHS)]).astype(np.int32)[None]
    packed_mask = Mask.of_rows(jnp.asarray(segments)).within(window)
    packed = run(q, k, v, sinks, packed_mask, g, kernel=kernel)
    start = 0
    for length in LENGTHS:
        part = slice(start, start + length)
        alone = Mask.of_rows(jnp.ones((1, length), jnp.int32)).within(window)
        separate = run(q[:, part], k[:, part], v[:, part], sinks, alone, g[:, part], kernel=kernel)
        # Without the gradient of the sinks, which is a sum over all documents.
        check_gradients([x[:, part] for x in packed[:4]], separate[:4])
        start += length


@pytest.mark.long
@pytest.mark.parametrize("kernel", ["eager", "xla"])
@pytest.mark.parametrize("window", [1, 6, 150])
def test_queries_of_a_cache_are_as_without_one(kernel, window):
    """A prompt, some columns more, and one token: each as in one pass over all."""
    T, S = 170, 200
    q, k, v, sinks, _ = example(2, T, 4, 2, T)
    segments = np.ones((2, T), np.int32)
    segments[1, :20] = 0
    whole_mask = Mask.of_rows(jnp.asarray(segments)).within(window)
    call = functools.partial(output, sinks=sinks, kernel=kernel)
    whole = call(q, k, v, whole_mask)
    padding = ((0, 0), (0, S - T), (0, 0), (0, 0))
    k_cache = jnp.pad(k, padding, constant_values=100.0)
    v_cache = jnp.pad(v, padding, constant_values=100.0)
    for start, stop in [(0, 160), (160, 169), (169, 170)]:
        known = np.full((2, S), -1, np.int32)
        known[:, :stop] = segments[:, :stop]
        mask = of_cache(jnp.asarray(known), jnp.int32(start), stop - start).within(window)
        out = call(q[:, start:stop], k_cache, v_cache, mask)
        np.testing.assert_allclose(out, whole[:, start:stop], atol=1e-5, rtol=1e-5)


def test_blocks_of_queries_leave_out_keys_that_none_of_them_sees():
    """Keys are left out for rows in order; with any other mask, all keys are read."""
    rows = Mask.of_rows(jnp.ones((1, 1024), jnp.int32))
    starts = [block.queries.start for block in _blocks(rows)]
    assert starts == list(range(0, 1024, 128))
    assert [(b.keys.start, b.keys.stop) for b in _blocks(rows)] == [(0, s + 128) for s in starts]
    # Of a window of 200, the block that begins at 512 sees from 313 on; 256 is a multiple of 128.
    windowed = _blocks(rows.within(200))
    assert windowed[4].keys == slice(256, 640)
    assert all(block.keys.stop - block.keys.start <= 384 for block in windowed)
    # The query at 512 sees no key before 385 here, and one before 384 with two columns more.
    assert _blocks(rows.within(128))[4].keys.start == 384
    assert _blocks(rows.within(130))[4].keys.start == 256
    cache = of_cache(jnp.ones((1, 2000), jnp.int32), 0, 1024)
    assert {(b.keys.start, b.keys.stop) for b in _blocks(cache.within(200))} == {(0, 2000)}


@pytest.mark.long
def test_a_window_costs_less_than_all_columns():
    """Operations of the compiled program, forward and backward."""
    x = jax.ShapeDtypeStruct((1, 1024, 2, H), jnp.float32)
    rows = Mask.of_rows(jnp.ones((1, 1024), jnp.int32))

    def flops(window):
        mask = rows.within(window)
        compiled = run.lower(x, x, x, None, mask, x, kernel="xla").compile()
        return compiled.cost_analysis()["flops"]

    assert flops(128) < 0.5 * flops(None)


def test_a_window_counts_the_own_column():
    mask = Mask.of_rows(jnp.array([[1, 1, 1, 1, 2, 0, 0]])).within(2)
    expected = [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0, 0],
        [0, 0, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1, 1],
    ]
    np.testing.assert_array_equal(mask.visible()[0], np.array(expected, bool))
    assert mask.within(None).window is None


@pytest.mark.parametrize("window", [0, -3])
def test_a_window_that_sees_nothing_is_refused(window):
    mask = Mask.of_rows(jnp.ones((1, 4), jnp.int32))
    with pytest.raises(ValueError, match=rf"window={window} must be at least 1.*Set it to 1024"):
        mask.within(window)


@pytest.mark.parametrize("kernel", ["cudnn", "triton", "mosaic", "flash"])
def test_kernels_without_sinks_refuse_them(kernel):
    q, k, v, sinks, _ = example(1, 128, 2, 1, 128)
    mask = Mask.of_rows(jnp.ones((1, 128), jnp.int32))
    with pytest.raises(
        ConfigError,
        match=rf"model\.attention={kernel} has no attention sinks.*Set model\.attention=xla",
    ):
        attention(q, k, v, mask, sinks=sinks, kernel=kernel, dtype="bfloat16")


@pytest.mark.parametrize("kernel", ["cudnn", "triton", "mosaic", "flash"])
def test_kernels_of_rows_in_order_take_no_other_mask(kernel):
    q, k, v, _, _ = example(1, 128, 2, 1, 256)
    mask = of_cache(jnp.ones((1, 256), jnp.int32), 0, 128)
    with pytest.raises(AssertionError, match="caches are for other kernels"):
        attention(q, k, v, mask, kernel=kernel, dtype="bfloat16")


def test_window_and_order_stay_known_in_what_is_compiled():
    """Columns and segments are traced, inside a loop and inside what is computed again, too."""
    seen = []

    @jax.checkpoint
    def layer(mask):
        seen.append(mask)
        return mask.visible().sum()

    @jax.jit
    def layers(mask):
        return jax.lax.scan(lambda mask, _: (mask, layer(mask)), mask, length=3)[1]

    mask = Mask.of_rows(jnp.ones((1, 5), jnp.int32)).within(2)
    assert layers(mask).tolist() == [9, 9, 9]
    assert all((inner.window, inner.in_order) == (2, True) for inner in seen)
    leaves = jax.tree_util.tree_leaves_with_path(mask)
    names = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert names == [".q_columns", ".kv_columns", ".q_segments", ".kv_segments"]
