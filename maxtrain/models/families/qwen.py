"""Qwen 2 and 2.5: Llama with biases of queries, keys and values; and Qwen 3, dense: Llama with
RMSNorm on query and key heads.

Sources: https://arxiv.org/abs/2407.10671; https://arxiv.org/abs/2505.09388.
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, Settings
from maxtrain.models.families.tables import decoder_table
from maxtrain.models.specs import DecoderSpec, head_dim
from maxtrain.weights.codec import Entry


def qwen2_spec(config: ModelConfig) -> DecoderSpec:
    """Llama with biases of queries, keys and values."""
    layer = dataclasses.replace(llama.layer(config), biases=("q", "k", "v"))
    return llama.of_equal_layers(config, layer)


def qwen3_spec(config: ModelConfig) -> DecoderSpec:
    """Llama with norms of query and key heads."""
    layer = llama.layer(config)
    layer = dataclasses.replace(layer, norms=(*layer.norms, "query", "key"))
    return llama.of_equal_layers(config, layer)


def read_qwen2(settings: Settings) -> ModelConfig:
    """The ModelConfig of Qwen 2's config.json."""
    return _read(settings.with_defaults(max_position_embeddings=32_768))


def read_qwen3(settings: Settings) -> ModelConfig:
    """The ModelConfig of Qwen 3's config.json."""
    return _read(settings.with_defaults(head_dim=128, max_position_embeddings=32_768))


def _read(settings: Settings) -> ModelConfig:
    """The sliding window counts only with `use_sliding_window`."""
    if settings.values.get("use_sliding_window"):
        settings.require("sliding_window")
    settings.require("layer_types", ["full_attention"] * settings.number("num_hidden_layers"))
    return llama.read_decoder(settings)


def _write(config: ModelConfig) -> dict[str, Any]:
    """No layer has a sliding window."""
    return llama.write_decoder(config) | {
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Qwen 2's config.json for this ModelConfig."""
    values = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    if head_dim(config) * config.num_heads != config.embed_dim:
        # transformers takes it for granted otherwise.
        values["head_dim"] = head_dim(config)
    return _write(config) | values


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Qwen 3's config.json for this ModelConfig."""
    return _write(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": head_dim(config),
    }


def qwen2_table(config: ModelConfig) -> list[Entry]:
    """Where Qwen 2's parameters are in a checkpoint of Hugging Face."""
    return decoder_table(qwen2_spec(config), config.tie_embeddings)


def qwen3_table(config: ModelConfig) -> list[Entry]:
    """Where Qwen 3's parameters are in a checkpoint of Hugging Face."""
    return decoder_table(qwen3_spec(config), config.tie_embeddings)


_QWEN2_7B = ModelConfig(
    family="qwen2",
    vocab_size=152_064,
    num_layers=28,
    embed_dim=3584,
    mlp_dim=18_944,
    num_heads=28,
    num_kv_heads=4,
    max_length=131_072,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
)
_QWEN2_SMALL = dataclasses.replace(_QWEN2_7B, vocab_size=151_936, tie_embeddings=True)
_QWEN2_0_5B = dataclasses.replace(
    _QWEN2_SMALL, num_layers=24, embed_dim=896, mlp_dim=4864, num_heads=14, num_kv_heads=2
)
_QWEN2_1_5B = dataclasses.replace(
    _QWEN2_SMALL, num_layers=28, embed_dim=1536, mlp_dim=8960, num_heads=12, num_kv_heads=2
)
_QWEN2_3B = dataclasses.replace(
    _QWEN2_SMALL, num_layers=36, embed_dim=2048, mlp_dim=11_008, num_heads=16, num_kv_heads=2
)
_QWEN2_14B = dataclasses.replace(
    _QWEN2_7B,
    num_layers=48,
    embed_dim=5120,
    mlp_dim=13_824,
    num_heads=40,
    num_kv_heads=8,
    norm_eps=1e-5,
)
_QWEN2_32B = dataclasses.replace(_QWEN2_14B, num_layers=64, mlp_dim=27_648)
_QWEN2_72B = dataclasses.replace(
    _QWEN2_14B, num_layers=80, embed_dim=8192, mlp_dim=29_568, num_heads=64
)


def _of_32k(config: ModelConfig) -> ModelConfig:
    """For the shorter contexts of the small models of Qwen 2.5."""
    return dataclasses.replace(config, max_length=32_768)


QWEN2_PRESETS = {
    "qwen2_0.5b": _QWEN2_0_5B,
    "qwen2_1.5b": _QWEN2_1_5B,
    "qwen2_7b": _QWEN2_7B,
    "qwen2_72b": _QWEN2_72B,
    "qwen2.5_0.5b": _of_32k(_QWEN2_0_5B),
    "qwen2.5_1.5b": _QWEN2_1_5B,
    "qwen2.5_3b": _of_32k(_QWEN2_3B),
    "qwen2.5_7b": _QWEN2_7B,
    "qwen2.5_14b": _QWEN2_14B,
    "qwen2.5_32b": _QWEN2_32B,
    "qwen2.5_72b": _QWEN2_72B,
}
_QWEN3_8B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    num_layers=36,
    embed_dim=4096,
    mlp_dim=12_288,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=40_960,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
)
_QWEN3_0_6B = dataclasses.replace(
    _QWEN3_8B, num_layers=28, embed_dim=1024, mlp_dim=3072, num_heads=16, tie_embeddings=True
)
QWEN3_PRESETS = {
    "qwen3_0.6b": _QWEN3_0_6B,
    "qwen3_1.7b": dataclasses.replace(_QWEN3_0_6B, embed_dim=2048, mlp_dim=6144),
    "qwen3_4b": dataclasses.replace(_QWEN3_8B, embed_dim=2560, mlp_dim=9728, tie_embeddings=True),
    "qwen3_8b": _QWEN3_8B,
    "qwen3_14b": dataclasses.replace(
        _QWEN3_8B, num_layers=40, embed_dim=5120, mlp_dim=17_408, num_heads=40
    ),
    "qwen3_32b": dataclasses.replace(
        _QWEN3_8B, num_layers=64, embed_dim=5120, mlp_dim=25_600, num_heads=64
    ),
}

QWEN2 = Family(
    "Qwen2ForCausalLM",
    qwen2_spec,
    read_qwen2,
    write_qwen2,
    qwen2_table,
    presets=QWEN2_PRESETS,
)
QWEN3 = Family(
    "Qwen3ForCausalLM",
    qwen3_spec,
    read_qwen3,
    write_qwen3,
    qwen3_table,
    presets=QWEN3_PRESETS,
)
