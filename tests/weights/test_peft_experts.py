"""Adapters of experts: joined as PEFT has them, and taken apart."""

import json

import numpy as np
import pytest

from data_pipeline.base.errors import DataError, UsageError
from maxtrain.config.schema import LoraConfig
from maxtrain.train_step.optimizer import paths
from maxtrain.weights.peft import read_adapters, write_adapters
from maxtrain.weights.peft_experts import join_experts, split_experts
from tests.weights.test_peft import adapters_of, build, described

E, D, F, R = 3, 6, 5, 2
BLOCK = "base_model.model.model.layers.1.block_sparse_moe"
PRESENT = "base_model.model.model.layers.1.mlp"
WIDTHS = {"w1": (D, F), "w3": (D, F), "w2": (F, D)}


def of_each(*products):
    """Adapters of each expert's products, beside one of the router and one of attention."""
    rng = np.random.default_rng(0)
    shapes = {
        f"{BLOCK}.gate.lora_A.weight": (R, D),
        f"{BLOCK}.gate.lora_B.weight": (E, R),
        "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight": (R, D),
    }
    for expert in range(E):
        for product in products:
            inputs, outputs = WIDTHS[product]
            name = f"{BLOCK}.experts.{expert}.{product}"
            shapes[f"{name}.lora_A.weight"] = (R, inputs)
            shapes[f"{name}.lora_B.weight"] = (outputs, R)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def shapes_of(tensors):
    return {name: tensor.shape for name, tensor in tensors.items()}


def change(tensors, module):
    """B A of each expert, as PEFT has it: [experts, outputs, inputs]."""
    a = tensors[f"{module}.lora_A.weight"].reshape(
        E, -1, tensors[f"{module}.lora_A.weight"].shape[1]
    )
    b = tensors[f"{module}.lora_B.weight"]
    return np.einsum("ore,eri->eoi", b.reshape(b.shape[0], -1, E), a)


@pytest.mark.parametrize("products", [("w1", "w2", "w3"), ("w1", "w3"), ("w2",)])
def test_what_is_joined_is_taken_apart_and_means_the_same(products):
    tensors = of_each(*products)
    joined = join_experts(tensors)
    assert all("block_sparse_moe" not in name for name in joined.tensors)
    apart = split_experts(joined.tensors, shapes_of(tensors))
    assert apart.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(apart[name], tensor)
    # Of each expert alone.
    of_experts = {}
    for product in products:
        matrices = []
        for expert in range(E):
            name = f"{BLOCK}.experts.{expert}.{product}"
            matrices.append(tensors[f"{name}.lora_B.weight"] @ tensors[f"{name}.lora_A.weight"])
        of_experts[product] = np.stack(matrices)
    expected = {}
    if "w1" in products:
        both = np.concatenate([of_experts["w1"], of_experts["w3"]], axis=1)
        expected[f"{PRESENT}.experts.gate_up_proj"] = both
    if "w2" in products:
        expected[f"{PRESENT}.experts.down_proj"] = of_experts["w2"]
    assert joined.parameters.keys() == expected.keys()
    for parameter, module in joined.parameters.items():
        found = change(joined.tensors, module)
        np.testing.assert_allclose(found, expected[parameter], atol=1e-5)


def test_files_with_tensors_of_each_expert_stay_as_they_are():
    tensors = of_each("w1", "w2", "w3")
    apart = split_experts(tensors, shapes_of(tensors))
    assert apart.keys() == tensors.keys()
    assert all(apart[name] is tensor for name, tensor in tensors.items())


def test_one_of_gate_and_up_alone_is_refused():
    with pytest.raises(UsageError, match=r"Let model\.lora\.targets name both or neither"):
        join_experts(of_each("w1", "w2"))


def test_an_adapter_of_both_that_is_none_of_each_is_refused():
    tensors = of_each("w1", "w2", "w3")
    joined = join_experts(tensors).tensors
    joined[f"{PRESENT}.experts.base_layer.lora_B.weight"][0, -1] = 1
    with pytest.raises(DataError, match=r"rank 4 for gate and up together.*merge_and_unload"):
        split_experts(joined, shapes_of(tensors))


def test_tensors_of_another_number_of_experts_stay_and_are_not_those_wanted():
    tensors = of_each("w2")
    joined = dict(join_experts(tensors).tensors)
    name = f"{PRESENT}.experts.lora_A.weight"
    joined[name] = joined[name][:-1]
    assert name in split_experts(joined, shapes_of(tensors))


@pytest.mark.long
@pytest.mark.parametrize(("scaling", "alpha"), [("rank", 12.0), ("root", 6 * 2**0.5)])
def test_the_files_of_a_model_with_dense_layers_experts_and_shared_ones(scaling, alpha, tmp_path):
    """A module that is called like a product of an expert is named as a parameter, since PEFT would
    take it for one."""
    lora = LoraConfig(rank=3, alpha=6.0, scaling=scaling, targets=(r"attention\.o$", r"mlp\."))
    model = build("deepseek_v2", lora)
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    found = read_adapters(tmp_path, described(adapters), model.config)
    for name, ours in sorted_leaves(adapters).items():
        np.testing.assert_array_equal(ours, sorted_leaves(found)[name])
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["target_modules"] == [f"model.layers.{i}.self_attn.o_proj" for i in range(3)]
    expected = {f"model.layers.0.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    for block in ("model.layers.1.mlp", "model.layers.2.mlp"):
        expected |= {f"{block}.experts.gate_up_proj", f"{block}.experts.down_proj"}
        expected |= {
            f"{block}.shared_experts.{name}_proj.weight" for name in ("gate", "up", "down")
        }
        expected.add(f"{block}.gate.weight")
    assert settings["target_parameters"] == sorted(expected)
    assert settings["rank_pattern"] == {r".*\.gate_up_proj": 6}
    assert settings["alpha_pattern"] == {r".*\.gate_up_proj": pytest.approx(alpha)}


def sorted_leaves(adapters):
    return {name: np.asarray(variable[...]) for name, variable in paths(adapters).items()}


@pytest.mark.long
def test_magnitudes_beside_experts_are_refused(tmp_path):
    lora = LoraConfig(rank=3, magnitudes=True)
    model = build("mixtral", lora)
    with pytest.raises(UsageError, match=r"PEFT has none for feed-forward blocks.*--format hf"):
        write_adapters(tmp_path, adapters_of(model), model.config, None)
    assert list(tmp_path.iterdir()) == []
