"""Gemma 2 and 3: Llama with more norms, GELU, scaled embeddings, and alternating layers with and
without a window; Gemma 2 bounds scores and logits, Gemma 3 normalises query and key heads.

Sources: https://arxiv.org/abs/2408.00118; https://arxiv.org/abs/2503.19786.
"""

import dataclasses
import math
from typing import Any

from data_pipeline.base.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.config.sections.model import (
    FULL_ATTENTION,
    SLIDING_ATTENTION,
    LayerType,
    usual_period,
)
from maxtrain.models.families import llama
from maxtrain.models.families.family import Family, HfConfig, plain_number
from maxtrain.models.families.layer_types import (
    AGAIN,
    layer_types,
    read_window,
    windowed_stack,
)
from maxtrain.models.families.tables import decoder_table
from maxtrain.models.hf_mapping import ParamMapping
from maxtrain.models.specs import (
    AttentionSpec,
    DecoderSpec,
    LayerSpec,
    MlpSpec,
    NormSpec,
    head_dim,
)

NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
# One in this many layers sees all tokens, unless config.json says otherwise.
_PERIOD_OF_GEMMA3 = len(usual_period("gemma3"))
# Prefixes of the names of Gemma 3's text part in a model that processes images, and in one for
# text.
_TEXT_PARTS = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = {
    "vision tower": r"(model\.)?vision_tower\..*",
    "projector of pictures": r"(model\.)?multi_modal_projector\..*",
}


def gemma2_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Gemma 2."""
    wide = _layer(config)
    narrow = dataclasses.replace(wide, window=config.window)
    return _spec(config, narrow, wide)


def gemma3_spec(config: ModelConfig) -> DecoderSpec:
    """Return the specification of Gemma 3."""
    layer = _layer(config)
    wide = dataclasses.replace(layer, norms=(*layer.norms, "query", "key"))
    rope = llama.rope(config, theta=config.rope.local_theta, scaling="none")
    narrow = dataclasses.replace(wide, window=config.window, rope=rope)
    return _spec(config, narrow, wide)


def _layer(config: ModelConfig) -> LayerSpec:
    """Return the layer without a window."""
    scalar = config.query_pre_attn_scalar or head_dim(config)
    mixer = AttentionSpec(
        config.num_heads,
        config.num_kv_heads,
        head_dim(config),
        scale=scalar**-0.5,
        softcap=config.attention_softcap,
    )
    return LayerSpec(
        mixer=mixer,
        mlp=MlpSpec(config.mlp_dim, "gelu_tanh"),
        rope=llama.rope(config),
        norms=("attention", "attention_out", "mlp", "mlp_out"),
        norm=NormSpec(config.norm_eps, offset=1.0),
    )


def _spec(config: ModelConfig, narrow: LayerSpec, wide: LayerSpec) -> DecoderSpec:
    """Return a decoder of alternating layers with and without a window."""
    return DecoderSpec(
        windowed_stack(config, narrow, wide),
        wide.norm,
        embedding_scale=math.sqrt(config.embed_dim),
        logit_softcap=config.logit_softcap,
    )


def read_gemma2(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Gemma 2."""
    settings = settings.where_missing(num_key_value_heads=4)
    settings = settings.with_defaults(max_position_embeddings=8192)
    caps = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    return _read(settings, "gemma2", caps)


def read_gemma3(settings: HfConfig) -> ModelConfig:
    """Read the ModelConfig from the config.json of Gemma 3, of a text model or of the text part of
    a model.

    Models that process images leave out the keys that have the default of transformers.
    """
    settings = settings.where_missing(num_key_value_heads=4)
    settings = settings.with_defaults(
        vocab_size=262_208,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        max_position_embeddings=131_072,
    )
    everywhere, nearby = _two_ropes(settings)
    theta = nearby.rope(1)
    if theta["rope_scaling"] != "none":
        raise DataError(
            f"{settings.path}: rope_parameters of layers with a window must be of type 'default', "
            f"not {theta['rope_scaling']!r}. Choose a model with these."
        )
    config = _read(everywhere, "gemma3", {}, _usual_of_gemma3(settings))
    rope = dataclasses.replace(config.rope, local_theta=theta["rope_theta"])
    return dataclasses.replace(config, rope=rope)


