"""Families by name: the shapes of published models, and names for every dim of every parameter."""

import jax
import pytest
from flax import nnx

from maxtrain.config.load import load_config
from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.registry import build_model, logical_axes
from maxtrain.parallel.sharding import partition_spec

# Numbers of parameters that the makers' model cards and `safetensors` headers give.
PUBLISHED = {"llama3_8b": 8_030_261_248, "llama3_1b": 1_235_814_400, "qwen3_0_6b": 596_049_920}


@pytest.mark.parametrize("name", PUBLISHED)
def test_shipped_shapes_have_the_published_number_of_parameters(name):
    config = load_config([f"config={name}"])
    state = nnx.state(nnx.eval_shape(lambda: build_model(config.model, config.precision, 0)))
    assert sum(x.size for x in jax.tree.leaves(state)) == PUBLISHED[name]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tie", [True, False])
def test_every_dim_has_a_name_and_all_can_be_split(family, tie):
    config = ModelConfig(
        family=family,
        vocab_size=64,
        num_layers=2,
        embed_dim=32,
        num_heads=4,
        mlp_dim=64,
        tie_embeddings=tie,
    )
    model = nnx.eval_shape(lambda: build_model(config, PrecisionConfig(), 0))
    state = dict(nnx.to_flat_state(nnx.state(model)))
    assert (("head", "kernel") in state) == (not tie)
    for path, variable in state.items():
        axes = logical_axes(variable)
        assert len(axes) == variable.ndim, path
        assert (axes[0] == "layers") == (path[0] == "layers"), path
        spec = partition_spec(
            axes, {"data": 2, "fsdp": 2, "tensor": 2}, variable.shape, ".".join(path)
        )
        assert ("fsdp" in spec) == (axes[-1] != "norm"), (
            path
        )  # matrices are split over fsdp, vectors are whole
