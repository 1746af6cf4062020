"""Qwen 2 and 2.5: Llama with biases of queries, keys and values; Qwen 3: Llama with RMSNorm on
query and key heads; and both with experts.

Sources: https://arxiv.org/abs/2407.10671; https://arxiv.org/abs/2505.09388.
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig, MoeConfig
from maxtrain.config.sections.model import FULL_ATTENTION, SLIDING_ATTENTION, LayerType
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, HfConfig
from maxtrain.models.families.layer_types import (
    layer_types,
    read_window,
    require_equal_layers,
    with_window,
)
from maxtrain.models.families.tables import decoder_table
from maxtrain.models.hf_mapping import ParamMapping
from maxtrain.models.specs import DecoderSpec, LayerSpec, expert_dim, head_dim

# Defaults of config.json for the window and for max_window_layers.
_WINDOW = 4096
_MAX_WINDOW_LAYERS = 28


def _qwen2_layer(config: ModelConfig) -> LayerSpec:
    """Return the layer of Llama with biases of queries, keys and values."""
    return dataclasses.replace(llama.layer(config), biases=("q", "k", "v"))


def _qwen3_layer(config: ModelConfig) -> LayerSpec:
    """Return the layer of Llama with norms of query and key heads."""
    layer = llama.layer(config)
    return dataclasses.replace(layer, norms=(*layer.norms, "query", "key"))


def _spec(config: ModelConfig, layer: LayerSpec) -> DecoderSpec:
    """Return a decoder of these layers, some of which may have a window."""
    return DecoderSpec(with_window(config, layer), layer.norm)


def qwen2_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Qwen 2."""
    return _spec(config, _qwen2_layer(config))


def qwen3_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Qwen 3."""
    return _spec(config, _qwen3_layer(config))


def qwen2_moe_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Qwen 2 with experts, and one with a gate that all tokens use."""
    moe = llama.experts(config, shared_gate=config.moe.shared_dim > 0)
    layer = dataclasses.replace(_qwen2_layer(config), mlp=moe, quantities=moe.quantities())
    return _spec(config, layer)


def qwen3_moe_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Qwen 3 with experts."""
    moe = llama.experts(config)
    layer = dataclasses.replace(_qwen3_layer(config), mlp=moe, quantities=moe.quantities())
    return _spec(config, layer)


def read_qwen2(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Qwen 2."""
    return _read(settings.with_defaults(max_position_embeddings=32_768), "qwen2")