def _usual_of_gemma3(settings: HfConfig) -> list[LayerType]:
    """Return the kind of each layer by `sliding_window_pattern` = N: every Nth layer sees all
    tokens. Of the two spellings, transformers reads this one."""
    every = settings.number("sliding_window_pattern", _PERIOD_OF_GEMMA3)
    other = settings.number("_sliding_window_pattern", every)
    if other != every and settings.values.get("layer_types") is None:
        raise DataError(
            f"{settings.path}: _sliding_window_pattern={other} must be "
            f"sliding_window_pattern={every} without layer_types. {AGAIN}"
        )
    kinds = []
    for number in range(1, settings.number("num_hidden_layers") + 1):
        kind = SLIDING_ATTENTION
        if number % every == 0:
            kind = FULL_ATTENTION
        kinds.append(kind)
    return kinds


def _two_ropes(settings: HfConfig) -> tuple[HfConfig, HfConfig]:
    """Return the settings for layers without a window and those for layers with one."""
    values = dict(settings.values)
    both = values.pop("rope_parameters", None)
    scaling = values.pop("rope_scaling", None)
    # The keys of older versions of transformers.
    everywhere = {"rope_theta": values.pop("rope_theta", None)}
    nearby = {"rope_theta": values.pop("rope_local_base_freq", None)}
    if isinstance(both, dict) and isinstance(both.get(FULL_ATTENTION), dict):
        everywhere |= both[FULL_ATTENTION]
        if isinstance(both.get(SLIDING_ATTENTION), dict):
            nearby |= both[SLIDING_ATTENTION]
    if isinstance(scaling, dict):
        # It counts in addition to the others.
        everywhere |= scaling
    if everywhere.get("rope_theta") is None:
        everywhere = everywhere | {"rope_theta": 1_000_000.0}
    if nearby.get("rope_theta") is None:
        nearby = nearby | {"rope_theta": 10_000.0}
    return (
        dataclasses.replace(settings, values=values | {"rope_parameters": everywhere}),
        dataclasses.replace(settings, values=values | {"rope_parameters": nearby}),
    )


def _read(
    settings: HfConfig, family: str, caps: dict[str, float], usual: list[LayerType] | None = None
) -> ModelConfig:
    """Read the keys that both families share.

    Args:
        settings: settings of config.json.
        family: `gemma2` or `gemma3`.
        caps: defaults of the bounds, which may be null.
        usual: as in `read_window`.
    """
    settings.require("hidden_activation", "gelu_pytorch_tanh")
    settings.require("use_bidirectional_attention", False)
    window = settings.number_or_null("sliding_window", 4096)
    # The remaining keys are those of all families; `hidden_act` is another key for the activation.
    values = {key: value for key, value in settings.values.items() if key != "hidden_act"}
    values.setdefault("tie_word_embeddings", True)
    plain = dataclasses.replace(settings, values=values).with_defaults(head_dim=256)
    return llama.read_decoder(
        plain,
        **read_window(settings, family, window, usual),
        query_pre_attn_scalar=settings.number("query_pre_attn_scalar", 256.0, float),
        attention_softcap=_cap(settings, "attn_logit_softcapping", caps),
        logit_softcap=_cap(settings, "final_logit_softcapping", caps),
    )


def _cap(settings: HfConfig, name: str, caps: dict[str, float]) -> float | None:
    return settings.number_or_null(name, caps.get(name), float)


def _write(config: ModelConfig) -> dict[str, Any]:
    values = llama.write_decoder(config)
    del values["hidden_act"]
    scalar = config.query_pre_attn_scalar or head_dim(config)
    return values | {
        "attention_bias": False,
        "attn_logit_softcapping": config.attention_softcap,
        "final_logit_softcapping": config.logit_softcap,
        "head_dim": head_dim(config),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": layer_types(config),
        "query_pre_attn_scalar": plain_number(scalar),
        "sliding_window": config.window,
    }


