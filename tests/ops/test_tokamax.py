"""The grouped products of tokamax: as the blocks that are their oracle, interpreted on this machine;
and compiled for TPUs, which are not here."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.errors import ConfigError, UsageError
from maxtrain.config.schema import MeshConfig
from maxtrain.ops import tokamax as adapter
from maxtrain.ops.dot import Recipe
from maxtrain.ops.experts import combine, dispatch, grouped_dot, order_by_expert
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.topologies import described_devices

E, IN, OUT, TOKENS, BLOCK = 3, 128, 128, 40, 8
is_there = importlib.util.find_spec("tokamax") is not None
needs_tokamax = pytest.mark.skipif(not is_there, reason="needs pip install 'maxtrain[tokamax]'")


def test_it_is_for_tpus_only():
    with pytest.raises(ConfigError, match=r"platform cpu\. Set model\.routing\.kernel=blocks"):
        adapter.require_tokamax("cpu")


@pytest.mark.skipif(is_there, reason="tokamax is installed")
def test_without_the_package_the_extra_is_named():
    with pytest.raises(UsageError, match=r"pip install -e .*\[tokamax\]"):
        adapter.require_tokamax("tpu")


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
def test_products_and_gradients_equal_those_of_blocks():
    """With an expert without tokens, and rows behind the last expert."""
    rng = np.random.default_rng(0)
    experts = jnp.asarray(rng.choice([0, 2, E], (TOKENS, 2)))
    x, w, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((TOKENS, IN), (E, IN, OUT), experts.shape)
    )
    order = order_by_expert(experts, E, BLOCK)

    def loss(kernel):
        def of(x, w):
            y = grouped_dot(dispatch(x, order), w, order, BLOCK, kernel, Recipe.of("float32"))
            return (jnp.sin(combine(y, weights, order)) ** 2).sum() + (y**2).sum(), y

        return jax.value_and_grad(of, (0, 1), has_aux=True)

    (_, ours), grads = loss("tokamax")(x, w)
    (_, theirs), wanted = loss("blocks")(x, w)
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-5)
    for one, other in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * np.abs(other).max())


@needs_tokamax
@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="needs maxtrain[tpu]")
@pytest.mark.parametrize("compute", ["bfloat16", "float32"])
def test_products_and_gradients_compile_for_a_tpu(compute):
    """Three kernels: the product, and the gradients of both its inputs."""
    devices = described_devices("v5p:2x2x1")
    try:
        mesh = make_mesh(MeshConfig(fsdp=1), devices[:1])
        everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

        def loss(x, w, experts):
            order = order_by_expert(experts, E, BLOCK)
            rows = dispatch(x, order)
            y = grouped_dot(rows, w, order, BLOCK, "tokamax", Recipe.of(compute))
            return (y.astype(jnp.float32) ** 2).sum()

        shapes = ((TOKENS, IN), jnp.float32), ((E, IN, OUT), jnp.float32), ((TOKENS, 2), jnp.int32)
        given = [jax.ShapeDtypeStruct(*shape, sharding=everywhere) for shape in shapes]
        with jax.set_mesh(mesh):
            compiled = jax.jit(jax.grad(loss, (0, 1))).lower(*given).compile()
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
