"""Llama 2, 3, 3.1 and 3.2, and models with the same blocks.

Source: https://arxiv.org/abs/2407.21783
"""

from collections.abc import Sequence
from typing import Any

from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families.family import Family, Settings, rope_settings
from maxtrain.models.specs import (
    AttentionSpec,
    LayerSpec,
    MlpSpec,
    RopeScaling,
    RopeSpec,
    StackSpec,
    head_dim,
)
from maxtrain.ops.rope_scaling import longrope_attention_factor, yarn_attention_factor
from maxtrain.weights.codec import Entry, Flatten, Stack, Transpose


def rope(
    config: ModelConfig, theta: float | None = None, scaling: RopeScaling | None = None
) -> RopeSpec:
    """The rotary positions that the config describes, but for another base or scaling."""
    theta = theta or config.rope_theta
    scaling = scaling or config.rope_scaling
    size = head_dim(config)
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
    """What a scaling multiplies cos and sin by: as the config says, or as published."""
    if scaling not in ("yarn", "longrope"):
        return 1.0
    rope = config.rope
    if rope.attention_factor is not None:
        return rope.attention_factor
    if scaling == "yarn":
        return yarn_attention_factor(config.rope_factor, rope.mscale, rope.mscale_all_dim)
    return longrope_attention_factor(config.rope_factor, config.rope_original_length)


def layer(config: ModelConfig) -> LayerSpec:
    """The layer of Llama; all are the same."""
    return LayerSpec(
        mixer=AttentionSpec(config.num_heads, config.num_kv_heads, head_dim(config)),
        mlp=MlpSpec(config.mlp_dim),
        rope=rope(config),
        norm_eps=config.norm_eps,
    )


def stack(config: ModelConfig) -> StackSpec:
    """The layers of Llama."""
    return StackSpec(period=(layer(config),), repeats=config.num_layers)


def read_config(settings: Settings) -> ModelConfig:
    """The ModelConfig of Llama's config.json, with Hugging Face's defaults for missing keys."""
    number = settings.number
    layers = number("num_hidden_layers")
    heads = number("num_attention_heads")
    embed = number("hidden_size")
    kv_heads = number("num_key_value_heads", heads)
    size = number("head_dim", embed // heads)
    length = number("max_position_embeddings", 2048)
    settings.require("hidden_act", "silu", "swish")
    settings.require("layer_types", ["full_attention"] * layers)
    for switch in ("attention_bias", "mlp_bias"):
        settings.require(switch, False)
    for extension in ("sliding_window", "quantization_config"):
        settings.require(extension)
    if heads % kv_heads or size % 2:
        raise DataError(
            f"{settings.path}: num_key_value_heads={kv_heads} must divide "
            f"num_attention_heads={heads}, and head_dim={size} must be even. Get the file again "
            "from where the model is."
        )
    return ModelConfig(
        vocab_size=number("vocab_size"),
        num_layers=layers,
        embed_dim=embed,
        mlp_dim=number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        tie_embeddings=bool(settings.values.get("tie_word_embeddings")),
        max_length=length,
        norm_eps=number("rms_norm_eps", 1e-6, float),
        **settings.rope(length),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Llama's config.json for this ModelConfig."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": head_dim(config),
        "hidden_act": "silu",
        "hidden_size": config.embed_dim,
        "initializer_range": 0.02,
        "intermediate_size": config.mlp_dim,
        "max_position_embeddings": config.max_length,
        "mlp_bias": False,
        "num_attention_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "num_key_value_heads": config.num_kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": config.norm_eps,
        **rope_settings(config),
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def table(config: ModelConfig) -> list[Entry]:
    """Where Llama's parameters are in a checkpoint of Hugging Face."""
    return decoder_table(config, [])


def decoder_table(config: ModelConfig, head_norms: Sequence[str]) -> list[Entry]:
    """Where the parameters of Llama, or of a family with its names, are in a checkpoint.

    Args:
        config: of the model.
        head_norms: the names of norms over single heads, which are the same on both sides.
    """
    ours = "layers.0"
    theirs = "model.layers.{}"
    entries = [Entry(("embedding",), ("model.embed_tokens.weight",))]
    for x in "qkv":
        kernel = f"{ours}.attention.{x}.kernel"
        entries.append(_matrix(kernel, f"{theirs}.self_attn.{x}_proj.weight", 1))
    kernel = f"{ours}.attention.o.kernel"
    entries.append(_matrix(kernel, f"{theirs}.self_attn.o_proj.weight", 2))
    for x in head_norms:
        entries.append(_norm(f"{ours}.attention.{x}.scale", f"{theirs}.self_attn.{x}.weight"))
    for x in ("gate", "up", "down"):
        entries.append(_matrix(f"{ours}.mlp.{x}.kernel", f"{theirs}.mlp.{x}_proj.weight", 1))
    entries.append(_norm(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight"))
    entries.append(_norm(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight"))
    entries.append(Entry(("final_norm.scale",), ("model.norm.weight",)))
    if not config.tie_embeddings:
        entries.append(Entry(("head.kernel",), ("lm_head.weight",), (Flatten(1), Transpose())))
    return entries


def _matrix(ours: str, theirs: str, inputs: int) -> Entry:
    """A matrix of every layer: theirs is [outputs, inputs]; of ours, the first `inputs` dims are
    inputs."""
    return Entry((ours,), (theirs,), (Stack(), Flatten(inputs), Transpose()))


def _norm(ours: str, theirs: str) -> Entry:
    """The scale of a norm in every layer."""
    return Entry((ours,), (theirs,), (Stack(),))


LLAMA = Family("LlamaForCausalLM", stack, read_config, write_config, table)
