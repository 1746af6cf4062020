"""GPT-OSS: layers with and without a window alternate, heads have sinks, and experts have biases
and bounded units.

Source: https://arxiv.org/abs/2508.10925.
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig, MoeConfig
from maxtrain.config.sections.model import FULL_ATTENTION
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, HfConfig
from maxtrain.models.families.layer_types import layer_types, read_window, with_window
from maxtrain.models.families.tables import (
    LLAMA_NORMS,
    LayerGroup,
    attention_entries,
    decoder_table,
    linear,
)
from maxtrain.models.hf_mapping import Join, ParamMapping, Permute
from maxtrain.models.specs import DecoderSpec, MoeSpec, expert_dim, head_dim

# Rope parameters of a config.json that has none.
_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_BIASES = ("q", "k", "v", "o", "router", "gate", "up", "down")


def spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of GPT-OSS."""
    moe = llama.experts(config, activation="clamped_swiglu")
    layer = llama.layer(config)
    wide = dataclasses.replace(
        layer,
        mixer=dataclasses.replace(layer.mixer, sinks=True),
        mlp=moe,
        biases=_BIASES,
        quantities=moe.quantities(),
    )
    return DecoderSpec(with_window(config, wide), layer.norm)


def read(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of GPT-OSS."""
    settings = settings.where_missing(num_key_value_heads=8)
    settings = settings.with_defaults(
        head_dim=64,
        max_position_embeddings=131_072,
        num_experts_per_tok=settings.values.get("experts_per_token") or 4,
        num_local_experts=128,
        rms_norm_eps=1e-5,
        rope_theta=150_000.0,
    )
    if settings.values.get("rope_scaling") is None:
        settings = settings.with_defaults(rope_parameters=_ROPE)
    settings.require("swiglu_alpha", 1.702)
    settings.require("swiglu_limit", 7.0)
    settings.require("attention_bias", True)
    window = read_window(settings, "gpt_oss", settings.number_or_null("sliding_window", 128))
    moe = MoeConfig(
        num_experts=settings.number("num_local_experts"),
        experts_per_token=settings.number("num_experts_per_tok"),
    )
    plain = {**settings.values, "attention_bias": False}
    settings = dataclasses.replace(settings, values=plain)
    return llama.read_decoder(settings, **window, moe=settings.experts(moe))


def write(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of GPT-OSS for this ModelConfig."""
    moe = config.moe
    kinds = layer_types(config)
    if config.window is None:
        kinds = [FULL_ATTENTION] * config.num_layers
    return llama.write_decoder(config) | {
        "architectures": ["GptOssForCausalLM"],
        "attention_bias": True,
        "head_dim": head_dim(config),
        "intermediate_size": expert_dim(config),
        "layer_types": kinds,
        "model_type": "gpt_oss",
        "num_experts_per_tok": moe.experts_per_token,
        "num_local_experts": moe.num_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "sliding_window": config.window,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    }


def table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of GPT-OSS to a Hugging Face checkpoint."""
    return decoder_table(
        spec(config), config.tie_embeddings, LLAMA_NORMS, _attention_entries, _expert_entries
    )


def _attention_entries(place: LayerGroup, theirs: str) -> list[ParamMapping]:
    sinks = ParamMapping((f"{place.ours}.attention.sinks",), (f"{theirs}.sinks",), place.steps)
    return [*attention_entries(place, theirs), sinks]


def _expert_entries(place: LayerGroup, moe: MoeSpec, theirs: str) -> list[ParamMapping]:
    """Return the entries of the experts, which are one tensor there, with gates and units
    alternating."""
    stacked = len(place.steps)
    sizes = (moe.width, moe.width)
    ours = f"{place.ours}.mlp"
    experts = f"{theirs}.mlp.experts"
    entries = linear(place, "mlp.router", f"{theirs}.mlp.router", 1, True)
    for kind, name, dims in (("kernel", "gate_up_proj", 3), ("bias", "gate_up_proj_bias", 2)):
        steps = (
            Join(dims - 1 + stacked, sizes),
            *place.steps,
            Permute(dims - 1, (2, moe.width), (1, 0)),
        )
        both = (f"{ours}.gate.{kind}", f"{ours}.up.{kind}")
        entries.append(ParamMapping(both, (f"{experts}.{name}",), steps))
    for kind, name in (("kernel", "down_proj"), ("bias", "down_proj_bias")):
        entries.append(ParamMapping((f"{ours}.down.{kind}",), (f"{experts}.{name}",), place.steps))
    return entries


_20B = ModelConfig(
    family="gpt_oss",
    vocab_size=201_088,
    num_layers=24,
    embed_dim=2880,
    mlp_dim=2880,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    max_length=131_072,
    norm_eps=1e-5,
    window=128,
    rope_theta=150_000.0,
    rope_scaling="yarn",
    rope_factor=32.0,
    rope_original_length=4096,
    rope=dataclasses.replace(ModelConfig().rope, truncate=False),
    moe=MoeConfig(32, 4),
)
PRESETS = {
    "gpt_oss_20b": _20B,
    "gpt_oss_120b": dataclasses.replace(_20B, num_layers=36, moe=MoeConfig(128, 4)),
}

GPT_OSS = Family("GptOssForCausalLM", spec, read, write, table, presets=PRESETS)
