"""GPT-2: learned positions, LayerNorm, GELU, biases everywhere, and a head that is the embedding.

Source: Radford et al. 2019, Language models are unsupervised multitask learners.
"""

import dataclasses
import re
from typing import Any

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families.family import Family, HfConfig
from maxtrain.models.families.tables import LayerGroup, places
from maxtrain.models.hf_mapping import Flatten, Join, ParamMapping, Ravel, Transpose
from maxtrain.models.specs import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    StackSpec,
    head_dim,
)

# Files that are older than the class with a head have no prefix.
_PREFIX = "transformer."
# Masks, which old files contain, and the head, which is a copy of the embedding.
_IGNORED = r".*\.attn\.(masked_)?bias|lm_head\.weight"


def spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of GPT-2."""
    norm = NormSpec(config.norm_eps, "layer")
    layer = LayerSpec(
        mixer=AttentionSpec(config.num_heads, config.num_kv_heads, head_dim(config)),
        mlp=MlpSpec(config.mlp_dim, "gelu_tanh", gated=False),
        norm=norm,
        biases=("q", "k", "v", "o", "up", "down"),
    )
    stack = StackSpec(period=(layer,), repeats=config.num_layers)
    return DecoderSpec(stack, norm, learned_positions=config.max_length)


def read_config(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of GPT-2, with Hugging Face's defaults for missing
    keys."""
    number = settings.number
    heads = number("n_head", 12)
    embed = number("n_embd", 768)
    settings.require("activation_function", "gelu_new", "gelu_pytorch_tanh")
    settings.require("scale_attn_weights", True)
    settings.require("scale_attn_by_inverse_layer_idx", False)
    settings.require("add_cross_attention", False)
    settings.require("quantization_config")
    settings.require_heads(heads, heads, embed // heads)
    return ModelConfig(
        vocab_size=number("vocab_size", 50_257),
        num_layers=number("n_layer", 12),
        embed_dim=embed,
        mlp_dim=number("n_inner", 4 * embed),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=embed // heads,
        tie_embeddings=settings.tied(True),
        max_length=number("n_positions", 1024),
        norm_eps=number("layer_norm_epsilon", 1e-5, float),
    )


def write_config(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of GPT-2 for this ModelConfig."""
    units = config.mlp_dim
    if units == 4 * config.embed_dim:
        units = None
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "activation_function": "gelu_new",
        "add_cross_attention": False,
        "attn_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "initializer_range": 0.02,
        "layer_norm_epsilon": config.norm_eps,
        "n_embd": config.embed_dim,
        "n_head": config.num_heads,
        "n_inner": units,
        "n_layer": config.num_layers,
        "n_positions": config.max_length,
        "reorder_and_upcast_attn": False,
        "resid_pdrop": 0.0,
        "scale_attn_by_inverse_layer_idx": False,
        "scale_attn_weights": True,
        "tie_word_embeddings": config.tie_embeddings,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of GPT-2 to a Hugging Face checkpoint.

    Matrices are [inputs, outputs] there, too, and queries, keys and values are one tensor.
    """
    decoder = spec(config)
    entries = [
        ParamMapping(("embedding",), (f"{_PREFIX}wte.weight",)),
        ParamMapping(("position_embedding",), (f"{_PREFIX}wpe.weight",)),
    ]
    for place in places(decoder.stack):
        theirs = f"{_PREFIX}h.{place.number}"
        entries += _norm(place, "attention_norm", f"{theirs}.ln_1")
        entries += _joined(place, f"{theirs}.attn.c_attn")
        entries += _linear(place, "attention.o", f"{theirs}.attn.c_proj", 2)
        entries += _norm(place, "mlp_norm", f"{theirs}.ln_2")
        entries += _linear(place, "mlp.up", f"{theirs}.mlp.c_fc", 1)
        entries += _linear(place, "mlp.down", f"{theirs}.mlp.c_proj", 1)
    entries.append(ParamMapping(("final_norm.scale",), (f"{_PREFIX}ln_f.weight",)))
    entries.append(ParamMapping(("final_norm.bias",), (f"{_PREFIX}ln_f.bias",)))
    if not config.tie_embeddings:
        entries.append(
            ParamMapping(("head.kernel",), ("lm_head.weight",), (Flatten(1), Transpose()))
        )
    return entries


def _norm(place: LayerGroup, ours: str, theirs: str) -> list[ParamMapping]:
    return [
        ParamMapping((f"{place.ours}.{ours}.scale",), (f"{theirs}.weight",), place.steps),
        ParamMapping((f"{place.ours}.{ours}.bias",), (f"{theirs}.bias",), place.steps),
    ]


def _linear(place: LayerGroup, ours: str, theirs: str, inputs: int) -> list[ParamMapping]:
    kernel = (*place.steps, Flatten(inputs))
    bias = (*place.steps, Ravel())
    return [
        ParamMapping((f"{place.ours}.{ours}.kernel",), (f"{theirs}.weight",), kernel),
        ParamMapping((f"{place.ours}.{ours}.bias",), (f"{theirs}.bias",), bias),
    ]


def _joined(place: LayerGroup, theirs: str) -> list[ParamMapping]:
    """Return the entries of queries, keys and values, which are concatenated along their heads."""
    mixer = place.layer.mixer
    heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads)
    kernels = tuple(f"{place.ours}.attention.{name}.kernel" for name in "qkv")
    biases = tuple(f"{place.ours}.attention.{name}.bias" for name in "qkv")
    # A stack of layers has one more dim in front of those of a layer.
    stacked = len(place.steps)
    return [
        ParamMapping(
            kernels, (f"{theirs}.weight",), (Join(stacked + 1, heads), *place.steps, Flatten(1))
        ),
        ParamMapping(biases, (f"{theirs}.bias",), (Join(stacked, heads), *place.steps, Ravel())),
    ]


def _with_prefix(name: str) -> str:
    if re.match(r"(wte|wpe|h|ln_f)\.", name):
        return _PREFIX + name
    return name


_SMALL = ModelConfig(
    family="gpt2",
    vocab_size=50_257,
    num_layers=12,
    embed_dim=768,
    mlp_dim=3072,
    num_heads=12,
    num_kv_heads=12,
    tie_embeddings=True,
    max_length=1024,
    norm_eps=1e-5,
)


def _of_size(num_layers: int, embed_dim: int, num_heads: int) -> ModelConfig:
    return dataclasses.replace(
        _SMALL,
        num_layers=num_layers,
        embed_dim=embed_dim,
        mlp_dim=4 * embed_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
    )


PRESETS = {
    "gpt2": _SMALL,
    "gpt2_medium": _of_size(24, 1024, 16),
    "gpt2_large": _of_size(36, 1280, 20),
    "gpt2_xl": _of_size(48, 1600, 25),
}

GPT2 = Family(
    "GPT2LMHeadModel",
    spec,
    read_config,
    write_config,
    table,
    _IGNORED,
    _with_prefix,
    PRESETS,
    learns_positions=True,
)
