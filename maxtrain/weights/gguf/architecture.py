"""Model metadata of a GGUF file: the keys with which llama.cpp computes the same as we do.

llama.cpp has a program of its own for each architecture, which assumes whatever it does not read
from the file. A model that it would compute differently is refused.

Source: llama.cpp, src/models and conversion.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import ModelConfig
from maxtrain.config.sections.model import layer_period, usual_period
from maxtrain.config.words import choices
from maxtrain.models.families import FAMILIES
from maxtrain.models.specs import AttentionSpec, LayerSpec, MoeSpec, RopeSpec, head_dim
from maxtrain.ops.rope import rope_frequencies
from maxtrain.weights.gguf.field import GgufField, Kind

# Names in llama.cpp by our families.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "gemma3": "gemma3",
}
# Type and value of each key.
Values = dict[str, tuple[Kind, int | float | str]]
# The program of llama.cpp that rotates neighbouring numbers of a head; all others rotate numbers
# that are half a head apart. It is also the one that reads factors of rotary frequencies.
TURNS_NEIGHBOURS = "llama"
# A Gemma 3 with this number of layers is taken for the one with 27 billion parameters, which
# divides scores by the root of embed_dim / num_heads.
_GEMMA3_27B_LAYERS = 62


class GgufDescription(NamedTuple):
    """The metadata of a model in its file."""

    architecture: str
    fields: list[GgufField]
    # Notes for the user.
    notes: list[str]


def describe(config: ModelConfig) -> GgufDescription:
    """Return the keys of a model.

    Raises:
        UsageError: llama.cpp has no program for the family, or would compute different results.
    """
    name = architecture_of(config)
    layers = FAMILIES[config.family].spec(config).stack.layers()
    _require_what_is_taken_for_granted(config, layers)
    assert config.vocab_size is not None
    notes = []
    length = config.max_length
    window = config.window
    if name != "gemma3" and window is not None and window < length:
        # For rows that fit in the window, it makes no difference.
        notes.append(
            f"llama.cpp has no windows in models of family {config.family}: the file says that its "
            f"context is {window:,} tokens, the window. Up to there it computes what the model "
            "does."
        )
        length = window
    size = head_dim(config)
    numbers: Values = {
        "vocab_size": ("uint32", config.vocab_size),
        "context_length": ("uint32", length),
        "embedding_length": ("uint32", config.embed_dim),
        "block_count": ("uint32", config.num_layers),
        "feed_forward_length": ("uint32", config.mlp_dim),
        "attention.head_count": ("uint32", config.num_heads),
        "attention.head_count_kv": ("uint32", config.num_kv_heads),
        "attention.key_length": ("uint32", size),
        "attention.value_length": ("uint32", size),
        "attention.layer_norm_rms_epsilon": ("float32", config.norm_eps),
        "rope.dimension_count": ("uint32", size),
        "rope.freq_base": ("float32", config.rope_theta),
    }
    moe = layers[0].mlp
    if isinstance(moe, MoeSpec):
        numbers["expert_count"] = ("uint32", moe.num_experts)
        numbers["expert_used_count"] = ("uint32", moe.num_choices)
        numbers["expert_feed_forward_length"] = ("uint32", moe.width)
        if name == TURNS_NEIGHBOURS:
            # This program reads the width of experts from the key of all feed-forward blocks.
            numbers["feed_forward_length"] = ("uint32", moe.width)
    if name == "gemma3":
        numbers["attention.sliding_window"] = ("uint32", window or length)
        numbers["rope.freq_base_swa"] = ("float32", config.rope.local_theta)
        if config.logit_softcap is not None:
            numbers["final_logit_softcapping"] = ("float32", config.logit_softcap)
    numbers |= _scaling(_rope(layers))
    fields = [GgufField(f"{name}.{key}", kind, value) for key, (kind, value) in numbers.items()]
    return GgufDescription(name, fields, notes)


def architecture_of(config: ModelConfig) -> str:
    """Return llama.cpp's name of the program for a model. Raise UsageError if there is none."""
    if config.family not in ARCHITECTURES:
        known = choices(sorted(ARCHITECTURES))
        raise UsageError(
            f"--format gguf: models of family {config.family} can't be written as GGUF here, only "
            f"those of {known}. Export with --format hf."
        )
    return ARCHITECTURES[config.family]


