"""OLMo 2: Llama with its norms after the blocks, and with norms over all queries and all keys.

Source: https://arxiv.org/abs/2501.00656.
"""

import dataclasses
from typing import Any

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, HfConfig
from maxtrain.models.families.tables import decoder_table
from maxtrain.models.hf_mapping import ParamMapping
from maxtrain.models.specs import DecoderSpec, head_dim

NORMS = {
    "attention_out_norm": "post_attention_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}


def spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of OLMo 2: Llama with other norms."""
    norms = ("attention_out", "mlp_out", "all_queries", "all_keys")
    layer = dataclasses.replace(llama.layer(config), norms=norms)
    return llama.of_equal_layers(config, layer)


def read_config(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of OLMo 2."""
    settings.require("layer_types", ["full_attention"] * settings.number("num_hidden_layers"))
    return llama.read_decoder(settings.with_defaults(rms_norm_eps=1e-5))


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of OLMo 2 for this ModelConfig."""
    values = {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": False,
    }
    if head_dim(config) * config.num_heads != config.embed_dim:
        # transformers assumes this value otherwise.
        values["head_dim"] = head_dim(config)
    return llama.write_decoder(config) | values


def table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of OLMo 2 to a Hugging Face checkpoint."""
    return decoder_table(spec(config), config.tie_embeddings, NORMS)


_7B = ModelConfig(
    family="olmo2",
    vocab_size=100_352,
    num_layers=32,
    embed_dim=4096,
    mlp_dim=11_008,
    num_heads=32,
    num_kv_heads=32,
    max_length=4096,
    norm_eps=1e-6,
    rope_theta=500_000.0,
)
PRESETS = {
    "olmo2_1b": dataclasses.replace(
        _7B, num_layers=16, embed_dim=2048, mlp_dim=8192, num_heads=16, num_kv_heads=16
    ),
    "olmo2_7b": _7B,
    "olmo2_13b": dataclasses.replace(
        _7B, num_layers=40, embed_dim=5120, mlp_dim=13_824, num_heads=40, num_kv_heads=40
    ),
    "olmo2_32b": dataclasses.replace(
        _7B, num_layers=64, embed_dim=5120, mlp_dim=27_648, num_heads=40, num_kv_heads=8
    ),
}

OLMO2 = Family("Olmo2ForCausalLM", spec, read_config, write_config, table, presets=PRESETS)
