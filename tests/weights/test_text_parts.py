"""Models that also see pictures, of which the part for text is read."""

import argparse
import json
import string
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import DataError
from data_pipeline.tokenizer import CharTokenizer
from maxtrain import cli
from maxtrain.models.families import PRESETS
from maxtrain.models.families.directory import model_named, read_config
from maxtrain.trainer.saved_run import load_model
from maxtrain.weights.hf import load_pretrained

PARITY = Path(__file__).parents[1] / "data" / "parity"
# As transformers 4 and 5 name tensors.
SPELLINGS = {
    "4": ("language_model.model.", "vision_tower.", "multi_modal_projector."),
    "5": ("model.language_model.", "model.vision_tower.", "model.multi_modal_projector."),
}
# What config.json of Gemma 3 says of the part for text; the rest is as transformers has it by
# default.
SCALING = {"factor": 8.0, "rope_type": "linear"}
RELEASED = {
    "gemma3_4b": {"hidden_size": 2560, "intermediate_size": 10_240, "num_hidden_layers": 34},
    "gemma3_12b": {
        "hidden_size": 3840,
        "intermediate_size": 15_360,
        "num_attention_heads": 16,
        "num_hidden_layers": 48,
        "num_key_value_heads": 8,
    },
    "gemma3_27b": {
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
    },
}


def write_config(folder, text, **more):
    values = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    values |= {"text_config": text, "vision_config": {"hidden_size": 32}, **more}
    (folder / "config.json").write_text(json.dumps(values))


def with_pictures(folder, spelling):
    """Gemma 3 of the fixtures as the part for text of a model that sees pictures."""
    folder.mkdir()
    text, tower, projector = SPELLINGS[spelling]
    config = json.loads((PARITY / "gemma3" / "config.json").read_text())
    del config["architectures"]
    write_config(folder, config)
    tensors = {}
    for name, array in load_file(PARITY / "gemma3" / "model.safetensors").items():
        tensors[text + name.removeprefix("model.")] = array
    for number in range(3):
        tensors[f"{tower}encoder.layers.{number}.mlp.fc1.weight"] = np.ones((4, 8), np.float32)
    tensors[f"{projector}mm_input_projection_weight"] = np.ones((8, 48), np.float32)
    save_file(tensors, folder / "model.safetensors")
    CharTokenizer(string.printable, True).save(folder)
    return folder


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_the_presets(name, tmp_path):
    text = {"model_type": "gemma3_text", "rope_scaling": SCALING, "sliding_window": 1024}
    write_config(tmp_path, text | RELEASED[name])
    assert read_config(tmp_path) == PRESETS[name]
    assert model_named(str(tmp_path)).keys == model_named(name).keys


def test_what_a_config_leaves_out_is_as_transformers_has_it(tmp_path):
    """The defaults of Gemma3TextConfig of transformers 5.23."""
    write_config(tmp_path, {})
    config = read_config(tmp_path)
    assert config.family == "gemma3"
    assert (config.vocab_size, config.num_layers) == (262_208, 26)
    assert (config.embed_dim, config.mlp_dim) == (2304, 9216)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.window, config.max_length, config.norm_eps) == (4096, 131_072, 1e-6)
    assert (config.rope_theta, config.rope.local_theta) == (1e6, 1e4)
    assert config.rope_scaling == "none"
    assert config.query_pre_attn_scalar == 256
    assert config.tie_embeddings
    assert config.logit_softcap is config.attention_softcap is None


def test_what_the_whole_model_says_counts(tmp_path):
    write_config(tmp_path, {"tie_word_embeddings": True}, tie_word_embeddings=False)
    assert not read_config(tmp_path).tie_embeddings
    write_config(tmp_path, {}, quantization_config={"quant_method": "gptq"})
    with pytest.raises(DataError, match="quant_method='gptq'"):
        read_config(tmp_path)


@pytest.mark.parametrize("text", [None, [], "gemma3_text"])
def test_a_config_without_a_part_for_text_is_refused(text, tmp_path):
    write_config(tmp_path, text)
    with pytest.raises(DataError, match=r"text_config=.* must be the config .*Get the file again"):
        read_config(tmp_path)
    write_config(tmp_path, {}, architectures=[""])
    with pytest.raises(DataError, match=r"Gemma3ForConditionalGeneration \(its part for text\)"):
        read_config(tmp_path)


@pytest.mark.parametrize("spelling", ["4", pytest.param("5", marks=pytest.mark.slow)])
@pytest.mark.long
def test_the_part_for_text_is_the_model_for_text_bit_for_bit(spelling, tmp_path, capsys):
    directory = with_pictures(tmp_path / "source", spelling)
    asked = argparse.Namespace(hf=str(directory), run=None, step=None, dtype=None)
    model, _ = load_model(asked)
    told = (
        "tensors that are left out, since only the part for text is read: 3 of the vision tower, "
        "1 of the projector of pictures\n"
    )
    assert capsys.readouterr().err == told
    expected, config = load_pretrained(PARITY / "gemma3")
    assert model.config == config
    for found, leaf in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(nnx.state(expected)), strict=True
    ):
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes()


@pytest.mark.long
def test_other_tensors_are_left_over_as_ever(tmp_path):
    directory = with_pictures(tmp_path / "source", "4")
    path = directory / "model.safetensors"
    save_file(load_file(path) | {"audio_tower.weight": np.ones(3, np.float32)}, path)
    with pytest.raises(DataError, match=r"audio_tower.weight  extra: \[3\]"):
        load_pretrained(directory)


@pytest.mark.long
def test_an_import_says_what_it_leaves_out(tmp_path, capsys):
    directory = with_pictures(tmp_path / "source", "4")
    assert cli.main(["import", str(directory), str(tmp_path / "run")]) == 0
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.endswith(": 3 of the vision tower, 1 of the projector of pictures")
