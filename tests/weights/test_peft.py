"""Adapters in PEFT's files: the same numbers there and back, and what they mean for the weights.

Those in tests/data/peft are PEFT's own (0.21.2), with the logits that it computed with them for the
first tokens of the parity case that they are for.
"""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from data_pipeline.base.errors import ConfigError, DataError, UsageError
from maxtrain.commands.export.peft import export_adapters, require_base_as_it_was
from maxtrain.config.schema import LoraConfig, ModelConfig, PrecisionConfig, TrainConfig
from maxtrain.models.adapt import split_adapters
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config
from maxtrain.models.hf_mapping import in_memory
from maxtrain.models.merged import merged
from maxtrain.models.registry import build_model
from maxtrain.train_step.optimizer import paths
from maxtrain.weights.hf import load_pretrained
from maxtrain.weights.peft import read_adapters, read_set, write_adapters

PARITY = Path(__file__).parents[1] / "data" / "parity"
MADE_BY_PEFT = Path(__file__).parents[1] / "data" / "peft"
EXACT = PrecisionConfig(compute="float32")
LORA = LoraConfig(rank=3, alpha=6.0)


@functools.cache
def build(case="llama3", lora=LORA):
    """A model of a family, with random numbers in its adapters."""
    config = dataclasses.replace(read_config(PARITY / case), lora=lora)
    model = jax.jit(lambda: build_model(config, EXACT, 0))()
    graphdef, state = nnx.split(model)
    others, adapters = split_adapters(state)
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jax.numpy.asarray(rng.standard_normal(x.shape), x.dtype), adapters
    )
    return nnx.merge(graphdef, nnx.merge_state(others, adapters))


def adapters_of(model):
    return split_adapters(nnx.state(model))[1]


def described(adapters):
    def describe(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)

    return jax.tree.map(describe, adapters)


@pytest.mark.long
@pytest.mark.parametrize("magnitudes", [True, pytest.param(False, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "case",
    ["llama3", *(pytest.param(c, marks=pytest.mark.long) for c in ("qwen2", "gemma3", "olmo2"))],
)
def test_there_and_back_is_the_same_and_means_the_same(case, magnitudes, tmp_path):
    """The weights that PEFT computes from the files, W + s B A and its lengths, are those that the
    adapters make here."""
    lora = dataclasses.replace(LORA, magnitudes=magnitudes)
    model = build(case, lora)
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, "some/model")
    found = read_adapters(tmp_path, described(adapters), model.config)
    for ours, theirs in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
        assert np.array_equal(ours, theirs)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    base = exported(nnx.state(model), model.config)
    changed = exported(nnx.state(merged(model)), model.config)
    seen = 0
    for name, weight in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" not in tensors:
            np.testing.assert_array_equal(changed[name], weight)
            continue
        seen += 1
        a = tensors[f"{module}.lora_A.weight"].astype(np.float64)
        b = tensors[f"{module}.lora_B.weight"].astype(np.float64)
        assert a.shape == (3, weight.shape[1])
        assert b.shape == (weight.shape[0], 3)
        expected = weight + 2.0 * b @ a
        if magnitudes:
            lengths = np.linalg.norm(expected, axis=1)
            expected *= (tensors[f"{module}.lora_magnitude_vector"] / lengths)[:, None]
        np.testing.assert_allclose(changed[name], expected, atol=1e-5 * np.abs(expected).max())
    assert seen == 7 * model.config.num_layers
    assert len(tensors) == (3 if magnitudes else 2) * seen


OF_MIXTURES = (r"attention\.q$", r"mlp\.(gate|up|down)$")
FROM_PEFT = {
    "llama_lora": LoraConfig(rank=3, alpha=7.0),
    "llama_rslora_subset": LoraConfig(
        rank=4, alpha=6.0, scaling="root", targets=(r"attention\.[qv]$", r"mlp\.down")
    ),
    "llama_dora": LoraConfig(
        rank=2, alpha=5.0, magnitudes=True, targets=(r"attention\.[qo]$", r"mlp\.up")
    ),
    # Parameters of transformers 5, in which gate and up have the same A.
    "mixtral_parameters": LoraConfig(rank=2, alpha=5.0, targets=OF_MIXTURES),
    # Products of each expert, of which PEFT has made parameters.
    "qwen3_moe_each": LoraConfig(rank=1, alpha=3.0, targets=OF_MIXTURES),
}


@pytest.mark.parametrize(
    "case",
    [
        "llama_lora",
        *(pytest.param(case, marks=pytest.mark.long) for case in list(FROM_PEFT)[1:]),
    ],
)
def test_adapters_that_peft_wrote_are_read_and_written_as_there(case, tmp_path):
    folder = MADE_BY_PEFT / case
    settings = json.loads((folder / "adapter_config.json").read_text())
    directory = PARITY / settings["base_model_name_or_path"]
    base, config = load_pretrained(directory)
    config = dataclasses.replace(config, lora=FROM_PEFT[case])
    abstract = nnx.eval_shape(lambda: build_model(config, EXACT, 0))
    graphdef, variables = nnx.split(abstract)
    _, adapters = split_adapters(variables)
    of_base = jax.tree.leaves(nnx.state(base))[0].sharding
    adapters = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=of_base), adapters
    )
    found = read_adapters(folder, adapters, config)
    model = nnx.merge(graphdef, nnx.merge_state(nnx.state(base), found))
    expected = np.load(folder / "logits.npz")["logits"]
    tokens = np.load(directory / "reference.npz")["tokens"][:, : expected.shape[1]]
    logits = jax.jit(lambda model, tokens: model(tokens))(model, jax.numpy.asarray(tokens))
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-5)

    write_adapters(tmp_path, found, config, None)
    written = load_file(tmp_path / "adapter_model.safetensors")
    theirs = load_file(folder / "adapter_model.safetensors")
    assert written.keys() == theirs.keys()
    if case == "mixtral_parameters":
        # The A that gate and up share is written twice.
        name = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
        assert written[name].shape[0] == 2 * theirs[name].shape[0]
        return
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(written[name], tensor)
    ours = json.loads((tmp_path / "adapter_config.json").read_text())
    for key in ("r", "lora_alpha", "use_rslora", "use_dora", "rank_pattern", "alpha_pattern"):
        assert ours[key] == settings[key], key


