"""Qwen 3, dense: Llama with RMSNorm on query and key heads. Source:
https://arxiv.org/abs/2505.09388."""

import dataclasses

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, Settings, Tensor
from maxtrain.models.specs import StackSpec


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


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Llama's names and those of the norms of heads."""
    norms = {
        f"layers.0.attention.{x}_norm.scale": Tensor(f"model.layers.{{}}.self_attn.{x}_norm.weight")
        for x in "qk"
    }
    return llama.tensors(config) | norms


QWEN3 = Family("Qwen3ForCausalLM", stack, read_config, tensors)
