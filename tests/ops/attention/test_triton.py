"""The kernel in Triton, interpreted, against the oracle; and compiled for GPUs that are not here."""

import functools
import itertools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.ops.attention import ON_ONE_DEVICE, attention
from maxtrain.ops.attention.all_to_all import all_to_all_attention
from maxtrain.ops.attention.eager import eager_attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.triton import triton_attention
from maxtrain.ops.attention.triton_kernels import _met, _tiles
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.topologies import compile_options, described_devices

interpreted = functools.partial(triton_attention, interpret=True)


def example(B, T, N, K, H, seed=0):
    """Queries, keys, values and the gradient of the output."""
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal((B, T, n, H)), jnp.float32) for n in (N, K, K, N)]


def documents(B, T, seed=0):
    """Segments of random lengths, with zeros at the end of each row."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((B, T), np.int32)
    for row in segments:
        end = rng.integers(T // 2, T)
        row[:end] = 1 + np.cumsum(rng.uniform(size=end) < 6 / T)
    return jnp.asarray(segments)


@functools.partial(jax.jit, static_argnames=("kernel", "dtype"))
def both(q, k, v, mask, g, *, kernel, dtype="float32"):
    """Output, and the gradients of queries, keys and values."""
    # Not the usual scale. A fixed one would make the weights of wide heads so steep that the oracle
    # itself is further than the tolerance from the result in float64.
    scale = 1.5 * q.shape[-1] ** -0.5
    call = functools.partial(kernel, mask=mask, dtype=dtype, scale=scale)
    out, vjp = jax.vjp(call, q, k, v)
    return out, *vjp(g)


def assert_close(ours, theirs, tolerance):
    """Assert that arrays are close relative to the largest number of all: a gradient may be a
    difference of such numbers."""
    largest = max(float(jnp.abs(other).max()) for other in theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, other, rtol=0, atol=tolerance * largest)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("sizes", "window", "dtype", "tolerance"),
    [
        ((2, 256, 4, 2, 32), None, "float32", 1e-6),
        ((2, 192, 4, 4, 24), 50, "float32", 1e-6),
        ((1, 16, 2, 1, 16), None, "float32", 1e-6),
        ((1, 48, 3, 1, 8), 7, "float32", 1e-6),
        ((2, 320, 6, 2, 16), 1, "float32", 1e-6),
        ((1, 128, 8, 1, 128), 300, "float32", 1e-6),
        ((2, 320, 4, 2, 32), None, "bfloat16", 0.01),
        ((2, 128, 4, 2, 32), 33, "float16", 2e-3),
    ],
    ids=str,
)
def test_it_equals_the_oracle_forward_and_backward(sizes, window, dtype, tolerance):
    q, k, v, g = example(*sizes)
    mask = Mask.of_rows(documents(*sizes[:2])).within(window)
    ours = both(q, k, v, mask, g, kernel=interpreted, dtype=dtype)
    assert_close(ours, both(q, k, v, mask, g, kernel=eager_attention), tolerance)


@pytest.mark.every_dose
@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from([None, 1, 5, 40]), st.sampled_from([1, 2, 9]))
def test_segments_in_any_order_are_kept_apart(seed, window, most):
    """The tokens of a segment may be spread over the row."""
    q, k, v, g = example(1, 96, 2, 1, 8, seed)
    segments = np.random.default_rng(seed).integers(0, most, (1, 96))
    mask = Mask.of_rows(jnp.asarray(segments, jnp.int32)).within(window)
    ours = both(q, k, v, mask, g, kernel=interpreted)
    assert_close(ours, both(q, k, v, mask, g, kernel=eager_attention), 1e-6)


@pytest.mark.every_dose
@pytest.mark.long
def test_documents_in_one_row_are_what_each_is_alone():
    q, k, v, g = example(1, 256, 4, 2, 16)
    ends = [0, 48, 144, 256]
    numbers = np.repeat([1, 2, 3], np.diff(ends))
    packed = both(
        q, k, v, Mask.of_rows(jnp.asarray(numbers[None], jnp.int32)), g, kernel=interpreted
    )
    for start, stop in itertools.pairwise(ends):
        alone = [x[:, start:stop] for x in (q, k, v, g)]
        mask = Mask.of_rows(jnp.ones((1, stop - start), jnp.int32))
        ours = both(*alone[:3], mask, alone[3], kernel=interpreted)
        assert_close([x[:, start:stop] for x in packed], ours, 1e-6)


def test_blocks_that_nobody_sees_are_left_out():
    tiles = _tiles(1024, (64, 64))
    assert tiles == (64, 64)
    # Sixteen documents of one block each, and one of all.
    short = jnp.asarray(np.repeat(np.arange(16), 64)[None], jnp.int32)
    np.testing.assert_array_equal(_met(short, tiles, None)[0], np.eye(16, dtype=bool))
    whole = _met(jnp.ones((1, 1024), jnp.int32), tiles, None)[0]
    np.testing.assert_array_equal(whole, np.tri(16, dtype=bool))
    # A window of a block and one more key reaches into two blocks before its own.
    near = _met(jnp.ones((1, 1024), jnp.int32), tiles, 66)[0]
    np.testing.assert_array_equal(near, np.tri(16) - np.tri(16, k=-3))


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([(16, 16), (32, 16), (16, 32)]),
    st.sampled_from([None, 1, 17, 33]),
)
def test_no_block_that_is_seen_is_left_out(seed, sizes, window):
    segments = documents(2, 96, seed)
    visible = np.asarray(Mask.of_rows(segments).within(window).visible())
    tiles = _tiles(96, sizes)
    met = np.asarray(_met(segments, tiles, window))
    blocks = visible.reshape(2, 96 // tiles.queries, tiles.queries, 96 // tiles.keys, tiles.keys)
    assert not (blocks.any((2, 4)) & ~met).any()
    # Programs go from the first to the block of their own columns.
    for i in range(met.shape[1]):
        assert met[:, i, tiles.key_blocks(i) - 1].all()
    for j in range(met.shape[2]):
        assert met[:, tiles.first_query_block(j), j].all()


@pytest.mark.long
def test_each_device_has_its_rows_and_heads():
    q, k, v, g = example(4, 64, 4, 2, 16)
    mask = Mask.of_rows(documents(4, 64)).within(40)
    alone = both(q, k, v, mask, g, kernel=interpreted)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), jax.devices()[:4])):
        split = both(q, k, v, mask, g, kernel=interpreted)
    assert_close(split, alone, 1e-6)


@pytest.mark.long
def test_rows_that_are_split_are_dealt_out_by_heads():
    q, k, v, g = example(2, 64, 4, 2, 16)
    mask = Mask.of_rows(documents(2, 64), exchange="heads")
    expected = both(q, k, v, mask, g, kernel=eager_attention)
    local = functools.partial(ON_ONE_DEVICE["triton"], interpret=True)
    dealt = functools.partial(all_to_all_attention, kernel=local)
    with jax.set_mesh(make_mesh(MeshConfig(data=1, fsdp=2, context=2), jax.devices()[:4])):
        split = both(q, k, v, mask, g, kernel=dealt)
    assert_close(split, expected, 1e-6)


# jax is going to give up this backend, and has nothing in its place for cards before Hopper.
DEPRECATED = pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated")


@DEPRECATED
@pytest.mark.long
@pytest.mark.parametrize("topology", ["h100:1", "b200:1"])
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((4, 4), 64), ((6, 2), 80)], ids=str)
def test_it_compiles_for_gpus_forward_and_backward(topology, heads, size):
    """Triton's own compiler refuses what has no room beside the cores."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    (device,) = described_devices(topology)
    everywhere = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    N, K = heads

    def described(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def step(q, k, v, segments, g):
        mask = Mask.of_rows(segments).within(1000)
        call = functools.partial(attention, mask=mask, kernel="triton", dtype="bfloat16")
        out, vjp = jax.vjp(call, q, k, v)
        return out, *vjp(g)

    q, k, v, g = (described((2, 2048, n, size), jnp.bfloat16) for n in (N, K, K, N))
    segments = described((2, 2048), jnp.int32)
    with jax.set_mesh(everywhere.mesh):
        lowered = jax.jit(step).lower(q, k, v, segments, described(g.shape, jnp.float32))
        text = lowered.compile(compile_options(device) or None).as_text()
    for name in ("forward", "backward_queries", "backward_keys"):
        assert f"attention_{name}" in text
    assert text.count('custom_call_target="__gpu$xla.gpu.triton"') == 3


@DEPRECATED
@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_a_gpu_computes_what_the_oracle_does(size, window, dtype):
    q, k, v, g = example(2, 384, 4, 2, size)
    mask = Mask.of_rows(documents(2, 384)).within(window)
    ours = both(q, k, v, mask, g, kernel=triton_attention, dtype=dtype)
    with jax.default_matmul_precision("highest"):
        expected = both(q, k, v, mask, g, kernel=eager_attention)
    assert_close(ours, expected, 0.02)
    again = both(q, k, v, mask, g, kernel=triton_attention, dtype=dtype)
    assert all(jnp.array_equal(x, y) for x, y in zip(ours, again, strict=True))


def test_a_jax_without_its_backend_is_told(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    monkeypatch.delattr("jax.experimental.pallas.triton", raising=False)
    q, k, v, _ = example(1, 16, 1, 1, 16)
    mask = Mask.of_rows(jnp.ones((1, 16), jnp.int32))
    with pytest.raises(ConfigError, match=r"has no Triton backend .* Set model.attention=xla, or"):
        attention(q, k, v, mask, kernel="triton", dtype="bfloat16")
