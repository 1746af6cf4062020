"""Llama 2, 3, 3.1 and 3.2, and models with the same blocks; Mistral, whose layers also have a
window; and Mixtral, whose layers have experts.

Sources: Llama: https://arxiv.org/abs/2407.21783; Mistral: https://arxiv.org/abs/2310.06825;
Mixtral: https://arxiv.org/abs/2401.04088.
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig, MoeConfig
from maxtrain.models.families.family import Family, HfConfig, rope_settings
from maxtrain.models.families.layer_types import (
    layer_types,
    read_window,
    require_equal_layers,
    with_window,
)
from maxtrain.models.families.tables import ExpertNames, LayerGroup, decoder_table, expert_entries
from maxtrain.models.hf_mapping import ParamMapping
from maxtrain.models.specs import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    RopeScaling,
    RopeSpec,
    RoutingSpec,
    StackSpec,
    expert_dim,
    head_dim,
)
from maxtrain.ops.rope_scaling import longrope_attention_factor, yarn_attention_factor


def rope(
    config: ModelConfig,
    theta: float | None = None,
    scaling: RopeScaling | None = None,
    size: int | None = None,
) -> RopeSpec:
    """Return the rotary positions of the config, optionally with another base, scaling or size."""
    theta = theta or config.rope_theta
    scaling = scaling or config.rope_scaling
    size = size or head_dim(config)
    if scaling == "none":
        return RopeSpec(size, theta)
    more = config.rope
    return RopeSpec(
        head_dim=size,
        theta=theta,
        scaling=scaling,
        factor=config.rope_factor,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        original_length=config.rope_original_length,
        beta_fast=more.beta_fast,
        beta_slow=more.beta_slow,
        truncate=more.truncate,
        attention_factor=_attention_factor(config, scaling),
        short_factors=tuple(more.short_factors),
        long_factors=tuple(more.long_factors),
    )


def _attention_factor(config: ModelConfig, scaling: RopeScaling) -> float:
    """Return the factor of cos and sin of a scaling: as configured, or as published."""
    if scaling not in ("yarn", "longrope"):
        return 1.0
    rope = config.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    if scaling == "yarn":
        return yarn_attention_factor(config.rope_factor, rope.mscale, rope.mscale_all_dim)
    return longrope_attention_factor(config.rope_factor, config.rope_original_length)


def layer(config: ModelConfig) -> LayerSpec:
    """Return the layer of Llama; all layers are the same."""
    return LayerSpec(
        mixer=AttentionSpec(config.num_heads, config.num_kv_heads, head_dim(config)),
        mlp=MlpSpec(config.mlp_dim),
        rope=rope(config),
        norm=NormSpec(config.norm_eps),
    )


def experts(config: ModelConfig, **more: Any) -> MoeSpec:
    """Return the experts of the config; `more` are settings of the family."""
    moe = config.moe
    routing = config.routing
    return MoeSpec(
        num_experts=moe.num_experts,
        num_choices=moe.experts_per_token,
        width=expert_dim(config),
        normalize=moe.normalize,
        shared_width=moe.shared_dim,
        routing=RoutingSpec(
            kernel=routing.kernel,
            capacity_factor=routing.capacity_factor,
            balance=routing.balance,
            balance_scope=routing.balance_scope,
            z_loss=routing.z_loss,
            correction_rate=routing.correction_rate,
            exchange_factor=routing.exchange_factor,
        ),
        **more,
    )


def of_equal_layers(config: ModelConfig, layer: LayerSpec) -> DecoderSpec:
    """Return a decoder whose layers are all the same, with the same norm at the end."""
    return DecoderSpec(StackSpec(period=(layer,), repeats=config.num_layers), layer.norm)


def llama_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Llama."""
    return of_equal_layers(config, layer(config))


def mistral_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Mistral: Llama with a window."""
    one = layer(config)
    return DecoderSpec(with_window(config, one), one.norm)


def mixtral_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Mixtral: Mistral with experts."""
    moe = experts(config)
    one = dataclasses.replace(layer(config), mlp=moe, quantities=moe.quantities())
    return DecoderSpec(with_window(config, one), one.norm)


