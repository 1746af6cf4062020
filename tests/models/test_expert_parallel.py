"""Experts that are split over devices: the same numbers as on one, by exchanging tokens."""

import re

import jax
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import LatentConfig, MeshConfig, MoeConfig, RoutingConfig
from maxtrain.inference.complete import generate
from maxtrain.models.registry import build_model
from maxtrain.objectives.next_token import next_token
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from maxtrain.train_step.step import gradients
from tests.models.test_moe import EXACT, assert_same_gradients, batch_of, grads_of, tiny

FAMILIES = {
    "mixtral": {"family": "mixtral", "moe": MoeConfig(8, 2)},
    "qwen3_moe": {"family": "qwen3_moe", "moe": MoeConfig(8, 3, expert_dim=24)},
    "deepseek_v3": {
        "family": "deepseek_v3",
        "num_kv_heads": 4,
        "head_dim": 12,
        "latent": LatentConfig(query_rank=None, kv_rank=8, rope_dim=4, value_dim=8),
        "moe": MoeConfig(
            8, 2, expert_dim=24, shared_dim=16, num_groups=4, top_groups=2, dense_layers=1
        ),
    },
    "gpt_oss": {"family": "gpt_oss", "moe": MoeConfig(8, 2), "window": 9},
}
# Of the whole step, so that all that counts choices does.
BALANCED = RoutingConfig(balance=0.5, balance_scope="global", z_loss=0.01)
TURNS = RoutingConfig(balance=0.5, z_loss=0.01, exchange_factor=0.3)
CAPACITY = RoutingConfig(balance=0.5, capacity_factor=0.7)
EAGER = RoutingConfig(balance=0.5, kernel="eager")


def by_name(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


@pytest.mark.long
@pytest.mark.parametrize(
    ("family", "mesh", "routing", "accumulation"),
    [
        ("mixtral", {"expert": 4}, TURNS, 1),
        ("deepseek_v3", {"fsdp": 2, "expert": 2}, BALANCED, 2),
        ("qwen3_moe", {"expert": 2, "tensor": 2}, CAPACITY, 1),
        by_name("gpt_oss", {"expert": 2}, TURNS, 1),
        by_name("mixtral", {"expert": 2}, BALANCED, 1),
        by_name("mixtral", {"expert": 8}, BALANCED, 1),
        by_name("mixtral", {"fsdp": 2, "expert": 4}, CAPACITY, 1),
        by_name("mixtral", {"expert": 2, "tensor": 2}, EAGER, 1),
        by_name("qwen3_moe", {"expert": 8}, TURNS, 1),
        by_name("qwen3_moe", {"data": 2, "expert": 2, "tensor": 2}, TURNS, 1),
        by_name("qwen3_moe", {"fsdp": 2, "expert": 2, "context": 2}, TURNS, 1),
        by_name("qwen3_moe", {"fsdp": 2, "expert": 4}, EAGER, 1),
        by_name("deepseek_v3", {"expert": 8}, TURNS, 1),
        by_name("deepseek_v3", {"fsdp": 2, "expert": 2, "tensor": 2}, TURNS, 1),
        by_name("deepseek_v3", {"expert": 4}, CAPACITY, 2),
        by_name("gpt_oss", {"fsdp": 2, "expert": 2, "tensor": 2}, CAPACITY, 1),
    ],
)
def test_the_same_forward_and_backward_as_on_one_device(family, mesh, routing, accumulation):
    config = tiny(**FAMILIES[family], routing=routing)
    one, wanted = grads_of(config)
    many, found = grads_of(config, accumulation, {"fsdp": 1} | mesh)
    np.testing.assert_allclose(many.loss, one.loss, rtol=1e-5)
    # What changes a correction is counted, not derived.
    for path in [path for path in wanted if path.endswith("correction")]:
        np.testing.assert_array_equal(found.pop(path), wanted.pop(path))
    assert_same_gradients(wanted, found, 1e-5)
    for name, said in one.of_layers.items():
        np.testing.assert_allclose(many.of_layers[name].total, said.total, rtol=1e-5)
    for path, counts in one.buffer_inputs.items():
        np.testing.assert_array_equal(many.buffer_inputs[path], counts)


def collectives(axes):
    """The shapes that all-gathers of a step make, and whether there is an all-to-all."""
    config = tiny(**FAMILIES["qwen3_moe"])
    mesh = make_mesh(MeshConfig(**axes), jax.devices()[:4])
    objective = next_token()
    with jax.set_mesh(mesh):
        graphdef, params = abstract_model(config, EXACT, mesh)
        places = jax.tree.map(lambda x: x.sharding, params)

        def run(params, batch):
            def models(params):
                return {"policy": nnx.merge(graphdef, params)}

            _, grads = gradients(models, params, batch, objective, objective.scales(batch), 1)
            return grads

        text = jax.jit(run, out_shardings=places).lower(params, batch_of()).compile().as_text()
    shapes = []
    for line in text.splitlines():
        made, is_gathered, _ = line.partition(" all-gather(")
        if is_gathered:
            for dims in re.findall(r"f32\[([\d,]+)\]", made):
                shapes.append(tuple(map(int, dims.split(","))))
    return shapes, " all-to-all(" in text


@pytest.mark.long
def test_tokens_are_exchanged_and_weights_of_experts_stay():
    whole = {(8, 16, 24), (8, 24, 16)}
    of_fsdp, _ = collectives({"fsdp": 4})
    assert whole & {shape[-3:] for shape in of_fsdp}
    of_expert, has_exchange = collectives({"fsdp": 1, "expert": 4})
    assert not whole & {shape[-3:] for shape in of_expert}
    assert has_exchange


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, 4])
def test_texts_are_those_of_one_device(count):
    """Covers rows that can be split over the devices, and rows that can't."""
    model = build_model(tiny(**FAMILIES["deepseek_v3"]), EXACT, jax.random.key(0))
    prompts = [[5, 6, 7], [8, 9, 10, 11, 12], [3, 4], [1]][:count]
    expected = generate(model, prompts, max_tokens=6, temperature=0)
    with jax.set_mesh(make_mesh(MeshConfig(fsdp=1, expert=4), jax.devices()[:4])):
        found = generate(model, prompts, max_tokens=6, temperature=0)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)
