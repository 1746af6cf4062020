"""The hash of a sample of weights: the same for copies, another one for other weights."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import save_file

from maxtrain.weights.sample import sampled_hash


@pytest.fixture
def weights(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    rng = np.random.default_rng(0)
    save_file({"a": rng.standard_normal(200_000, np.float32)}, folder / "model.safetensors")
    return folder


def test_copies_have_the_same_and_other_weights_another(weights, tmp_path):
    ours = sampled_hash(weights)
    copy = shutil.copytree(weights, tmp_path / "copy")
    assert sampled_hash(copy) == sampled_hash(str(copy)) == ours
    rng = np.random.default_rng(1)
    save_file({"a": rng.standard_normal(200_000, np.float32)}, copy / "model.safetensors")
    assert sampled_hash(copy) != ours


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("place", [0, -1])
def test_either_end_of_a_file_counts_and_its_size(file, place, weights):
    ours = sampled_hash(weights)
    path = weights / file
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    assert sampled_hash(weights) != ours
    content[place] ^= 1
    path.write_bytes(content)
    assert sampled_hash(weights) == ours
    path.write_bytes(content + b"\0")
    assert sampled_hash(weights) != ours
