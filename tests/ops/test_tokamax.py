"""The grouped products of tokamax: as the blocks that are their oracle, interpreted on this
machine; and compiled for TPUs, which are not here."""

import importlib.util
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, UsageError
from maxtrain.config.across.attention_choice import Hardware
from maxtrain.config.schema import MeshConfig
from maxtrain.ops import tokamax as adapter
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.ops.experts import combine, dispatch, grouped_dot, order_by_expert
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.topologies import compile_options, described_devices

E, IN, OUT, TOKENS, BLOCK = 3, 128, 128, 40, 8
is_there = importlib.util.find_spec("tokamax") is not None
HOPPER = Hardware("gpu", "NVIDIA H100 80GB HBM3", (9, 0))
needs_tokamax = pytest.mark.skipif(not is_there, reason="needs pip install 'maxtrain[tokamax]'")


@pytest.mark.parametrize(
    ("hardware", "compute", "rule"),
    [
        (Hardware("cpu", "CPUs"), "bfloat16", "the devices here are CPUs"),
        (Hardware("gpu", "NVIDIA A100", (8, 0)), "bfloat16", "here are NVIDIA A100"),
        (Hardware("gpu", "NVIDIA B200", (10, 0)), "bfloat16", "here are NVIDIA B200"),
        (HOPPER, "float32", r"no products of precision\.compute=float32 on GPUs"),
    ],
)
def test_devices_without_such_products_are_refused(hardware, compute, rule):
    with pytest.raises(ConfigError, match=rf"{rule}.*model\.routing\.kernel=blocks"):
        adapter.require_products(hardware, compute)


@pytest.mark.parametrize("hardware", [Hardware("tpu", "TPU v5"), HOPPER])
def test_without_the_package_the_extra_is_named(hardware, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokamax", None)
    with pytest.raises(UsageError, match=r"pip install -e .*\[tokamax\]"):
        adapter.require_products(hardware, "bfloat16")


@pytest.fixture
def interpreted(monkeypatch):
    """tokamax's kernel, step by step on this machine, with the tiles of a v5p."""
    from jax._src import tpu_info  # noqa: PLC0415
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu as kernel  # noqa: PLC0415

    chip = tpu_info.get_tpu_info_for_chip(tpu_info.ChipVersion.TPU_V5P, 1)
    monkeypatch.setattr(tpu_info, "get_tpu_info", lambda *args, **kwargs: chip)
    slow = kernel.PallasMosaicTpuRaggedDot(
        interpret=True, bypass_device_check=True, config=kernel.Config()
    )

    def implemented(options):
        return {**options, "implementation": [slow]}

    options = adapter._options
    monkeypatch.setattr(adapter, "_options", lambda precision: implemented(options(precision)))


@needs_tokamax
@pytest.mark.usefixtures("interpreted")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.long
@pytest.mark.every_dose
def test_products_and_gradients_equal_those_of_blocks():
    """One expert has no tokens, and there are rows behind the last expert."""
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.choice([0, 2, E], (TOKENS, 2)))
    x, w, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((TOKENS, IN), (E, IN, OUT), experts.shape)
    )
    order = order_by_expert(experts, E, BLOCK)

    def loss(kernel):
        def of(x, w):
            y = grouped_dot(
                dispatch(x, order), w, order, BLOCK, kernel, MatmulPrecision.of("float32")
            )
            return (jnp.sin(combine(y, weights, order)) ** 2).sum() + (y**2).sum(), y

        return jax.value_and_grad(of, (0, 1), has_aux=True)

    (_, ours), grads = loss("tokamax")(x, w)
    (_, theirs), wanted = loss("blocks")(x, w)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for one, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


def compiled_for(devices, compute):
    """A product with the gradients of both its inputs."""
    mesh = make_mesh(MeshConfig(fsdp=1), devices[:1])
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def loss(x, w, experts):
        order = order_by_expert(experts, E, BLOCK)
        rows = dispatch(x, order)
        y = grouped_dot(rows, w, order, BLOCK, "tokamax", MatmulPrecision.of(compute))
        return (y.astype(jnp.float32) ** 2).sum()

    shapes = ((TOKENS, IN), jnp.float32), ((E, IN, OUT), jnp.float32), ((TOKENS, 2), jnp.int32)
    given = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
    with jax.set_mesh(mesh):
        lowered = jax.jit(jax.grad(loss, (0, 1))).lower(*given)
        return lowered.compile(compile_options(devices[0]) or None).as_text() or ""


@needs_tokamax
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs maxtrain[tpu]")
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_products_and_gradients_compile_for_a_tpu(compute):
    """Three kernels: the product, and the gradients of both its inputs."""
    try:
        text = compiled_for(described_devices("v5p:2x2x1"), compute)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert text.count('custom_call_target="tpu_custom_call"') == 3


@needs_tokamax
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_products_and_gradients_compile_for_an_h100(compute):
    pytest.importorskip("jax_plugins.xla_cuda13")
    devices = described_devices("h100:1")
    with adapter.lowered_for(devices[0]):
        text = compiled_for(devices, compute)
    assert text.count('custom_call_target="mosaic_gpu_v2"') == 3


@needs_tokamax
@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.filterwarnings("ignore")
def test_what_a_gpu_has_no_products_for_is_said():
    pytest.importorskip("jax_plugins.xla_cuda13")
    devices = described_devices("b200:1")
    with adapter.lowered_for(devices[0]), pytest.raises(ConfigError, match=r"tokamax has no kern"):
        compiled_for(devices, "bfloat16")


@needs_tokamax
@pytest.mark.gpu
@pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a GPU")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
@pytest.mark.parametrize(("inputs", "outputs"), [(128, 256), (192, 160)])
def test_a_gpu_multiplies_as_blocks_do(inputs, outputs, compute):
    """One expert has no tokens, and there are rows behind the last expert."""
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.choice([0, 2, E], (300, 2)))
    x, w, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((300, inputs), (E, inputs, outputs), experts.shape)
    )
    order = order_by_expert(experts, E, BLOCK)

    def loss(kernel):
        def of(x, w):
            rows = dispatch(x, order)
            y = grouped_dot(rows, w, order, BLOCK, kernel, MatmulPrecision.of(compute))
            return jnp.sin(combine(y, weights, order) / 30).sum(), y

        return jax.value_and_grad(of, (0, 1), has_aux=True)

    (_, ours), grads = loss("tokamax")(x, w)
    (_, theirs), wanted = loss("blocks")(x, w)
    for one, other in zip((ours, *grads), (theirs, *wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=0.02 * np.abs(other).max())
