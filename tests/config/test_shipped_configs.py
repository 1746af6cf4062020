"""The config files of the repository: they load, pass the checks, and have the published shapes."""

import ast
import dataclasses
from pathlib import Path

import jax
import pytest

from maxtrain.config import RunConfig, fit_to_devices, load_config, to_yaml
from maxtrain.models.families import PRESETS
from maxtrain.models.families.directory import free_keys
from maxtrain.models.known import MODELS
from maxtrain.trainer.abstract_step import StepMemory
from maxtrain.trainer.job import make_parts
from tests.support.shared import in_time

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.py"))


def parameters(config: RunConfig, vocab_size: int) -> int:
    """Number of parameters, counted from the shapes."""
    m = config.model
    head = m.head_dim or m.embed_dim // m.num_heads
    attention = m.embed_dim * head * 2 * (m.num_heads + m.num_kv_heads) + (
        2 * head if m.family == "qwen3" else 0
    )
    layer = attention + 3 * m.embed_dim * m.mlp_dim + 2 * m.embed_dim
    return (
        m.num_layers * layer
        + m.embed_dim
        + vocab_size * m.embed_dim * (1 if m.tie_embeddings else 2)
    )


# Those that go on from released weights: the name of these, and how many parameters train.
OF_WEIGHTS = {
    "sft_qwen2_5_0_5b": ("qwen2.5_0.5b", 494_032_768),
    "sft_lora_qwen2_5_1_5b": ("qwen2.5_1.5b", 18_464_768),
    "grpo_qwen2_5_1_5b": ("qwen2.5_1.5b", 1_543_714_304),
}
# Keys of `model.` in which they differ from the released model of the same name, which came to long
# rows after this training.
WITH_EXPERTS = {
    "mixtral_8x7b": set(),
    "qwen3_30b_a3b": set(),
    "deepseek_v3": {"max_length", "rope_scaling", "rope_factor", "rope_original_length", "rope"},
}
# Of parameters, moments and what does not train, as their docstrings say.
STATE_BYTES = {
    "sft_qwen2_5_0_5b": 12 * 494_032_768,
    "sft_lora_qwen2_5_1_5b": 4 * 1_543_714_304 + 12 * 18_464_768,
    "grpo_qwen2_5_1_5b": 12 * 1_543_714_304,
}


def test_they_are_shipped():
    llamas = {"llama3_1b", "llama3_8b", "llama3_70b", "llama3_405b"}
    others = {*llamas, *WITH_EXPERTS, "quickstart", "qwen3_0_6b", "shakespeare_char"}
    small = {"sft_word_problems", "grpo_word_problems"}
    assert {f.stem for f in FILES} == others | small | set(OF_WEIGHTS)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_it_loads_by_name_and_by_path_and_comes_back_from_yaml(file, tmp_path):
    config = load_config([f"config={file.stem}"])
    assert config == load_config([f"config={file}"])
    assert config.run_name == file.stem
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_config([f"config={tmp_path}/config.yaml"]) == config


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_its_docstring_says_what_it_should_reach_and_costs(file):
    text = ast.get_docstring(ast.parse(file.read_text()))
    assert all(f"\n{word}: " in text for word in ("Data", "Reaches", "Costs"))


@pytest.mark.parametrize(
    ("name", "vocab_size", "count"),
    [
        ("llama3_405b", 128_256, 405_853_388_800),
        ("llama3_70b", 128_256, 70_553_706_496),
        ("llama3_8b", 128_256, 8_030_261_248),
        ("llama3_1b", 128_256, 1_235_814_400),
        ("qwen3_0_6b", 151_936, 596_049_920),
        ("quickstart", 4096, 6_951_168),
        ("shakespeare_char", 65, 800_000),
    ],
)
def test_it_has_the_number_of_parameters_it_should(name, vocab_size, count):
    config = load_config([f"config={name}"])
    if name == "shakespeare_char":
        assert abs(parameters(config, vocab_size) - count) < 0.01 * count
    else:
        assert parameters(config, vocab_size) == count
        assert config.model.vocab_size in (vocab_size, None)


@pytest.mark.parametrize("name", WITH_EXPERTS)
def test_its_experts_are_those_of_the_released_model(name):
    ours = dataclasses.asdict(load_config([f"config={name}"]).model)
    theirs = dataclasses.asdict(PRESETS[name])
    different = {key for key in theirs if ours[key] != theirs[key]}
    assert different - {"remat", "routing"} == WITH_EXPERTS[name]


@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_its_shapes_are_those_of_the_weights_that_it_goes_on_from(name):
    config = load_config([f"config={name}"])
    released, trained = OF_WEIGHTS[name]
    theirs = MODELS.named(released).keys
    ours = dataclasses.asdict(config.model)
    free = free_keys(config.model.family)
    assert {key: ours[key] for key in theirs if key not in free} == {
        key: theirs[key] for key in theirs if key not in free
    }
    assert config.checkpoint.init_from is not None
    state = make_parts(fit_to_devices(config, 1), jax.devices()[:1], 100, 1).abstract
    assert sum(x.size for x in jax.tree.leaves(state.trainable)) == trained


@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize("name", in_time(OF_WEIGHTS, ["grpo_qwen2_5_1_5b"]))
def test_a_step_fits_onto_the_device_that_it_is_for(name):
    """Compiled by its shapes, for micro-batches of one row."""
    config = load_config([f"config={name}"])
    memory = StepMemory(config, jax.devices()[:1])
    needed = memory.bytes(memory.unit, config.data.seq_length)
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(memory.parts.abstract))
    assert needed is not None
    assert state < needed < 80e9
    assert state == pytest.approx(STATE_BYTES[name], rel=0.05)


def test_shakespeare_has_the_numbers_of_the_recipe():
    config = load_config(["config=shakespeare_char"])
    assert (config.steps, config.data.batch_size, config.data.seq_length, config.eval_interval) == (
        2000,
        12,
        64,
        250,
    )
    assert dataclasses.replace(config.model, vocab_size=65).embed_dim == 128
    assert (
        config.optimizer.learning_rate,
        config.optimizer.beta2,
        config.schedule.warmup_steps,
    ) == (1e-3, 0.99, 100)