def exported(variables, config: ModelConfig):
    """The tensors of a Hugging Face directory, float64."""
    ours = {path: np.asarray(v[...], np.float64) for path, v in paths(variables).items()}
    found = {}
    for entry in FAMILIES[config.family].table(config):
        found |= entry.forward([in_memory(ours[name]) for name in entry.params])
    return {name: tensor.whole() for name, tensor in found.items()}


def test_the_config_says_what_peft_asks_for(tmp_path):
    lora = LoraConfig(rank=4, alpha=8.0, scaling="root", targets=(r"attention\.(q|v)",))
    model = build(lora=lora)
    write_adapters(tmp_path, adapters_of(model), model.config, "some/model")
    settings = json.loads((tmp_path / "adapter_config.json").read_text())
    assert settings["peft_type"] == "LORA"
    assert settings["base_model_name_or_path"] == "some/model"
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (4, 8.0, True)
    assert settings["use_dora"] is False
    layers = range(model.config.num_layers)
    wanted = [f"model.layers.{i}.self_attn.{x}_proj" for i in layers for x in "qv"]
    assert settings["target_modules"] == sorted(wanted)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in tensors


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"r": 8}, "model.lora.rank does not fit .* r=8. Set model.lora.rank=8"),
        ({"lora_alpha": 32}, "Set model.lora.alpha=32"),
        ({"use_rslora": True}, "Set model.lora.scaling=root"),
        ({"use_dora": True}, "Set model.lora.magnitudes=True"),
        ({"bias": "all"}, "bias=all is not supported"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.* is not supported"),
        ({"rank_pattern": {"q_proj": 8}}, "rank_pattern=.* is not supported"),
        ({"alpha_pattern": {r".*\.gate_up_proj": 12.0}}, "alpha_pattern=.* is not supported"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens=.* is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa .* changes the weights, too"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not .*merge_and_unload"),
        ({"init_lora_weights": "lora_ga"}, "init_lora_weights=lora_ga is not supported"),
        ({"init_lora_weights": ["eva"]}, "init_lora_weights=.* is not supported"),
        ({"use_qalora": True}, "use_qalora=True is not .*merge_and_unload"),
        ({"arrow_config": {"top_k": 3}}, "arrow_config=.* is not supported"),
        ({"peft_type": "IA3"}, "peft_type=IA3 must be LORA"),
    ],
)
def test_adapters_of_other_settings_are_refused(changes, message, tmp_path):
    model = build()
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        read_adapters(tmp_path, described(adapters), model.config)


@pytest.mark.parametrize(
    "changes",
    [
        {"init_lora_weights": False, "use_qalora": False, "arrow_config": None},
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "eva", "alora_invocation_tokens": None},
        {"init_lora_weights": "orthogonal"},
    ],
)
def test_settings_that_change_nothing_of_adapters_are_read(changes, tmp_path):
    model = build()
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    found = read_adapters(tmp_path, described(adapters), model.config)
    for ours, theirs in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
        assert np.array_equal(ours, theirs)


def test_tensors_that_are_not_those_of_the_adapters_are_told_in_a_table(tmp_path):
    model = build()
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    path = tmp_path / "adapter_model.safetensors"
    whole = load_file(path)
    names = sorted(whole)
    spoiled = dict(whole)
    del spoiled[names[0]]
    spoiled["other"] = np.zeros(3, np.float32)
    spoiled[names[1]] = np.zeros((2, 2), np.float32)
    spoiled[names[2]] = np.full_like(whole[names[2]], np.nan)
    save_file(spoiled, path)
    with pytest.raises(DataError) as error:
        read_adapters(tmp_path, described(adapters), model.config)
    for name, what in zip((names[0], "other", names[1], names[2]), WRONG, strict=True):
        assert any(name in line and what in line for line in str(error.value).splitlines()), name
    path.write_bytes(b"x" * 20)
    with pytest.raises(DataError, match=r"can't be read"):
        read_adapters(tmp_path, described(adapters), model.config)
    save_file(whole | {names[0]: np.zeros(whole[names[0]].shape, np.int64)}, path)
    with pytest.raises(DataError, match="type I64"):
        read_adapters(tmp_path, described(adapters), model.config)
    path.unlink()
    with pytest.raises(DataError, match="is missing"):
        read_adapters(tmp_path, described(adapters), model.config)


