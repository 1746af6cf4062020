"""Qwen 3, dense: Llama with RMSNorm on query and key heads.

Source: https://arxiv.org/abs/2505.09388
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, Settings
from maxtrain.models.specs import StackSpec
from maxtrain.weights.codec import Entry


def stack(config: ModelConfig) -> StackSpec:
    """Llama's layers, with norms of query and key heads."""
    layer = llama.layer(config)
    layer = dataclasses.replace(layer, norms=(*layer.norms, "query", "key"))
    return StackSpec(period=(layer,), repeats=config.num_layers)


def read_config(settings: Settings) -> ModelConfig:
    """The ModelConfig of Qwen 3's config.json; its sliding window counts only with
    `use_sliding_window`."""
    given = {key: value for key, value in settings.values.items() if value is not None}
    values: dict[str, Any] = {"head_dim": 128, "max_position_embeddings": 32_768, **given}
    if not values.get("use_sliding_window"):
        values["sliding_window"] = None
    return llama.read_config(Settings(values, settings.path))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Qwen 3's config.json for this ModelConfig; no layer has a sliding window."""
    values = llama.write_config(config)
    del values["mlp_bias"]
    del values["pretraining_tp"]
    return values | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "layer_types": ["full_attention"] * config.num_layers,
        "max_window_layers": 28,
        "sliding_window": None,
        "use_sliding_window": False,
    }


def table(config: ModelConfig) -> list[Entry]:
    """Where Qwen 3's parameters are in a checkpoint of Hugging Face."""
    return llama.decoder_table(config, ["q_norm", "k_norm"])


QWEN3 = Family("Qwen3ForCausalLM", stack, read_config, write_config, table)
