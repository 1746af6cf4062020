"""What a directory says of the model whose weights it holds."""

import subprocess
import sys
from pathlib import Path

import yaml

from maxtrain.models.families.directory import FREE, model_of, read_config

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