def read_config(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Llama, with Hugging Face's defaults for missing
    keys."""
    settings.require("layer_types", ["full_attention"] * settings.number("num_hidden_layers"))
    settings.require("mlp_bias", False)
    settings.require("sliding_window")
    return read_decoder(settings)


def read_decoder(settings: HfConfig, **more: Any) -> ModelConfig:
    """Read the keys that most families share; `more` are keys that the family adds."""
    number = settings.number
    heads = number("num_attention_heads")
    embed = number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    size = number("head_dim", embed // heads)
    length = number("max_position_embeddings", 2048)
    settings.require("hidden_act", "silu", "swish")
    settings.require("attention_bias", False)
    settings.require_heads(heads, kv_heads, size)
    return ModelConfig(
        vocab_size=number("vocab_size"),
        num_layers=number("num_hidden_layers"),
        embed_dim=embed,
        mlp_dim=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        tie_embeddings=settings.tied(False),
        max_length=length,
        norm_eps=number("rms_norm_eps", 1e-6, float),
        **settings.rope(length),
        **more,
    )


def read_mixtral(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Mixtral."""
    settings = settings.where_missing(num_key_value_heads=8).with_defaults(
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1_000_000.0,
    )
    moe = MoeConfig(
        num_experts=settings.number("num_local_experts", settings.number("num_experts", 8)),
        experts_per_token=settings.number("num_experts_per_tok", 2),
    )
    window = settings.number_or_null("sliding_window", None)
    require_equal_layers(settings, window)
    return read_decoder(settings, window=window, moe=settings.experts(moe))


def read_mistral(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Mistral."""
    settings = settings.where_missing(num_key_value_heads=8)
    settings = settings.with_defaults(max_position_embeddings=131_072)
    window = settings.number_or_null("sliding_window", 4096)
    return read_decoder(settings, **read_window(settings, "mistral", window))


def write_decoder(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of config.json that most families share, for this ModelConfig."""
    return {
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_length,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "rms_norm_eps": config.norm_eps,
        **rope_settings(config),
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def write_llama(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Llama for this ModelConfig."""
    return write_decoder(config) | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "head_dim": head_dim(config),
        "mlp_bias": False,
        "pretraining_tp": 1,
    }


def write_mistral(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Mistral for this ModelConfig."""
    values = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": head_dim(config),
        "sliding_window": config.window,
    }
    if config.layer_types:
        # If it is present, AutoModel of transformers takes the model for a Ministral.
        values["layer_types"] = layer_types(config)
    return write_decoder(config) | values


def write_mixtral(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Mixtral for this ModelConfig."""
    moe = config.moe
    size = None
    if head_dim(config) * config.num_heads != config.embed_dim:
        size = head_dim(config)
    return write_decoder(config) | {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "head_dim": size,
        "intermediate_size": expert_dim(config),
        "num_experts_per_tok": moe.experts_per_token,
        "num_local_experts": moe.num_experts,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
        "sliding_window": config.window,
    }


def llama_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Llama to a Hugging Face checkpoint."""
    return decoder_table(llama_spec(config), config.tie_embeddings)


_MIXTRAL_EXPERTS = ExpertNames(
    block="block_sparse_moe", router="gate", products={"gate": "w1", "down": "w2", "up": "w3"}
)


def _mixtral_experts(place: LayerGroup, moe: MoeSpec, theirs: str) -> list[ParamMapping]:
    return expert_entries(place, moe, theirs, _MIXTRAL_EXPERTS)


def mixtral_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Mixtral to a Hugging Face checkpoint."""
    return decoder_table(mixtral_spec(config), config.tie_embeddings, experts=_mixtral_experts)


def mistral_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Mistral to a Hugging Face checkpoint."""
    return decoder_table(mistral_spec(config), config.tie_embeddings)


_LLAMA2 = ModelConfig(vocab_size=32_000, max_length=4096, norm_eps=1e-5, rope_theta=10_000.0)
_LLAMA2_7B = dataclasses.replace(
    _LLAMA2, num_layers=32, embed_dim=4096, mlp_dim=11_008, num_heads=32, num_kv_heads=32
)
_LLAMA2_13B = dataclasses.replace(
    _LLAMA2, num_layers=40, embed_dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40
)
_LLAMA2_70B = dataclasses.replace(
    _LLAMA2, num_layers=80, embed_dim=8192, mlp_dim=28_672, num_heads=64, num_kv_heads=8
)
_LLAMA3_8B = ModelConfig(
    vocab_size=128_256,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    max_length=8192,
    norm_eps=1e-5,
    rope_theta=500_000.0,
)
_LLAMA3_70B = dataclasses.replace(
    _LLAMA3_8B, num_layers=80, embed_dim=8192, mlp_dim=28_672, num_heads=64
)
_LLAMA3_405B = dataclasses.replace(
    _LLAMA3_8B, num_layers=126, embed_dim=16_384, mlp_dim=53_248, num_heads=128
)
_LLAMA3_3B = dataclasses.replace(
    _LLAMA3_8B,
    num_layers=28,
    embed_dim=3072,
    mlp_dim=8192,
    num_heads=24,
    head_dim=128,
    tie_embeddings=True,
)
_LLAMA3_1B = dataclasses.replace(
    _LLAMA3_3B, num_layers=16, embed_dim=2048, num_heads=32, head_dim=64
)


def _stretched(config: ModelConfig, factor: float) -> ModelConfig:
    """Return the config with the contexts of Llama 3.1 and later."""
    return dataclasses.replace(
        config, max_length=131_072, rope_scaling="llama3", rope_factor=factor
    )


LLAMA_PRESETS = {
    "llama2_7b": _LLAMA2_7B,
    "llama2_13b": _LLAMA2_13B,
    "llama2_70b": _LLAMA2_70B,
    "llama3_8b": _LLAMA3_8B,
    "llama3_70b": _LLAMA3_70B,
    "llama3.1_8b": _stretched(_LLAMA3_8B, 8.0),
    "llama3.1_70b": _stretched(_LLAMA3_70B, 8.0),
    "llama3.1_405b": _stretched(_LLAMA3_405B, 8.0),
    "llama3.2_1b": _stretched(_LLAMA3_1B, 32.0),
    "llama3.2_3b": _stretched(_LLAMA3_3B, 32.0),
}
_MISTRAL_7B = ModelConfig(
    family="mistral",
    vocab_size=32_768,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=14_336,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    max_length=32_768,
    norm_eps=1e-5,
    rope_theta=1_000_000.0,
)
MISTRAL_PRESETS = {
    "mistral_7b_v0.1": dataclasses.replace(
        _MISTRAL_7B, vocab_size=32_000, window=4096, rope_theta=10_000.0
    ),
    "mistral_7b_v0.3": _MISTRAL_7B,
    "mistral_nemo_12b": dataclasses.replace(
        _MISTRAL_7B, vocab_size=131_072, num_layers=40, embed_dim=5120, max_length=131_072
    ),
    "mistral_small_24b": dataclasses.replace(
        _MISTRAL_7B,
        vocab_size=131_072,
        num_layers=40,
        embed_dim=5120,
        mlp_dim=32_768,
        rope_theta=100_000_000.0,
    ),
}

_MIXTRAL_8X7B = dataclasses.replace(
    _MISTRAL_7B, family="mixtral", vocab_size=32_000, moe=MoeConfig(8, 2)
)
MIXTRAL_PRESETS = {
    "mixtral_8x7b": _MIXTRAL_8X7B,
    "mixtral_8x22b": dataclasses.replace(
        _MIXTRAL_8X7B,
        vocab_size=32_768,
        num_layers=56,
        embed_dim=6144,
        mlp_dim=16_384,
        num_heads=48,
        max_length=65_536,
    ),
}

LLAMA = Family(
    "LlamaForCausalLM",
    llama_spec,
    read_config,
    write_llama,
    llama_table,
    presets=LLAMA_PRESETS,
)
MISTRAL = Family(
    "MistralForCausalLM",
    mistral_spec,
    read_mistral,
    write_mistral,
    mistral_table,
    presets=MISTRAL_PRESETS,
)
MIXTRAL = Family(
    "MixtralForCausalLM",
    mixtral_spec,
    read_mixtral,
    write_mixtral,
    mixtral_table,
    presets=MIXTRAL_PRESETS,
)
