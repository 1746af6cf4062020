"""Qwen 3, dense: Llama with RMSNorm on query and key heads. Source:
https://arxiv.org/abs/2505.09388."""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, Settings
from maxtrain.models.specs import StackSpec
from maxtrain.weights.codec import Entry


def stack(config: ModelConfig) -> StackSpec:
    """Llama's layers, with norms of heads."""
    layer = llama.layer(config)
    layer = dataclasses.replace(layer, norms=(*layer.norms, "query", "key"))
    return StackSpec(period=(layer,), repeats=config.num_layers)


def read_config(settings: Settings) -> ModelConfig:
    """A ModelConfig of Qwen 3's config.json; the window is in force only with
    `use_sliding_window`."""
    values = {"head_dim": 128, "max_position_embeddings": 32_768} | {
        k: v for k, v in settings.values.items() if v is not None
    }
    if not values.get("use_sliding_window"):
        values["sliding_window"] = None
    return llama.read_config(Settings(values, settings.path))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """What of Qwen 3's config.json the ModelConfig decides: no layer has a window."""
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
    """Llama's names and those of the norms of heads."""
    return llama.decoder_table(config, ["q_norm", "k_norm"])


QWEN3 = Family("Qwen3ForCausalLM", stack, read_config, write_config, table)
