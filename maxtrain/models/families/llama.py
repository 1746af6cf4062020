"""Llama 2, 3, 3.1, 3.2 and whatever shares their blocks. Source: https://arxiv.org/abs/2407.21783."""

from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families.family import Family, Settings, Tensor
from maxtrain.models.layers import BlockChoices

# Frequencies that old files carry along (we compute them), and the copy of a tied head.
IGNORED = r".*\.rotary_emb\.inv_freq|lm_head\.weight"


def read_config(settings: Settings) -> ModelConfig:
    """A ModelConfig of Llama's config.json, with the defaults of Hugging Face for keys that are missing."""
    for name, allowed in {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "mlp_bias": (False,),
        "sliding_window": (),
        "quantization_config": (),
    }.items():
        settings.require(name, *allowed)
    layers, embed, heads = (settings.number(f"{n}") for n in ("num_hidden_layers", "hidden_size", "num_attention_heads"))
    settings.require("layer_types", ["full_attention"] * layers)
    kv_heads, size = settings.number("num_key_value_heads", heads), settings.number("head_dim", embed // heads)
    if heads % kv_heads or size % 2:
        raise DataError(
            f"{settings.path}: num_key_value_heads={kv_heads} must divide num_attention_heads={heads}, and head_dim={size} must be "
            "even. Get the file again from where the model is."
        )
    length = settings.number("max_position_embeddings", 2048)
    return ModelConfig(
        family="llama",
        vocab_size=settings.number("vocab_size"),
        num_layers=layers,
        embed_dim=embed,
        mlp_dim=settings.number("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=size,
        tie_embeddings=bool(settings.values.get("tie_word_embeddings")),
        max_length=length,
        norm_eps=settings.number("rms_norm_eps", 1e-6, float),
        **settings.rope(length),
    )


def tensors(config: ModelConfig) -> dict[str, Tensor]:
    """Llama's names."""
    layer = "model.layers.{}."
    table = {
        "embedding": Tensor("model.embed_tokens.weight"),
        "layers.attention_norm.scale": Tensor(layer + "input_layernorm.weight"),
        "layers.attention.q": Tensor(layer + "self_attn.q_proj.weight", inputs=1),
        "layers.attention.k": Tensor(layer + "self_attn.k_proj.weight", inputs=1),
        "layers.attention.v": Tensor(layer + "self_attn.v_proj.weight", inputs=1),
        "layers.attention.o": Tensor(layer + "self_attn.o_proj.weight", inputs=2),
        "layers.mlp_norm.scale": Tensor(layer + "post_attention_layernorm.weight"),
        "layers.mlp.gate": Tensor(layer + "mlp.gate_proj.weight", inputs=1),
        "layers.mlp.up": Tensor(layer + "mlp.up_proj.weight", inputs=1),
        "layers.mlp.down": Tensor(layer + "mlp.down_proj.weight", inputs=1),
        "final_norm.scale": Tensor("model.norm.weight"),
    }
    return table if config.tie_embeddings else table | {"head": Tensor("lm_head.weight", inputs=1)}


LLAMA = Family("LlamaForCausalLM", BlockChoices(), read_config, tensors, IGNORED)