def frequency_factors(config: ModelConfig) -> list[float] | None:
    """Return the divisor of each rotary frequency, one for each pair of a head, if the file needs a
    tensor of them; None: it does not."""
    rope = _rope(FAMILIES[config.family].spec(config).stack.layers())
    if rope.scaling != "llama3":
        return None
    frequencies = rope_frequencies(rope.head_dim, rope.theta)
    factors = []
    for frequency in frequencies.tolist():
        factors.append(_llama3_factor(2 * math.pi / frequency, rope))
    return factors


def _llama3_factor(wavelength: float, rope: RopeSpec) -> float:
    """Return the factor by which a pair of this wavelength, in tokens, rotates more slowly; see
    `llama3_frequencies`."""
    shortest = rope.original_length / rope.high_freq_factor
    longest = rope.original_length / rope.low_freq_factor
    if wavelength < shortest:
        return 1.0
    if wavelength > longest:
        return rope.factor
    between = rope.original_length / wavelength - rope.low_freq_factor
    smooth = between / (rope.high_freq_factor - rope.low_freq_factor)
    return 1 / ((1 - smooth) / rope.factor + smooth)


def _rope(layers: tuple[LayerSpec, ...]) -> RopeSpec:
    """Return the rotary positions of layers without a window."""
    wide = [layer for layer in layers if layer.window is None] or layers
    rope = wide[-1].rope
    assert rope is not None
    return rope


def _scaling(rope: RopeSpec) -> Values:
    """Return the keys of a scaling of rotary positions that is not a tensor of factors."""
    if rope.scaling in ("none", "llama3"):
        return {}
    values: Values = {
        "rope.scaling.type": ("string", rope.scaling),
        "rope.scaling.factor": ("float32", rope.factor),
    }
    if rope.scaling == "linear":
        return values
    # The file stores it relative to the published factor.
    published = 1 + 0.1 * math.log(rope.factor)
    return values | {
        "rope.scaling.original_context_length": ("uint32", rope.original_length),
        "rope.scaling.yarn_beta_fast": ("float32", rope.beta_fast),
        "rope.scaling.yarn_beta_slow": ("float32", rope.beta_slow),
        "rope.scaling.attn_factor": ("float32", rope.attention_factor / published),
    }


def _require_what_is_taken_for_granted(config: ModelConfig, layers: tuple[LayerSpec, ...]) -> None:
    """Raise UsageError if llama.cpp would compute different results."""
    for what, advice in _differences(config, layers):
        raise UsageError(
            f"--format gguf: llama.cpp's program for {ARCHITECTURES[config.family]} {what}. "
            f"{advice}."
        )


def _differences(config: ModelConfig, layers: tuple[LayerSpec, ...]) -> Iterator[tuple[str, str]]:
    """Yield each difference from llama.cpp's computation, and the advice for it."""
    instead = "Export with --format hf"
    name = ARCHITECTURES[config.family]
    rope = _rope(layers)
    allowed = ["none", "linear", "yarn"]
    if name == TURNS_NEIGHBOURS:
        allowed.append("llama3")
    if rope.scaling not in allowed:
        yield f"has no model.rope_scaling={rope.scaling}", instead
    if rope.scaling == "yarn" and not rope.truncate:
        yield "rounds the bounds of YaRN, which model.rope.truncate=false does not", instead
    experts = [isinstance(layer.mlp, MoeSpec) for layer in layers]
    if any(experts) and not all(experts):
        yield "has experts in all layers, this model in some", instead
    moe = layers[0].mlp
    if isinstance(moe, MoeSpec) and not moe.normalize:
        yield "makes the weights of a token's experts add up to 1, this model does not", instead
    if name == "gemma3":
        if layer_period(config) != usual_period(config.family):
            yield "has a window in five of six layers, this model in others", instead
        mixer = layers[0].mixer
        assert isinstance(mixer, AttentionSpec)
        scale = mixer.head_dim**-0.5
        if config.num_layers == _GEMMA3_27B_LAYERS:
            scale = (config.embed_dim / config.num_heads) ** -0.5
        if not math.isclose(mixer.scale or scale, scale, rel_tol=1e-6):
            yield f"multiplies scores by {scale:.6g}, this model by {mixer.scale:.6g}", instead
        if config.attention_softcap is not None:
            yield "does not bound scores, as model.attention_softcap does", instead
    elif config.logit_softcap is not None:
        yield "does not bound logits, as model.logit_softcap does", instead
