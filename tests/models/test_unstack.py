"""Layers in arrays of their own: the same model, and no array twice."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import LoraConfig, ModelConfig, PrecisionConfig
from maxtrain.models.adapt import products, split_adapters
from maxtrain.models.registry import build_model
from maxtrain.models.unstack import unstacked
from maxtrain.train_step.trainable import join
from maxtrain.weights.hf import load_pretrained

PARITY = Path(__file__).parents[1] / "data" / "parity"
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 160, (2, 24)), jnp.int32)


@nnx.jit
def forward(model, tokens):
    return model(tokens)


# Periods of one layer and of six, a prefix of dense layers before experts with buffers, a rest.
@pytest.mark.parametrize(
    "case",
    [
        "llama3",
        pytest.param("gemma3", marks=pytest.mark.long),
        pytest.param("deepseek_v3", marks=pytest.mark.long),
    ],
)
def test_says_the_same_and_gives_the_stacked_arrays_up(case):
    model, config = load_pretrained(PARITY / case)
    expected = forward(model, TOKENS)
    before = dict(nnx.to_flat_state(nnx.state(model)))
    arrays = {path: variable.get_value() for path, variable in before.items()}
    count = sum(array.size for array in arrays.values())
    apart = unstacked(model)
    leaves = jax.tree.leaves(nnx.state(apart))
    assert sum(leaf.size for leaf in leaves) == count
    assert apart.layers.spec.num_layers == config.num_layers
    places = {leaf.unsafe_buffer_pointer() for leaf in leaves}
    alive = [path for path, array in arrays.items() if not array.is_deleted()]
    for path in alive:
        # What is as it was lies where it was.
        assert arrays[path].unsafe_buffer_pointer() in places, path
    assert any(path[0] == "layers" for path in arrays.keys() - set(alive))
    np.testing.assert_allclose(forward(apart, TOKENS), expected, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("base", ["full", "int8"])
def test_adapters_of_a_place_stay_with_its_layers(base):
    """A pattern that names a place in the stack; afterwards layers have other names."""
    config = ModelConfig(
        vocab_size=160,
        num_layers=3,
        embed_dim=16,
        mlp_dim=32,
        num_heads=2,
        num_kv_heads=2,
        lora=LoraConfig(rank=2, targets=(r"layers\.0\.attention\.q",), base=base, base_block=16),
    )
    model = jax.jit(lambda: build_model(config, PrecisionConfig(compute="float32"), 0))()
    graphdef, variables = nnx.split(model)
    others, adapters = split_adapters(variables)
    adapters = jax.tree.map(lambda x: x + 0.3, adapters)
    model = nnx.merge(graphdef, join(others, adapters))
    expected = forward(model, TOKENS)
    apart = unstacked(model)
    np.testing.assert_allclose(forward(apart, TOKENS), expected, atol=1e-5)
    assert sum(module.adapter is not None for _, module in products(apart.layers)) == 3