def write_gemma2(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Gemma 2 for this ModelConfig."""
    values = _write(config)
    if config.window is None:
        values["layer_types"] = [FULL_ATTENTION] * config.num_layers
    return values | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "use_bidirectional_attention": None,
    }


def write_gemma3(config: ModelConfig) -> dict[str, Any]:
    """Return the config.json of Gemma 3 for this ModelConfig."""
    values = _write(config)
    if not config.layer_types:
        # Both spellings of the period.
        values["_sliding_window_pattern"] = _PERIOD_OF_GEMMA3
        values["sliding_window_pattern"] = _PERIOD_OF_GEMMA3
    nearby = {"rope_theta": config.rope.local_theta, "rope_type": "default"}
    both = {FULL_ATTENTION: values["rope_parameters"], SLIDING_ATTENTION: nearby}
    return values | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        # Both spellings of the base of layers with a window.
        "rope_parameters": both,
        "rope_local_base_freq": config.rope.local_theta,
        "use_bidirectional_attention": False,
    }


def renamed_gemma3(name: str) -> str:
    """Return the name in a text model of a tensor of the text part, which transformers 4 and 5
    prefix differently."""
    for before, after in _TEXT_PARTS.items():
        if name.startswith(before):
            return after + name.removeprefix(before)
    return name


def gemma2_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Gemma 2 to a Hugging Face checkpoint."""
    return decoder_table(gemma2_spec(config), config.tie_embeddings, NORMS)


def gemma3_table(config: ModelConfig) -> list[ParamMapping]:
    """Return the mapping of the parameters of Gemma 3 to a Hugging Face checkpoint."""
    return decoder_table(gemma3_spec(config), config.tie_embeddings, NORMS)


_2_2B = ModelConfig(
    family="gemma2",
    vocab_size=256_000,
    num_layers=26,
    embed_dim=2304,
    mlp_dim=9216,
    num_heads=8,
    num_kv_heads=4,
    head_dim=256,
    tie_embeddings=True,
    max_length=8192,
    norm_eps=1e-6,
    window=4096,
    query_pre_attn_scalar=256.0,
    attention_softcap=50.0,
    logit_softcap=30.0,
    rope_theta=10_000.0,
)
GEMMA2_PRESETS = {
    "gemma2_2b": _2_2B,
    "gemma2_9b": dataclasses.replace(
        _2_2B, num_layers=42, embed_dim=3584, mlp_dim=14_336, num_heads=16, num_kv_heads=8
    ),
    "gemma2_27b": dataclasses.replace(
        _2_2B,
        num_layers=46,
        embed_dim=4608,
        mlp_dim=36_864,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        query_pre_attn_scalar=144.0,
    ),
}
_3_1B = ModelConfig(
    family="gemma3",
    vocab_size=262_144,
    num_layers=26,
    embed_dim=1152,
    mlp_dim=6912,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    tie_embeddings=True,
    max_length=32_768,
    norm_eps=1e-6,
    window=512,
    query_pre_attn_scalar=256.0,
    rope_theta=1_000_000.0,
)
# The text parts of models that process images.
_3_4B = dataclasses.replace(
    _3_1B,
    vocab_size=262_208,
    num_layers=34,
    embed_dim=2560,
    mlp_dim=10_240,
    num_heads=8,
    num_kv_heads=4,
    max_length=131_072,
    window=1024,
    rope_scaling="linear",
    rope_factor=8.0,
)
GEMMA3_PRESETS = {
    "gemma3_270m": dataclasses.replace(_3_1B, num_layers=18, embed_dim=640, mlp_dim=2048),
    "gemma3_1b": _3_1B,
    "gemma3_4b": _3_4B,
    "gemma3_12b": dataclasses.replace(
        _3_4B, num_layers=48, embed_dim=3840, mlp_dim=15_360, num_heads=16, num_kv_heads=8
    ),
    "gemma3_27b": dataclasses.replace(
        _3_4B,
        num_layers=62,
        embed_dim=5376,
        mlp_dim=21_504,
        num_heads=32,
        num_kv_heads=16,
        head_dim=128,
        query_pre_attn_scalar=168.0,
    ),
}

GEMMA2 = Family(
    "Gemma2ForCausalLM",
    gemma2_spec,
    read_gemma2,
    write_gemma2,
    gemma2_table,
    presets=GEMMA2_PRESETS,
)
GEMMA3 = Family(
    "Gemma3ForCausalLM",
    gemma3_spec,
    read_gemma3,
    write_gemma3,
    gemma3_table,
    renamed=renamed_gemma3,
    presets=GEMMA3_PRESETS,
    text_part_of="Gemma3ForConditionalGeneration",
    other_parts=_OTHER_PARTS,
    scored="Gemma3TextForSequenceClassification",
)