def test_adapters_in_shards_are_those_in_one_file(tmp_path):
    model = build()
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    whole = load_file(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_model.safetensors").unlink()
    names = sorted(whole)
    files = [f"adapter_model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    shards = {name: files[number % 2] for number, name in enumerate(names)}
    index = tmp_path / "adapter_model.safetensors.index.json"

    def write(weight_map):
        for file in files:
            held = {name: whole[name] for name in names if shards[name] == file}
            save_file(held, tmp_path / file)
        index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    write(shards)
    found = read_adapters(tmp_path, described(adapters), model.config)
    for ours, theirs in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
        assert np.array_equal(ours, theirs)
    base = dataclasses.replace(model.config, lora=LoraConfig())
    assert read_set(tmp_path, "one", base).lora.rank == model.config.lora.rank
    first = names[0]
    others = {name: file for name, file in shards.items() if name != first}
    for weight_map, message in (
        (shards | {first: shards[names[1]]}, "tensors that their shards do not have"),
        (others, "weight_map does not give to them"),
        (shards | {first: "../other.safetensors"}, "the name of a file beside it"),
        (shards | {first: "/etc/passwd"}, "the name of a file beside it"),
        (shards | {first: "none.safetensors"}, "is missing"),
        ([], "weight_map must give"),
    ):
        write(weight_map)
        with pytest.raises(DataError, match=message):
            read_adapters(tmp_path, described(adapters), model.config)
    # The single file counts before an index, as in PEFT.
    write([])
    save_file(whole, tmp_path / "adapter_model.safetensors")
    read_adapters(tmp_path, described(adapters), model.config)


WRONG = ("missing", "extra", "wrong shape", "not finite")


@pytest.mark.every_dose
@pytest.mark.long
def test_bfloat16_files_are_read(tmp_path):
    model = build()
    adapters = adapters_of(model)
    write_adapters(tmp_path, adapters, model.config, None)
    path = tmp_path / "adapter_model.safetensors"
    rounded = {name: x.astype(jax.numpy.bfloat16) for name, x in load_file(path).items()}
    save_file(rounded, path)
    found = read_adapters(tmp_path, described(adapters), model.config)
    for ours, theirs in zip(jax.tree.leaves(adapters), jax.tree.leaves(found), strict=True):
        assert theirs.dtype == jax.numpy.float32
        np.testing.assert_array_equal(ours.astype("bfloat16").astype("float32"), theirs)


@pytest.mark.long
def test_what_has_no_form_is_refused(tmp_path):
    plain = build(lora=LoraConfig())
    with pytest.raises(UsageError, match="the run has no adapters"):
        export_adapters(plain, tmp_path / "out", None)
    model = build("gpt_oss")
    with pytest.raises(UsageError, match=r"PEFT's files have no adapters.*--format hf"):
        export_adapters(model, tmp_path / "out", None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_experts_have_no_magnitudes_in_files_either(tmp_path):
    lora = dataclasses.replace(LORA, magnitudes=True)
    model = build("mixtral", lora)
    with pytest.raises(
        UsageError, match=r"feed-forward blocks of a model with experts\. .* with --format hf"
    ):
        write_adapters(tmp_path, adapters_of(model), model.config, None)
    assert not list(tmp_path.iterdir())
    lora = dataclasses.replace(lora, targets=("attention",))
    model = build("mixtral", lora)
    write_adapters(tmp_path, adapters_of(model), model.config, None)
    assert (tmp_path / "adapter_model.safetensors").exists()


@pytest.mark.long
def test_adapters_alone_are_all_that_was_trained():
    model = build()
    require_base_as_it_was(model, TrainConfig(), ())
    require_base_as_it_was(model, TrainConfig(only=("adapter",)), ())
    with pytest.raises(UsageError, match=r"trained embedding, .*Use --format hf"):
        require_base_as_it_was(model, TrainConfig(only=("embedding", "norm")), ())
    with pytest.raises(
        UsageError, match=r"init_partial=\['head'\] began with new.*Use --format hf"
    ):
        require_base_as_it_was(model, TrainConfig(), ("head",))
    lora = dataclasses.replace(LORA, targets=("attention",))
    with_buffers = build("deepseek_v3", lora)
    with pytest.raises(UsageError, match=r"correction_rate=0.001 has changed.*Use --format hf"):
        require_base_as_it_was(with_buffers, TrainConfig(), ())
