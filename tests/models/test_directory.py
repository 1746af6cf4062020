"""What a directory says of the model whose weights it holds."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from data_pipeline.errors import UsageError
from maxtrain.models.families.directory import (
    FREE,
    free_keys,
    model_named,
    model_of,
    read_config,
)

PARITY = Path(__file__).parents[1] / "data/parity/llama3"


def test_a_hugging_face_directory():
    found = model_of(PARITY)
    assert (
        found["family"] == "llama"
        and found["num_layers"] == read_config(PARITY).num_layers
        and not found.keys() & FREE
    )


def test_a_run_its_checkpoints_and_one_of_them(tmp_path):
    (tmp_path / "checkpoints/00000004").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump({"model": {"num_layers": 7, "remat": "full"}, "seed": 1})
    )
    for place in (".", "checkpoints", "checkpoints/00000004"):
        assert model_of(tmp_path / place) == {"num_layers": 7}


def test_a_directory_without_either_says_nothing(tmp_path):
    assert model_of(tmp_path / "a/b/c/nowhere") == {}
    (tmp_path / "config.yaml").write_text("[1")
    assert model_of(tmp_path) == {}
    (tmp_path / "config.yaml").write_text("model: 3")
    assert model_of(tmp_path) == {}


def test_it_is_known_without_jax():
    code = "import sys, maxtrain.models.families.directory; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_released_models_are_known_by_name():
    found = model_named("qwen2.5_0.5b")
    assert found.weights is None and found.keys["num_layers"] == 24
    assert found.keys["max_length"] == 32_768 and "attention" not in found.keys
    with pytest.raises(UsageError, match=r"Name a directory, or one such as .*llama3\.1_8b"):
        model_named("llama3.1-8b")


def test_a_directory_is_named_with_its_weights(tmp_path):
    found = model_named(str(PARITY))
    assert found.weights == str(PARITY) and found.keys["num_layers"] == 3
    (tmp_path / "config.yaml").write_text("model: {num_layers: 7, attention: eager}")
    assert model_named(str(tmp_path)).keys == {"num_layers": 7}


def test_learned_positions_are_of_the_weights():
    assert "max_length" in free_keys("llama") and "max_length" not in free_keys("gpt2")
    assert free_keys(None) == FREE