def read_qwen3(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Qwen 3."""
    settings = settings.with_defaults(head_dim=128, max_position_embeddings=32_768)
    return _read(settings, "qwen3")


def read_qwen2_moe(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Qwen 2 MoE."""
    settings = settings.with_defaults(
        max_position_embeddings=32_768,
        moe_intermediate_size=1408,
        num_experts=60,
        num_experts_per_tok=4,
        shared_expert_intermediate_size=5632,
    )
    settings.require("qkv_bias", True)
    return _read(settings, "qwen2_moe", moe=_read_experts(settings, with_shared=True))


def read_qwen3_moe(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Qwen 3 MoE."""
    settings = settings.with_defaults(
        max_position_embeddings=32_768,
        moe_intermediate_size=768,
        num_experts=settings.values.get("num_local_experts") or 128,
        num_experts_per_tok=8,
    )
    return _read(settings, "qwen3_moe", moe=_read_experts(settings, with_shared=False))


def _read_experts(settings: HfConfig, with_shared: bool) -> MoeConfig:
    """Read the experts of a config.json; every layer has them."""
    settings.require("decoder_sparse_step", 1)
    settings.require("mlp_only_layers", [])
    shared = 0
    if with_shared:
        shared = settings.number("shared_expert_intermediate_size")
    moe = MoeConfig(
        num_experts=settings.number("num_experts"),
        experts_per_token=settings.number("num_experts_per_tok"),
        expert_dim=settings.number("moe_intermediate_size"),
        shared_dim=shared,
        normalize=settings.flag("norm_topk_prob", False),
    )
    return settings.experts(moe)


# Default of a missing `num_key_value_heads`; null means the number of query heads.
_KV_HEADS = {"qwen2": 32, "qwen2_moe": 16, "qwen3": 32, "qwen3_moe": 4}


def _read(settings: HfConfig, family: str, **more: Any) -> ModelConfig:
    """Read the keys that the Qwen families share. The sliding window counts only with
    `use_sliding_window`, and has a default if the key is missing. Families differ in which layers
    have it if `layer_types` is missing."""
    settings = settings.where_missing(num_key_value_heads=_KV_HEADS[family])
    window = None
    if settings.flag("use_sliding_window", False):
        window = settings.number_or_null("sliding_window", _WINDOW)
    if family == "qwen3_moe":
        require_equal_layers(settings, window)
        return llama.read_decoder(settings, window=window, **more)
    return llama.read_decoder(
        settings, **read_window(settings, family, window, _usual(settings, family, window)), **more
    )


def _usual(settings: HfConfig, family: str, window: int | None) -> list[LayerType]:
    """Return the kind of each layer by `max_window_layers`, as in transformers."""
    limit = _MAX_WINDOW_LAYERS
    # Zero is allowed here.
    if settings.values.get("max_window_layers", limit) != 0:
        limit = settings.number("max_window_layers", limit)
    else:
        limit = 0
    kinds = []
    for index in range(settings.number("num_hidden_layers")):
        has_window = index >= limit
        if family == "qwen2_moe":
            has_window = index < limit and index % 2 == 0
        kind = FULL_ATTENTION
        if has_window and window is not None:
            kind = SLIDING_ATTENTION
        kinds.append(kind)
    return kinds


def _write(config: ModelConfig) -> dict[str, Any]:
    """Return the shared keys, with the window and the layers that have it."""
    has_window = config.window is not None
    kinds = layer_types(config)
    if not has_window:
        kinds = [FULL_ATTENTION] * config.num_layers
    return llama.write_decoder(config) | {
        "layer_types": kinds,
        # It counts where there is no `layer_types`.
        "max_window_layers": _MAX_WINDOW_LAYERS,
        "sliding_window": config.window,
        "use_sliding_window": has_window,
    }


def write_qwen2(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Qwen 2 for this ModelConfig."""
    values = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    if head_dim(config) * config.num_heads != config.embed_dim:
        # transformers assumes this value otherwise.
        values["head_dim"] = head_dim(config)
    return _write(config) | values


def write_qwen3(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Qwen 3 for this ModelConfig."""
    return _write(config) | {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": head_dim(config),
    }


def write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Qwen 2 MoE for this ModelConfig."""
    values = {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "qkv_bias": True,
        "shared_expert_intermediate_size": config.moe.shared_dim,
    }
    if config.window is None:
        # transformers writes 0 for no window.
        values["sliding_window"] = 0
    if head_dim(config) * config.num_heads != config.embed_dim:
        values["head_dim"] = head_dim(config)
    return _write(config) | _write_experts(config) | values


def write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Qwen 3 MoE for this ModelConfig."""
    return (
        write_qwen3(config)
        | _write_experts(config)
        | {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "num_local_experts": config.moe.num_experts,
        }
    )


def _write_experts(config: ModelConfig) -> dict[str, Any]:
    moe = config.moe
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "moe_intermediate_size": expert_dim(config),
        "norm_topk_prob": moe.normalize,
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }


def qwen2_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Qwen 2 to a Hugging Face checkpoint."""
    return decoder_table(qwen2_spec(config), config.tie_embeddings)


def qwen3_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Qwen 3 to a Hugging Face checkpoint."""
    return decoder_table(qwen3_spec(config), config.tie_embeddings)


def qwen2_moe_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Qwen 2 MoE to a Hugging Face checkpoint."""
    return decoder_table(qwen2_moe_spec(config), config.tie_embeddings)


def qwen3_moe_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Qwen 3 MoE to a Hugging Face checkpoint."""
    return decoder_table(qwen3_moe_spec(config), config.tie_embeddings)


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
    """Return the config with the shorter context of the small models of Qwen 2.5."""
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

QWEN2_MOE_PRESETS = {
    "qwen1.5_moe_a2.7b": ModelConfig(
        family="qwen2_moe",
        vocab_size=151_936,
        num_layers=24,
        embed_dim=2048,
        mlp_dim=5632,
        num_heads=16,
        num_kv_heads=16,
        max_length=8192,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        moe=MoeConfig(60, 4, expert_dim=1408, shared_dim=5632, normalize=False),
    ),
    "qwen2_57b_a14b": ModelConfig(
        family="qwen2_moe",
        vocab_size=151_936,
        num_layers=28,
        embed_dim=3584,
        mlp_dim=18_944,
        num_heads=28,
        num_kv_heads=4,
        max_length=32_768,
        norm_eps=1e-6,
        rope_theta=1_000_000.0,
        moe=MoeConfig(64, 8, expert_dim=2560, shared_dim=20_480, normalize=False),
    ),
}
_QWEN3_30B_A3B = dataclasses.replace(
    _QWEN3_8B,
    family="qwen3_moe",
    num_layers=48,
    embed_dim=2048,
    mlp_dim=6144,
    num_kv_heads=4,
    moe=MoeConfig(128, 8, expert_dim=768),
)
QWEN3_MOE_PRESETS = {
    "qwen3_30b_a3b": _QWEN3_30B_A3B,
    "qwen3_235b_a22b": dataclasses.replace(
        _QWEN3_30B_A3B,
        num_layers=94,
        embed_dim=4096,
        mlp_dim=12_288,
        num_heads=64,
        moe=MoeConfig(128, 8, expert_dim=1536),
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
QWEN2_MOE = Family(
    "Qwen2MoeForCausalLM",
    qwen2_moe_spec,
    read_qwen2_moe,
    write_qwen2_moe,
    qwen2_moe_table,
    presets=QWEN2_MOE_PRESETS,
)
QWEN3_MOE = Family(
    "Qwen3MoeForCausalLM",
    qwen3_moe_spec,
    read_qwen3_moe,
    write_qwen3_moe,
    qwen3_moe_table,
    presets=QWEN3_MOE_PRESETS,
)
