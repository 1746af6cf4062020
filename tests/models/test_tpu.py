"""The model compiles for real TPUs, which needs no TPU: libtpu's compiler runs on any machine (`pip
install libtpu`)."""

import importlib.util
import math

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.experimental import topologies

from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.ops.cross_entropy import cross_entropy
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import named_sharding

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None,
        reason="libtpu, TPU's compiler, is not installed: pip install libtpu",
    ),
]
B, T = 8, 512


@pytest.mark.parametrize("attention", ["xla", "flash"])
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 4, 1), (1, 2, 2)], ids=str)
def test_loss_and_gradients_compile_for_v5p(shape, attention):
    """On four chips of a v5p; parameters are split as the names of their dims say, and so are their
    gradients."""
    config = ModelConfig(
        vocab_size=1024,
        num_layers=2,
        embed_dim=256,
        mlp_dim=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=128,
        remat="full",
        attention=attention,
    )
    data, fsdp, tensor = shape
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5p:2x2x1").devices
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor), devices)
    graphdef, state = nnx.split(nnx.eval_shape(lambda: build_model(config, PrecisionConfig(), 0)))

    def placed(variable):
        sharding = named_sharding(mesh, logical_axes(variable), variable.shape)
        return variable.replace(
            jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)
        )

    state = jax.tree.map(placed, state, is_leaf=lambda v: isinstance(v, nnx.Variable))
    rows = named_sharding(mesh, ("activation_batch", "activation_length"), (B, T))
    tokens, weights = (
        jax.ShapeDtypeStruct((B, T), dtype, sharding=rows) for dtype in (jnp.int32, jnp.float32)
    )

    def loss(state, inputs, targets, segments, positions, weights):
        model = nnx.merge(graphdef, state)
        hidden = model.hidden(inputs, segments, positions)
        return cross_entropy(
            hidden, model.output_matrix(), targets, weights, chunks=4, dtype=model.precision.compute
        ).loss

    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        step = jax.jit(jax.value_and_grad(loss), out_shardings=(None, places))
        compiled = step.lower(state, tokens, tokens, tokens, tokens, weights).compile()
    text = compiled.as_text()
    assert "tpu" in devices[0].platform and "all-reduce" in text
    assert ("tpu_custom_call" in text) == (attention == "flash")
    assert ("all-gather" in text) == (fsdp > 1)
    # One device's share of the parameters comes in, and as much goes out as gradients, in the same
    # places.
    share = sum(math.prod(x.sharding.shard_shape(x.shape)) for x in jax.tree.leaves(state)) * 4
    memory = compiled.memory_analysis()
    for size in (memory.argument_size_in_bytes, memory.output_size_in_bytes):
        assert share <= size < 1.05 * share + 500_000
