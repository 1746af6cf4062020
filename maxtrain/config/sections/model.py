"""The section `model`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AllBut, UsedBy, key
from maxtrain.config.sections.lora import LoraConfig
from maxtrain.config.sections.moe import DEEPSEEK, OF_DEEPSEEK, MoeConfig, RoutingConfig
from maxtrain.config.sections.pipeline import PipelineConfig
from maxtrain.config.sections.remat_names import KeptConfig
from maxtrain.config.words import divisors, multiples, nearest, show

# The kinds of layers, as config.json at Hugging Face calls them: with model.window, and without.
LayerType = Literal["sliding_attention", "full_attention"]
SLIDING_ATTENTION: LayerType = "sliding_attention"
FULL_ATTENTION: LayerType = "full_attention"
# The kinds of layers that take turns in a family; in others, all layers are alike.
_PERIODS: dict[str, tuple[LayerType, ...]] = {
    "gemma2": (SLIDING_ATTENTION, FULL_ATTENTION),
    "gemma3": (
        SLIDING_ATTENTION,
        SLIDING_ATTENTION,
        SLIDING_ATTENTION,
        SLIDING_ATTENTION,
        SLIDING_ATTENTION,
        FULL_ATTENTION,
    ),
    "gpt_oss": (SLIDING_ATTENTION, FULL_ATTENTION),
}
MAX_LAYERS = 10_000
_ALTERNATING = ("mistral", "qwen2", "qwen2_moe", "qwen3", "gemma2", "gemma3", "gpt_oss")
_LOCAL = UsedBy({"model.family": (*_ALTERNATING, "mixtral", "qwen3_moe")})
_GEMMA = UsedBy({"model.family": ("gemma2", "gemma3")})
_TURNED = UsedBy(
    {"model.family": AllBut("gpt2")},
    "{key}={value} is not used with {cause}, whose positions are learned. "
    "Set {key}={default}, or leave it out.",
)
# Of the wavelength of one pair.
_MIN_STRETCH = 1e-6
_MAX_STRETCH = 1e6


def _read_by(*scalings: str) -> UsedBy:
    """What reads a key of some rope scalings."""
    return UsedBy(
        {"model.rope_scaling": scalings},
        "{key}={value} is not used with {cause}. Set {reader}={values}, or leave it out.",
    )


# From these the attention factor is computed where it is not set.
_WITHOUT_ATTENTION_FACTOR = UsedBy(
    {"model.rope.attention_factor": (None,)},
    "{key}={value} is not used with {cause}: it is there to compute that. "
    "Set {reader}=null, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """What single rope scalings, or families, read."""

    local_theta: float = key(
        10_000.0,
        "base of the rotary frequencies in layers with a window",
        low=1,
        high=1e15,
        used_by=UsedBy({"model.family": ("gemma3",)}),
    )
    beta_fast: float = key(
        32.0,
        "pairs with more turns in the original length are not stretched",
        above=0,
        high=1e6,
        used_by=_read_by("yarn"),
    )
    beta_slow: float = key(
        1.0,
        "pairs with fewer turns in the original length are stretched fully",
        above=0,
        high=1e6,
        used_by=_read_by("yarn"),
    )
    truncate: bool = key(
        True,
        "begin and end the blend between these two at whole pairs",
        used_by=_read_by("yarn"),
    )
    attention_factor: float | None = key(
        None,
        "what cos and sin are multiplied by; null: from model.rope_factor, as published",
        above=0,
        high=1e6,
        used_by=_read_by("yarn", "longrope"),
    )
    mscale: float | None = key(
        None,
        "factor of the logarithm in the attention factor's numerator; null: plain YaRN",
        above=0,
        high=1e6,
        used_by=(_read_by("yarn"), _WITHOUT_ATTENTION_FACTOR),
    )
    mscale_all_dim: float | None = key(
        None,
        "factor of the logarithm in the attention factor's denominator; null: plain YaRN",
        above=0,
        high=1e6,
        used_by=(_read_by("yarn"), _WITHOUT_ATTENTION_FACTOR),
    )
    short_factors: tuple[float, ...] = key(
        (),
        "stretch of each pair in rows up to the original length, head_dim / 2 numbers",
        used_by=_read_by("longrope"),
    )
    long_factors: tuple[float, ...] = key(
        (),
        "stretch of each pair in longer rows, head_dim / 2 numbers",
        used_by=_read_by("longrope"),
    )


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Attention over latents. The last rope_dim numbers of a head of queries and keys are rotated;
    model.head_dim counts all of them."""

    query_rank: int | None = key(
        None,
        "numbers that queries are made of; null: the token itself",
        low=1,
        high=1 << 20,
        used_by=OF_DEEPSEEK,
    )
    kv_rank: int = key(
        512,
        "numbers of a token's latent, which keys and values are made of",
        low=1,
        high=1 << 20,
        used_by=OF_DEEPSEEK,
    )
    rope_dim: int = key(
        64, "numbers of a head that are rotated", low=2, high=1 << 14, used_by=OF_DEEPSEEK
    )
    value_dim: int = key(
        128, "numbers of a head's values", low=1, high=1 << 14, used_by=OF_DEEPSEEK
    )
    interleaved: bool = key(
        True,
        "rotate neighbouring numbers against each other, instead of the two halves",
        used_by=UsedBy({"model.family": ("deepseek_v3",)}),
    )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. Letters in shapes: D embed, F mlp, N heads, K kv heads, H head dim, L
    layers, V vocabulary."""

    family: Literal[
        "llama",
        "mistral",
        "mixtral",
        "qwen2",
        "qwen2_moe",
        "qwen3",
        "qwen3_moe",
        "olmo2",
        "gemma2",
        "gemma3",
        "deepseek_v2",
        "deepseek_v3",
        "gpt_oss",
        "gpt2",
    ] = key("llama", "the kind of layers, and the names at Hugging Face")
    vocab_size: int | None = key(
        None, "V; null: the vocabulary of the training data's tokenizer", low=1
    )
    num_layers: int = key(4, "L", low=1, high=MAX_LAYERS)
    embed_dim: int = key(256, "D, model width", low=1, high=1 << 20)
    mlp_dim: int = key(704, "F, feed-forward width", low=1, high=1 << 22)
    num_heads: int = key(4, "N, query heads", low=1, high=1 << 14)
    num_kv_heads: int = key(4, "K, key/value heads; must divide num_heads", low=1, high=1 << 14)
    head_dim: int | None = key(None, "H; null: embed_dim / num_heads", low=2, high=1 << 14)
    tie_embeddings: bool = key(False, "use the embedding table as the output head")
    max_length: int = key(8192, "longest sequence that the model is meant for, tokens", low=1)
    norm_eps: float = key(
        1e-5, "added to the mean square, or to the variance, in norms", low=1e-12, high=1
    )
    window: int | None = key(
        None,
        "tokens that a query sees in layers with a window, its own the last; null: all",
        low=1,
        used_by=_LOCAL,
    )
    layer_types: tuple[LayerType, ...] = key(
        (),
        "kinds of layers, repeated: sliding_attention has the window, full_attention has none; "
        "empty: those of the family",
        used_by=UsedBy({"model.family": _ALTERNATING}),
    )
    query_pre_attn_scalar: float | None = key(
        None,
        "scores are divided by its root; null: head_dim",
        above=0,
        high=1e6,
        used_by=_GEMMA,
    )
    attention_softcap: float | None = key(
        None,
        "bound of attention's scores, by tanh; null: none",
        above=0,
        high=1e6,
        used_by=_GEMMA,
    )
    logit_softcap: float | None = key(
        None, "bound of the logits, by tanh; null: none", above=0, high=1e6, used_by=_GEMMA
    )
    rope_theta: float = key(
        500_000.0, "base of the rotary frequencies", low=1, high=1e15, used_by=_TURNED
    )
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = key(
        "none", "how the rotary frequencies are stretched for long contexts", used_by=_TURNED
    )
    rope_factor: float = key(
        8.0,
        "rope scaling: stretch of wavelengths; of longrope, of the context",
        low=1,
        high=1e6,
        used_by=_read_by("llama3", "linear", "dynamic", "yarn", "longrope"),
    )
    rope_low_freq_factor: float = key(
        1.0,
        "rope scaling: below this many turns, stretch fully",
        above=0,
        high=1e6,
        used_by=_read_by("llama3"),
    )
    rope_high_freq_factor: float = key(
        4.0,
        "rope scaling: above this many turns, do not stretch",
        above=0,
        high=1e6,
        used_by=_read_by("llama3"),
    )
    rope_original_length: int = key(
        8192,
        "rope scaling: context of the unstretched model, tokens",
        low=1,
        used_by=_read_by("llama3", "dynamic", "yarn", "longrope"),
    )
    rope: RopeConfig = key(RopeConfig(), "what single rope scalings read")
    latent: LatentConfig = key(LatentConfig(), "attention over latents")
    moe: MoeConfig = key(MoeConfig(), "experts of feed-forward blocks, as the weights have them")
    routing: RoutingConfig = key(
        RoutingConfig(), "how experts are kept busy, and how their products are made"
    )
    score: bool = key(
        False,
        "a score of texts in the place of logits: a reward model",
        used_by=UsedBy(
            {"objective": ("reward",)},
            "{key}={value} is not used with {cause}. Set objective=reward, or leave it out.",
        ),
    )
    value: bool = key(
        False,
        "a value of each token beside logits, from zero weights",
        used_by=UsedBy(
            {"objective": ("ppo",)},
            "{key}={value} is not used with {cause}. Set objective=ppo, or leave it out.",
        ),
    )
    lora: LoraConfig = key(LoraConfig(), "low-rank adapters, which train in the place of weights")
    attention: Literal["auto", "eager", "xla", "cudnn", "triton", "mosaic", "flash", "ring"] = key(
        "auto",
        "kernel: slow reference, XLA's blocks, three for GPUs, for TPUs, or for mesh.context; "
        "auto: the one that suits the run",
    )
    scan_layers: bool = key(
        True, "run layers as one scanned loop (fast compile) or unrolled (fast step)"
    )
    remat: Literal["none", "full", "dots", "dots_no_batch", "named"] = key(
        "none", "what the backward pass computes again; see models/remat.py"
    )
    kept: KeptConfig = key(KeptConfig(), "what it finds stored with model.remat=named")
    pipeline: PipelineConfig = key(PipelineConfig(), "rows on their way through mesh.stage")
    loss_chunk: int = key(
        2048, "tokens per device whose logits are in memory at one time; 0: all at once", low=0
    )


def usual_period(family: str) -> tuple[LayerType, ...]:
    """The kinds of layers that take turns in a family, or the one kind of all its layers."""
    return _PERIODS.get(family, (SLIDING_ATTENTION,))


def layer_period(model: ModelConfig) -> tuple[LayerType, ...]:
    """The kinds of layers that take turns in a model. Without model.window, the two kinds are
    alike but for the rotary positions of Gemma 3."""
    return model.layer_types or usual_period(model.family)


def layer_type_problems(model: ModelConfig) -> Iterator[str]:
    """Kinds of layers that do not fit the model."""
    count = len(model.layer_types)
    if count > model.num_layers:
        yield (
            f"model.layer_types has {count:,} entries, and must have at most "
            f"model.num_layers={model.num_layers:,}. Leave out the last ones."
        )
    has_window = SLIDING_ATTENTION in model.layer_types
    if has_window and model.window is None and model.family != "gemma3":
        yield (
            "model.layer_types has sliding_attention, but model.window=null is no window. "
            "Set model.window=4096, for example, or leave model.layer_types out."
        )


def heads_problems(model: ModelConfig) -> Iterator[str]:
    """Numbers of heads, or sizes of heads, that do not fit together."""
    heads = f"model.num_heads={model.num_heads}"
    if model.num_heads % model.num_kv_heads:
        valid = nearest(model.num_kv_heads, divisors(model.num_heads))
        yield (
            f"model.num_kv_heads={model.num_kv_heads} must divide {heads}. "
            f"Set model.num_kv_heads to {valid}."
        )
    if model.head_dim is None and model.embed_dim % (2 * model.num_heads):
        valid = multiples(model.embed_dim, 2 * model.num_heads)
        yield (
            f"model.embed_dim={model.embed_dim} must be an even multiple of {heads} "
            f"(rotary pairs). Set model.embed_dim to {valid}, or model.head_dim."
        )
    if model.family == "gpt2" and model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads={model.num_kv_heads} must be {heads} with model.family=gpt2, "
            f"which has no groups of queries. Set model.num_kv_heads={model.num_heads}."
        )
    if model.family in DEEPSEEK:
        yield from _latent_problems(model)
    if model.family == "qwen2_moe" and not model.moe.shared_dim:
        width = model.moe.expert_dim or model.mlp_dim
        yield (
            "model.moe.shared_dim=0 must be at least 1 with model.family=qwen2_moe, whose layers "
            f"all have an expert that all tokens go to. Set model.moe.shared_dim={width}."
        )
    size = model.head_dim or model.embed_dim // model.num_heads
    if model.family == "gpt2" and size * model.num_heads != model.embed_dim:
        yield (
            f"model.head_dim={size} times {heads} must be model.embed_dim={model.embed_dim} with "
            "model.family=gpt2. Set model.head_dim=null."
        )
    if model.head_dim is not None and model.head_dim % 2:
        valid = multiples(model.head_dim, 2)
        yield (
            f"model.head_dim={model.head_dim} must be even (rotary pairs). "
            f"Set model.head_dim to {valid}."
        )


def _latent_problems(model: ModelConfig) -> Iterator[str]:
    """Heads of attention over latents that are not of one kind, or have no part to rotate."""
    if model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads={model.num_kv_heads} must be model.num_heads={model.num_heads} "
            f"with model.family={model.family}, whose heads have their own keys. "
            f"Set model.num_kv_heads={model.num_heads}."
        )
    rope_dim = model.latent.rope_dim
    if model.head_dim is None or model.head_dim <= rope_dim:
        yield (
            f"model.head_dim={show(model.head_dim)} must be more than "
            f"model.latent.rope_dim={rope_dim}, the part of a head that is rotated. "
            f"Set model.head_dim={3 * rope_dim}, for example."
        )
    if rope_dim % 2:
        yield (
            f"model.latent.rope_dim={rope_dim} must be even (rotary pairs). "
            f"Set model.latent.rope_dim={rope_dim + 1}."
        )


def rotated_dim(model: ModelConfig) -> int:
    """How many numbers of a head rotary positions turn."""
    if model.family in DEEPSEEK:
        return model.latent.rope_dim
    return model.head_dim or model.embed_dim // model.num_heads


def rope_problems(model: ModelConfig) -> Iterator[str]:
    """Numbers of a rope scaling that do not fit together."""
    if model.rope_scaling == "yarn":
        yield from _yarn_problems(model)
    if model.rope_scaling == "longrope":
        yield from _longrope_problems(model)


def _yarn_problems(model: ModelConfig) -> Iterator[str]:
    rope = model.rope
    if model.rope_theta <= 1:
        yield (
            f"model.rope_theta={model.rope_theta} must be more than 1 with "
            "model.rope_scaling=yarn, which takes its logarithm. Set model.rope_theta=10000, for "
            "example."
        )
    if rope.beta_fast <= rope.beta_slow:
        yield (
            f"model.rope.beta_fast={rope.beta_fast} must be more than "
            f"model.rope.beta_slow={rope.beta_slow}: pairs that turn fast are kept, and those that "
            "turn slowly are stretched. Set model.rope.beta_fast=32 and model.rope.beta_slow=1."
        )
    is_one_missing = (rope.mscale is None) != (rope.mscale_all_dim is None)
    if rope.attention_factor is None and is_one_missing:
        yield (
            f"model.rope.mscale={show(rope.mscale)} and "
            f"model.rope.mscale_all_dim={show(rope.mscale_all_dim)} count only together. "
            "Set both, or leave both out."
        )


def _longrope_problems(model: ModelConfig) -> Iterator[str]:
    rope = model.rope
    if model.rope_original_length == 1 and rope.attention_factor is None:
        yield (
            "model.rope_original_length=1 must be more than 1 with model.rope_scaling=longrope, "
            "which divides by its logarithm. Set model.rope_original_length=4096, for example, or "
            "model.rope.attention_factor=1."
        )
    pairs = rotated_dim(model) // 2
    for name, factors in (("short", rope.short_factors), ("long", rope.long_factors)):
        key = f"model.rope.{name}_factors"
        if len(factors) != pairs:
            yield (
                f"{key} has {len(factors):,} numbers, and must have one for each of the {pairs:,} "
                f"pairs of a head (half of model.head_dim). Set {key} to {pairs:,} numbers."
            )
        for index, factor in enumerate(factors):
            if not _MIN_STRETCH <= factor <= _MAX_STRETCH:
                yield (
                    f"{key}[{index}]={factor} must be at least {_MIN_STRETCH} and at most "
                    f"{_MAX_STRETCH:.0f}. Set {key} to such numbers, as the model's config.json "
                    "has them."
                )
                break


def unread_rope_keys(scaling: str) -> set[str]:
    """The keys of `model`, with `rope.` before those of that section, that a rope scaling does not
    read."""
    unread = set()
    for prefix, section in (("", ModelConfig), ("rope.", RopeConfig)):
        for field in dataclasses.fields(section):
            for use in field.metadata["used_by"]:
                scalings = use.settings.get("model.rope_scaling")
                if scalings is not None and scaling not in scalings:
                    unread.add(prefix + field.name)
    return unread
