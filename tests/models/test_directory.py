"""The model configuration read from a directory of weights."""

import dataclasses
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from data_pipeline.base.errors import DataError, UsageError
from maxtrain.config.schema import LatentConfig, ModelConfig, MoeConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import (
    FREE,
    free_keys,
    model_named,
    model_of,
    read_config,
)
from maxtrain.weights.hf import differing_keys

PARITY = Path(__file__).parents[1] / "data/parity/llama3"


SMALL = {
    "num_layers": 2,
    "embed_dim": 32,
    "mlp_dim": 48,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 12,
    "vocab_size": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0, "rope_theta": 1e4}
LATENT = LatentConfig(16, 8, rope_dim=4, value_dim=8)
EXPERTS = [
    ("mixtral", {"moe": MoeConfig(4, 2, expert_dim=24)}),
    ("qwen2_moe", {"moe": MoeConfig(4, 2, shared_dim=16)}),
    ("qwen3_moe", {"moe": MoeConfig(4, 2)}),
    ("deepseek_v2", {"moe": MoeConfig(4, 2, shared_dim=48), "latent": LATENT}),
    ("deepseek_v3", {"moe": MoeConfig(4, 2, dense_layers=1), "latent": LATENT}),
    ("gpt_oss", {"moe": MoeConfig(4, 2)}),
    ("gpt_oss", {"moe": MoeConfig(4, 2), "window": 16}),
]


@pytest.mark.parametrize(("family", "changes"), EXPERTS)
def test_a_model_with_experts_is_the_same_as_its_own_export(family, changes, tmp_path):
    """A key that is left open means the value that is written for it."""
    model = ModelConfig(family=family, **SMALL, **changes)
    written = FAMILIES[family].write(model)
    (tmp_path / "config.json").write_text(json.dumps(written))
    read = read_config(tmp_path)
    assert differing_keys(model, dataclasses.asdict(read)) == {}
    assert read.window == model.window
    one, other = (FAMILIES[family].spec(config) for config in (model, read))
    assert one.stack == other.stack
    wider = dataclasses.replace(model, moe=dataclasses.replace(model.moe, expert_dim=96))
    assert "moe.expert_dim" in differing_keys(wider, dataclasses.asdict(read))


@pytest.mark.parametrize(
    ("family", "changes", "told"),
    [
        ("deepseek_v3", {"rope_scaling": YARN | {"rope_type": "linear"}}, "only with rope_type"),
        ("deepseek_v3", {"rope_scaling": {**YARN, "mscale": None}}, "beside mscale"),
        ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
        ("deepseek_v3", {"num_key_value_heads": 2}, "must be num_attention_heads=4"),
        ("deepseek_v3", {"n_group": 3}, "must divide model.moe.num_experts=4"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1] is not supported"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "norm_topk_prob=1 must be true or false"),
        ("mixtral", {"num_experts_per_tok": 9}, "must be at most model.moe.num_experts=4"),
        ("gpt_oss", {"swiglu_limit": 3.0}, "swiglu_limit=3.0 is not supported"),
    ],
)
def test_a_config_that_is_not_supported_is_refused(family, changes, told, tmp_path):
    more = next(extra for name, extra in EXPERTS if name == family)
    values = FAMILIES[family].write(ModelConfig(family=family, **SMALL, **more)) | changes
    if "rope_scaling" in changes:
        del values["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(DataError) as error:
        read_config(tmp_path)
    assert told in str(error.value)


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


def test_aliases_that_grow_without_end_make_no_model(tmp_path):
    aliases = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 20)
    )
    (tmp_path / "config.yaml").write_text(f"{aliases}model: {{num_layers: *a19}}")
    with pytest.raises(UsageError):
        model_named(str(tmp_path))


def test_learned_positions_are_of_the_weights():
    assert "max_length" in free_keys("llama") and "max_length" not in free_keys("gpt2")
    assert free_keys(None) == FREE


def changed(tmp_path, case, drop=(), **changes):
    """The config of a case with other keys, as it is read."""
    values = json.loads((PARITY.parent / case / "config.json").read_text())
    for key in drop:
        values.pop(key, None)
    (tmp_path / "config.json").write_text(json.dumps(values | changes))
    return read_config(tmp_path)


