"""Models with a score in the place of logits, as transformers writes and computes them."""

import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import DataError
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.hf_export import write_weights

# LlamaForSequenceClassification with num_labels=1, of transformers 5.24; scores.json has what it
# gives for the rows below, read one by one.
SCORED = Path(__file__).parents[1] / "data" / "scored"


@pytest.mark.every_dose
@pytest.mark.long
def test_scores_are_those_of_transformers_and_files_are_written_as_they_were(tmp_path):
    model, config = load_pretrained(SCORED)
    tokens = (jnp.arange(24, dtype=jnp.int32).reshape(2, 12)) % 60 + 2
    expected = json.loads((SCORED / "scores.json").read_text())
    hidden = model.hidden(tokens)
    np.testing.assert_allclose(model.scores(hidden)[:, -1], expected, rtol=0, atol=2e-6)
    write_weights(tmp_path, nnx.split(model)[1], config, "float32", 10**9)
    written = (tmp_path / "model.safetensors").read_bytes()
    assert written == (SCORED / "model.safetensors").read_bytes()


def test_every_family_has_a_name_for_it():
    names = {name: family.scored_architecture() for name, family in FAMILIES.items()}
    assert names["gpt2"] == "GPT2ForSequenceClassification"
    assert names["gemma3"] == "Gemma3TextForSequenceClassification"
    assert len(set(names.values())) == len(names)
    assert all(name.endswith("ForSequenceClassification") for name in names.values())


def test_a_model_that_tells_classes_apart_is_refused(tmp_path):
    values = json.loads((SCORED / "config.json").read_text())
    shutil.copytree(SCORED, tmp_path, dirs_exist_ok=True)
    for labels in ({"0": "bad", "1": "good"}, None):
        (tmp_path / "config.json").write_text(json.dumps(values | {"id2label": labels}))
        with pytest.raises(DataError, match="Choose a reward model whose num_labels is 1"):
            read_config(tmp_path)
