"""Scaled rotary positions against what transformers computes with the same config.json: files of
tests/data/rope."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.models.families import llama
from maxtrain.models.families.directory import read_config
from maxtrain.models.rotation import rotation_of
from maxtrain.weights.hf import load_pretrained

DATA = Path(__file__).parents[1] / "data"
GOLDEN = json.loads((DATA / "rope" / "cases.json").read_text())


def change_config(directory, changes):
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize("case", GOLDEN["tables"])
def test_cos_and_sin_are_those_of_transformers(case, tmp_path):
    """One batch has rows below, at and above the original length."""
    shutil.copy(DATA / "parity" / "llama3" / "config.json", tmp_path)
    change_config(tmp_path, GOLDEN["tables"][case] | {"head_dim": GOLDEN["head_dim"]})
    rope = llama.rope(read_config(tmp_path))
    golden = np.load(DATA / "rope" / "tables.npz")
    np.testing.assert_allclose(rope.attention_factor, golden[f"{case}/factor"], rtol=2e-6)
    lengths = GOLDEN["lengths"]
    positions = np.tile(np.arange(max(lengths), dtype=np.int32), (len(lengths), 1))
    cos, sin = rotation_of(rope, jnp.asarray(positions), jnp.asarray(lengths))
    # Of a scaling that does not follow lengths, a table is good for all rows.
    for row, length in enumerate(lengths):
        for ours, name in ((cos, "cos"), (sin, "sin")):
            ours = np.broadcast_to(ours, (len(lengths), *ours.shape[1:]))[row, :length]
            theirs = golden[f"{case}/{length}/{name}"]
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-6)


@pytest.mark.long
@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3"])
@pytest.mark.parametrize("case", GOLDEN["deepseek"])
def test_logits_of_deepseek_with_yarn_are_those_of_transformers(family, case, tmp_path):
    """The factor of scores by mscale_all_dim differs from the factor of cos and sin by both."""
    for name in ("config.json", "model.safetensors"):
        shutil.copy(DATA / "parity" / family / name, tmp_path)
    change_config(tmp_path, {"rope_parameters": GOLDEN["deepseek"][case]})
    model, _ = load_pretrained(tmp_path)
    graphdef, params = nnx.split(model)
    logits = jax.jit(lambda params, tokens: nnx.merge(graphdef, params)(tokens))
    reference = np.load(DATA / "parity" / family / "reference.npz")
    golden = np.load(DATA / "rope" / "logits.npz")
    ours = logits(params, jnp.asarray(reference["tokens"]))
    np.testing.assert_allclose(ours, golden[f"{family}/{case}"], rtol=0, atol=2e-5)


def test_the_cases_of_deepseek_differ_by_more_than_the_tolerance():
    golden = np.load(DATA / "rope" / "logits.npz")
    for family in ("deepseek_v2", "deepseek_v3"):
        for one, other in (("equal", "none"), ("equal", "unequal"), ("unequal", "none")):
            difference = np.abs(golden[f"{family}/{one}"] - golden[f"{family}/{other}"]).max()
            assert difference > 1e-2
