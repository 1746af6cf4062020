"""GPT-2 against its equations in float64, from files with the names of either age."""

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import DataError
from data_pipeline.tokenizer import ByteTokenizer, load_tokenizer
from maxtrain.commands.export.command import export
from maxtrain.inference.complete import generate
from maxtrain.models.families.directory import read_config
from maxtrain.weights.hf import load_pretrained

V, D, L, N, F, P = 60, 24, 2, 3, 96, 32
H = D // N
CONFIG = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "activation_function": "gelu_new",
    "layer_norm_epsilon": 1e-5,
    "n_embd": D,
    "n_head": N,
    "n_inner": None,
    "n_layer": L,
    "n_positions": P,
    "vocab_size": V,
}


def random_tensors() -> dict[str, np.ndarray]:
    """Return tensors in the form in which transformers writes them, with numbers that reveal a
    wrong place."""
    rng = np.random.default_rng(0)
    shapes = {"wte.weight": (V, D), "wpe.weight": (P, D), "ln_f.weight": (D,), "ln_f.bias": (D,)}
    for layer in range(L):
        prefix = f"h.{layer}"
        for norm in ("ln_1", "ln_2"):
            shapes |= {f"{prefix}.{norm}.weight": (D,), f"{prefix}.{norm}.bias": (D,)}
        for name, size in (
            ("attn.c_attn", (D, 3 * D)),
            ("attn.c_proj", (D, D)),
            ("mlp.c_fc", (D, F)),
            ("mlp.c_proj", (F, D)),
        ):
            shapes |= {f"{prefix}.{name}.weight": size, f"{prefix}.{name}.bias": size[1:]}
    tensors = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape) / math.sqrt(shape[0] if len(shape) > 1 else 25)
        if "ln_" in name and name.endswith("weight"):
            values += 1
        tensors[f"transformer.{name}"] = values.astype(np.float32)
    return tensors


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(random_tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder


def tokens(columns: int = 20) -> np.ndarray:
    return np.random.default_rng(1).integers(0, V, (2, columns)).astype(np.int32)


def layer_norm(x, weight, bias):
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def equations(tensors: dict[str, np.ndarray], ids: np.ndarray) -> np.ndarray:
    """Logits, float64."""
    p = {name.removeprefix("transformer."): x.astype(np.float64) for name, x in tensors.items()}
    rows, columns = ids.shape
    x = p["wte.weight"][ids] + p["wpe.weight"][:columns]
    for layer in range(L):
        own = {
            name.removeprefix(f"h.{layer}."): value
            for name, value in p.items()
            if name.startswith(f"h.{layer}.")
        }
        y = layer_norm(x, own["ln_1.weight"], own["ln_1.bias"])
        qkv = y @ own["attn.c_attn.weight"] + own["attn.c_attn.bias"]
        q, k, v = (part.reshape(rows, columns, N, H) for part in np.split(qkv, 3, axis=-1))
        scores = np.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
        scores = np.where(np.tri(columns, dtype=bool), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        y = np.einsum("bnts,bsnh->btnh", weights, v).reshape(rows, columns, D)
        x = x + y @ own["attn.c_proj.weight"] + own["attn.c_proj.bias"]
        y = layer_norm(x, own["ln_2.weight"], own["ln_2.bias"])
        y = y @ own["mlp.c_fc.weight"] + own["mlp.c_fc.bias"]
        y = 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + y @ own["mlp.c_proj.weight"] + own["mlp.c_proj.bias"]
    return layer_norm(x, p["ln_f.weight"], p["ln_f.bias"]) @ p["wte.weight"].T


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(("scan", "kernel"), [(True, "xla"), (False, "eager")])
def test_logits_are_its_equations(directory, scan, kernel):
    model, config = load_pretrained(directory, scan_layers=scan, attention=kernel)
    assert config.tie_embeddings and config.mlp_dim == 4 * D and config.max_length == P
    logits = jax.jit(lambda model, ids: model(ids))(model, jnp.asarray(tokens()))
    expected = equations(load_file(directory / "model.safetensors"), tokens())
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)


@pytest.mark.long
@pytest.mark.every_dose
def test_greedy_text_with_the_cache_is_that_of_the_equations(directory):
    model, _ = load_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    ids = tokens(5)
    for _ in range(4):
        best = equations(tensors, ids)[:, -1:].argmax(-1)
        ids = np.concatenate([ids, best], axis=1)
    found = generate(model, tokens(5).tolist(), max_tokens=4, temperature=0.0)
    np.testing.assert_array_equal(found, ids[:, 5:])


@pytest.mark.every_dose
@pytest.mark.long
def test_prompts_of_different_lengths_are_as_if_each_were_alone(directory):
    model, _ = load_pretrained(directory)
    prompts = [tokens(9)[0].tolist(), tokens(4)[1].tolist()]
    together = generate(model, prompts, max_tokens=5, temperature=0.0)
    for prompt, found in zip(prompts, together, strict=True):
        assert generate(model, [prompt], max_tokens=5, temperature=0.0) == [found]


@pytest.mark.every_dose
@pytest.mark.long
def test_a_position_without_a_vector_gives_nan_and_no_neighbours_vector(directory):
    model, _ = load_pretrained(directory)
    ids = jnp.zeros((1, 3), jnp.int32)
    segments = jnp.ones((1, 3), jnp.int32)
    last = model.hidden(ids, segments, jnp.asarray([[0, 1, P - 1]]))
    assert np.isfinite(last).all()
    beyond = model.hidden(ids, segments, jnp.asarray([[0, 1, P]]))
    assert np.isnan(beyond[:, 2]).all()


def test_files_of_either_age_are_read(directory, tmp_path):
    """Files without a prefix also have masks in them."""
    older = {
        name.removeprefix("transformer."): value
        for name, value in load_file(directory / "model.safetensors").items()
    }
    older["h.0.attn.bias"] = np.tri(P, dtype=np.float32)[None, None]
    older["lm_head.weight"] = older["wte.weight"]
    save_file(older, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((directory / "config.json").read_text())
    ours = jax.tree.leaves(nnx.state(load_pretrained(directory)[0]))
    theirs = jax.tree.leaves(nnx.state(load_pretrained(tmp_path)[0]))
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.long
def test_an_export_has_the_same_tensors(directory, tmp_path):
    place = tmp_path / "prepared"
    place.mkdir()
    ByteTokenizer().save(place)
    model, config = load_pretrained(directory)
    export(model, load_tokenizer(place), str(place), tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    expected = load_file(directory / "model.safetensors")
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        assert written[name].tobytes() == value.tobytes(), name
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["n_inner"] is None and CONFIG.items() <= values.items()
    assert read_config(tmp_path / "out") == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "relu"}, "only 'gelu_new' or 'gelu_pytorch_tanh'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ({"n_head": 24}, "head_dim=1 must be even"),
        ({"n_layer": 0}, "n_layer=0 must be an integer above 0"),
    ],
)
def test_what_the_decoder_cannot_do_is_refused(tmp_path, changes, message):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | changes))
    with pytest.raises(DataError, match=message):
        read_config(tmp_path)