def test_the_older_spelling_of_rotary_positions_counts_beside_the_newer_one(tmp_path):
    """This is the rule of transformers 5; version 4 knows no other spelling."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain = {"rope_type": "default", "rope_theta": 1e6}
    read = changed(tmp_path, "qwen3", rope_parameters=plain, rope_scaling=scaling, rope_theta=2e4)
    assert (read.rope_scaling, read.rope_factor, read.rope_theta) == ("yarn", 4.0, 2e4)
    for nothing in (None, {}):
        read = changed(tmp_path, "qwen3", rope_parameters=plain, rope_scaling=nothing)
        assert (read.rope_scaling, read.rope_theta) == ("none", 1e6)


def test_the_older_spelling_counts_in_gemmas_layers_without_a_window(tmp_path):
    both = {
        "full_attention": {"rope_type": "default", "rope_theta": 5e5},
        "sliding_attention": {"rope_type": "default"},
    }
    linear = {"rope_type": "linear", "factor": 8.0}
    changes = {"rope_parameters": both, "rope_scaling": linear, "rope_local_base_freq": 2e4}
    read = changed(tmp_path, "gemma3", **changes)
    assert (read.rope_scaling, read.rope_factor, read.rope_theta) == ("linear", 8.0, 5e5)
    assert read.rope.local_theta == 2e4
    del both["full_attention"]["rope_theta"]
    read = changed(tmp_path, "gemma3", rope_parameters=both, rope_theta=3e5)
    assert (read.rope_scaling, read.rope_theta) == ("none", 3e5)


ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta")


def test_keys_that_are_missing_have_their_familys_defaults(tmp_path):
    read = changed(tmp_path, "mixtral", drop=("rms_norm_eps", *ROPE_KEYS))
    assert (read.norm_eps, read.rope_theta, read.rope_scaling) == (1e-5, 1e6, "none")
    read = changed(tmp_path, "gpt_oss", drop=("rms_norm_eps", *ROPE_KEYS))
    released = model_named("gpt_oss_20b").keys
    assert read.norm_eps == 1e-5
    for key in ("rope_theta", "rope_scaling", "rope_factor", "rope_original_length"):
        assert getattr(read, key) == released[key], key
    assert dataclasses.asdict(read.rope) == released["rope"]
    plain = {"rope_type": "default"}
    read = changed(tmp_path, "gpt_oss", drop=ROPE_KEYS, rope_parameters=plain)
    assert (read.rope_theta, read.rope_scaling) == (150_000.0, "none")
    linear = {"rope_type": "linear", "factor": 2.0}
    read = changed(tmp_path, "gpt_oss", drop=ROPE_KEYS, rope_scaling=linear)
    assert (read.rope_scaling, read.rope_factor) == ("linear", 2.0)


SLIDING, FULL = "sliding_attention", "full_attention"


def windows(config):
    """The window of each layer."""
    return [layer.window for layer in FAMILIES[config.family].spec(config).stack.layers()]


def read_back(config, folder):
    """The config that is read from what is written for this one."""
    (folder / "config.json").write_text(json.dumps(FAMILIES[config.family].write(config)))
    return read_config(folder)


# As transformers 5.24 has them, of 3 layers each, and of 7 in gemma3.
@pytest.mark.parametrize(
    ("case", "changes", "expected"),
    [
        ("qwen2", {"max_window_layers": 0}, [4096] * 3),
        ("qwen2", {"max_window_layers": 1}, [None, 4096, 4096]),
        ("qwen2", {}, [None] * 3),
        ("qwen2", {"max_window_layers": 2, "sliding_window": 5}, [None, None, 5]),
        ("qwen2", {"max_window_layers": 0, "sliding_window": None}, [None] * 3),
        (
            "qwen2",
            {"max_window_layers": 0, "layer_types": [FULL, SLIDING, FULL]},
            [None, 4096, None],
        ),
        ("qwen3", {"max_window_layers": 1, "sliding_window": 7}, [None, 7, 7]),
        ("qwen3", {"layer_types": [SLIDING, FULL, FULL]}, [4096, None, None]),
        ("qwen2_moe", {"sliding_window": 6}, [6, None, 6]),
        ("qwen2_moe", {"sliding_window": 6, "max_window_layers": 1}, [6, None, None]),
        ("qwen3_moe", {"sliding_window": 6}, [6] * 3),
        ("mistral", {"layer_types": [FULL, SLIDING, SLIDING]}, [None, 16, 16]),
        ("mistral", {"layer_types": [SLIDING] * 3}, [16] * 3),
        ("mistral", {"layer_types": [FULL] * 3}, [None] * 3),
        ("mistral", {"layer_types": None}, [16] * 3),
        ("gemma2", {"layer_types": [FULL, SLIDING, SLIDING]}, [None, 16, 16]),
        ("gemma2", {"layer_types": [FULL] * 3}, [None] * 3),
        ("gpt_oss", {"layer_types": [FULL, SLIDING, FULL]}, [None, 16, None]),
        ("gemma3", {"sliding_window_pattern": 3}, [16, 16, None, 16, 16, None, 16]),
        ("gemma3", {"sliding_window_pattern": 1}, [None] * 7),
        ("gemma3", {"layer_types": [FULL, SLIDING] * 3 + [FULL]}, [None, 16] * 3 + [None]),
        ("mixtral", {"sliding_window": 9, "layer_types": [SLIDING] * 3}, [9] * 3),
    ],
    ids=str,
)
def test_layers_have_the_windows_that_the_config_gives_them(case, changes, expected, tmp_path):
    left = ["layer_types", "sliding_window_pattern", "_sliding_window_pattern"]
    if case.startswith("qwen"):
        changes = {"use_sliding_window": True, **changes}
        left += ["sliding_window", "max_window_layers"]
    read = changed(tmp_path, case, drop=left, **changes)
    assert windows(read) == expected
    assert read_back(read, tmp_path) == read
    if case == "gemma3":
        # Layers without a window have the rotary positions of long contexts.
        layers = FAMILIES[case].spec(read).stack.layers()
        bases = [read.rope.local_theta if window else read.rope_theta for window in expected]
        assert [layer.rope.theta for layer in layers] == bases


# Key and value heads where the config does not say, as in transformers 5.24; of 64 query heads.
@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("llama3", 64),
        ("olmo2", 64),
        ("mistral", 8),
        ("mixtral", 8),
        ("qwen2", 32),
        ("qwen2_moe", 16),
        ("qwen3", 32),
        ("qwen3_moe", 4),
        ("gemma2", 4),
        ("gemma3", 4),
        ("gpt_oss", 8),
    ],
)
def test_key_heads_that_are_missing_are_those_of_the_family(case, expected, tmp_path):
    sizes = {"num_attention_heads": 64, "hidden_size": 512, "head_dim": 8}
    assert changed(tmp_path, case, drop=["num_key_value_heads"], **sizes).num_kv_heads == expected
    of_null = changed(tmp_path, case, num_key_value_heads=None, **sizes)
    assert of_null.num_kv_heads == 64


def test_key_heads_of_latents_are_as_many_as_queries(tmp_path):
    sizes = {"num_attention_heads": 64, "hidden_size": 512}
    with pytest.raises(DataError, match="num_key_value_heads=128"):
        changed(tmp_path, "deepseek_v3", drop=["num_key_value_heads"], **sizes)
    assert changed(tmp_path, "deepseek_v3", num_key_value_heads=None, **sizes).num_kv_heads == 64


@pytest.mark.parametrize("case", ["qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_a_window_counts_only_where_it_is_used(case, tmp_path):
    read = changed(tmp_path, case, drop=["layer_types"], sliding_window=5, use_sliding_window=False)
    assert windows(read) == [None] * 3 and read.window is None


@pytest.mark.parametrize(
    ("case", "changes"),
    [
        ("mistral", {"layer_types": [FULL, SLIDING]}),
        ("mistral", {"layer_types": [FULL, SLIDING, "chunked_attention"]}),
        ("mistral", {"layer_types": [FULL, SLIDING, None]}),
        ("mistral", {"layer_types": "full_attention"}),
        ("mistral", {"layer_types": [FULL, SLIDING, FULL], "sliding_window": None}),
        ("mixtral", {"layer_types": [FULL, SLIDING, FULL], "sliding_window": 9}),
        ("mixtral", {"layer_types": [FULL] * 3, "sliding_window": 9}),
        ("qwen2", {"layer_types": [FULL, SLIDING, FULL]}),
        ("qwen2", {"layer_types": [FULL, "linear_attention", FULL]}),
        ("qwen3", {"layer_types": [FULL] * 4}),
        ("qwen3_moe", {"layer_types": [FULL, SLIDING, FULL], "use_sliding_window": True}),
        ("gemma2", {"layer_types": [FULL] * 4}),
        ("gemma3", {"sliding_window_pattern": 0}),
        ("gemma3", {"layer_types": [SLIDING] * 3}),
        ("gpt_oss", {"layer_types": [SLIDING, FULL, FULL], "sliding_window": None}),
        ("olmo2", {"layer_types": [SLIDING, FULL, FULL]}),
    ],
    ids=str,
)
def test_kinds_of_layers_that_are_not_known_or_do_not_fit_are_refused(case, changes, tmp_path):
    with pytest.raises(DataError, match=r"layer_types|sliding_window_pattern"):
        changed(tmp_path, case, **changes)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 2.0),
        ("num_hidden_layers", "2"),
        ("num_hidden_layers", True),
        ("num_hidden_layers", [2]),
        ("hidden_size", 10**12),
        ("intermediate_size", 10**12),
        ("vocab_size", 10**15),
        ("num_attention_heads", 10**9),
        ("max_position_embeddings", 2**31),
        ("rms_norm_eps", 10**400),
        ("rope_parameters", {"rope_theta": 1e300}),
        ("tie_word_embeddings", "false"),
        ("layer_types", ["full_attention"] * 100_000),
        ("architectures", ["x" * 100_000]),
        ("quantization_config", {"quant_method": "fp8", "weight_block_size": [True, 10**30]}),
    ],
    ids=str,
)
def test_numbers_that_no_model_has_are_refused_at_once(key, value, tmp_path):
    began = time.process_time()
    with pytest.raises(DataError) as caught:
        changed(tmp_path, "qwen2", **{key: value})
    assert len(str(caught.value)) < 3000 and time.process_time() - began < 2
