"""Llama 2, 3, 3.1, 3.2 and whatever shares their blocks. Source:
https://arxiv.org/abs/2407.21783."""

from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families.family import Family, Settings, Tensor
from maxtrain.models.specs import AttentionSpec, LayerSpec, MlpSpec, RopeSpec, StackSpec, head_dim


def layer(config: ModelConfig) -> LayerSpec:
    """Every layer of Llama."""
    size = head_dim(config)
    rope = RopeSpec(
        head_dim=size,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        factor=config.rope_factor,
        low_freq_factor=config.rope_low_freq_factor,
        high_freq_factor=config.rope_high_freq_factor,
        original_length=config.rope_original_length,
    )
    return LayerSpec(
        mixer=AttentionSpec(config.num_heads, config.num_kv_heads, size),
        mlp=MlpSpec(config.mlp_dim),
        rope=rope,
        norm_eps=config.norm_eps,
    )


def stack(config: ModelConfig) -> StackSpec:
    """All layers are the same."""
    return StackSpec(period=(layer(config),), repeats=config.num_layers)


def read_config(settings: Settings) -> ModelConfig:
    """The ModelConfig of Llama's config.json, with Hugging Face's defaults for keys that are
    missing."""
    number = settings.number
    layers, heads, embed = (
        number("num_hidden_layers"),
        number("num_attention_heads"),
        number("hidden_size"),
    )
    kv_heads, size = number("num_key_value_heads", heads), number("head_dim", embed // heads)
    length = number("max_position_embeddings", 2048)
    settings.require("hidden_act", "silu", "swish")
    settings.require("layer_types", ["full_attention"] * layers)
    for switch in ("attention_bias", "mlp_bias"):
        settings.require(switch, False)
    for extension in ("sliding_window", "quantization_config"):
        settings.require(extension)
    if heads % kv_heads or size % 2:
        raise DataError(
            f"{settings.path}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}, and head_dim={size} be "
            "even. Get the file again from where the model is."
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


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Llama's names."""
    there = "model.layers.{}."
    table = {
        "embedding": Tensor("model.embed_tokens.weight"),
        "layers.0.attention_norm.scale": Tensor(there + "input_layernorm.weight"),
        "layers.0.mlp_norm.scale": Tensor(there + "post_attention_layernorm.weight"),
        "final_norm.scale": Tensor("model.norm.weight"),
    }
    table |= {
        f"layers.0.attention.{x}.kernel": Tensor(f"{there}self_attn.{x}_proj.weight", 1)
        for x in "qkv"
    }
    table["layers.0.attention.o.kernel"] = Tensor(there + "self_attn.o_proj.weight", 2)
    table |= {
        f"layers.0.mlp.{x}.kernel": Tensor(f"{there}mlp.{x}_proj.weight", 1)
        for x in ("gate", "up", "down")
    }
    if not config.tie_embeddings:
        table["head.kernel"] = Tensor("lm_head.weight", 1)
    return table


LLAMA = Family("LlamaForCausalLM", stack, read_config, tensors)
