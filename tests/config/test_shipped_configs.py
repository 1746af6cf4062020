"""The config files of the repository: they load, pass the checks, and have the published shapes."""

import ast
import dataclasses
from pathlib import Path

import pytest

from maxtrain.config import RunConfig, load_config, to_yaml

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


def test_five_are_shipped():
    assert [f.stem for f in FILES] == [
        "llama3_1b",
        "llama3_8b",
        "quickstart",
        "qwen3_0_6b",
        "shakespeare_char",
    ]


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
