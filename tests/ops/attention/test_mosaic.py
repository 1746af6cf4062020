"""Attention by tokamax's kernel for Hopper and Blackwell: its arguments equal the mask; tokamax's
own slow form, with the same arguments, equals the oracle; the kernel itself compiles for GPUs,
which are not here."""

import functools
import importlib.util
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import ConfigError, UsageError
from maxtrain.config import load_config
from maxtrain.config.schema import MeshConfig
from maxtrain.ops import tokamax as adapter
from maxtrain.ops.attention import Mask, attention
from maxtrain.ops.attention.mosaic import first_keys
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.topologies import compile_options, described_devices
from maxtrain.trainer.abstract_step import StepPrograms
from tests.ops.attention.test_triton import assert_close, documents, example

is_there = importlib.util.find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not is_there, reason="needs pip install 'maxtrain[tokamax]'")


def both(q, k, v, mask, g, **options):
    """The output and the gradients."""
    out, vjp = jax.vjp(functools.partial(attention, mask=mask, **options), q, k, v)
    return out, *vjp(g)


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_the_first_key_is_the_first_that_the_mask_shows(window):
    segments = documents(4, 96)
    segments = segments.at[:, -5:].set(0)  # padding
    mask = Mask.of_rows(segments).within(window)
    visible = np.asarray(mask.visible())
    np.testing.assert_array_equal(first_keys(segments, window), visible.argmax(2))
    columns = np.arange(96)
    from_the_first = columns >= np.asarray(first_keys(segments, window))[:, :, None]
    np.testing.assert_array_equal(from_the_first & (columns <= columns[:, None]), visible)


def test_without_the_package_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(UsageError, match=r"pip install -e .*\[tokamax\]"):
        adapter.require_attention()


@pytest.mark.every_dose
@pytest.mark.long
@needs_tokamax
@pytest.mark.filterwarnings("ignore")
def test_devices_that_it_has_no_kernel_for_are_refused():
    q, k, v, _ = example(1, 128, 2, 1, 64)
    mask = Mask.of_rows(documents(1, 128))
    with pytest.raises(ConfigError, match=r"model\.attention=mosaic: tokamax has no kernel"):
        attention(q, k, v, mask, kernel="mosaic", dtype="bfloat16")


@needs_tokamax
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize(
    "axes", [{"fsdp": 1}, {"fsdp": 2, "tensor": 2}, {"fsdp": 2, "context": 2}], ids=str
)
def test_tokamax_in_its_slow_form_equals_the_oracle(axes, window, monkeypatch):
    """It gets the masks, scales and sums of the kernel; on a mesh, too."""
    from tokamax._src.ops.attention import base  # noqa: PLC0415

    slow = base.DotProductAttention(vjp=base.DotProductAttentionVjp())
    monkeypatch.setattr(adapter, "_attention_op", lambda: slow)
    q, k, v, g = example(4, 128, 4, 2, 16)
    exchange = "heads" if "context" in axes else None
    mask = Mask.of_rows(documents(4, 128), exchange=exchange).within(window)
    alone = Mask.of_rows(documents(4, 128)).within(window)
    expected = both(q, k, v, alone, g, kernel="eager", dtype="float32", scale=0.3)
    devices = jax.devices()[: math.prod(axes.values())]
    with jax.set_mesh(make_mesh(MeshConfig(data=1, **axes), devices)):
        ours = both(q, k, v, mask, g, kernel="mosaic", dtype="float32", scale=0.3)
    assert_close(ours, expected, 1e-5)


@needs_tokamax
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("heads", "size"), [((8, 2), 128), ((4, 4), 64), ((6, 2), 80)], ids=str)
def test_it_compiles_for_an_h100_forward_and_backward(heads, size):
    """Three kernels: the output, the gradient of queries, and that of keys and values."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    (device,) = described_devices("h100:1")
    everywhere = NamedSharding(Mesh(np.array([device]), ("x",)), PartitionSpec())
    N, K = heads

    def described(shape, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)

    def step(q, k, v, segments, g):
        mask = Mask.of_rows(segments).within(1000)
        return both(q, k, v, mask, g, kernel="mosaic", dtype="bfloat16")

    q, k, v, g = (described((2, 2048, n, size), jnp.bfloat16) for n in (N, K, K, N))
    segments = described((2, 2048), jnp.int32)
    with jax.set_mesh(everywhere.mesh), adapter.lowered_for(device):
        lowered = jax.jit(step).lower(q, k, v, segments, described(g.shape, jnp.float32))
        text = lowered.compile(compile_options(device) or None).as_text()
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3


@needs_tokamax
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_card_that_its_code_can_not_be_made_for_is_named():
    """The compiler that comes without a GPU does not make Mosaic's code for Blackwell."""
    pytest.importorskip("jax_plugins.xla_cuda13")
    words = ["config=quickstart", "model.attention=mosaic", "data.packing=bins"]
    config = load_config([*words, "model.vocab_size=256", "mesh.fsdp=1"])
    programs = StepPrograms(config, described_devices("b200:1"))
    refused = pytest.raises(ConfigError, match=r"mosaic: .* makes no code for NVIDIA B200.*Set mo")
    with jax.numpy_dtype_promotion("standard"), refused:
        programs.compile(8, 256)


@needs_tokamax
@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("window", [None, 1, 100])
@pytest.mark.parametrize("size", [64, 80, 128])
def test_a_gpu_computes_what_the_oracle_does(size, window, dtype):
    q, k, v, g = example(2, 384, 4, 2, size)
    mask = Mask.of_rows(documents(2, 384)).within(window)
    ours = both(q, k, v, mask, g, kernel="mosaic", dtype=dtype)
    with jax.default_matmul_precision("highest"):
        expected = both(q, k, v, mask, g, kernel="eager", dtype="float32")
    assert_close(ours, expected, 0.02)
    again = both(q, k, v, mask, g, kernel="mosaic", dtype=dtype)
    assert all(jnp.array_equal(x, y) for x, y in zip(ours, again, strict=True))
