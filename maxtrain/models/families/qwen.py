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


QWEN2 = Family("Qwen2ForCausalLM", qwen2_spec, read_qwen2, write_qwen2, qwen2_table)
QWEN3 = Family("Qwen3ForCausalLM", qwen3_spec, read_qwen3, write_qwen3, qwen3_table)
