"""The section `model`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.sections.lora import LoraConfig
from maxtrain.config.sections.moe import DEEPSEEK, OF_DEEPSEEK, MoeConfig, RoutingConfig
from maxtrain.config.sections.pipeline import PipelineConfig
from maxtrain.config.sections.remat_names import RematNamesConfig
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
    {"model.family": AnyValueExcept("gpt2")},
    "{key}={value} is not used with {cause}, whose positions are learned. "
    "Set {key}={default}, or leave it out.",
)
# Of the wavelength of one pair.
_MIN_STRETCH = 1e-6
_MAX_STRETCH = 1e6


def _read_by(*scalings: str) -> UsedBy:
    """Return the rule that only these rope scalings read a key."""
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
    """Rotary settings that only some rope scalings or model families use."""

    local_theta: float = key(
        10_000.0,
        "base of the rotary frequencies in layers with a window",
        low=1,
        high=1e15,
        used_by=UsedBy({"model.family": ("gemma3",)}),
    )
    beta_fast: float = key(
        32.0,
        "YaRN: frequencies with more turns in the original length than this are not stretched",
        above=0,
        high=1e6,
        used_by=_read_by("yarn"),
    )
    beta_slow: float = key(
        1.0,
        "YaRN: frequencies with fewer turns in the original length than this are stretched fully",
        above=0,
        high=1e6,
        used_by=_read_by("yarn"),
    )
    truncate: bool = key(
        True,
        "YaRN: round the range between beta_fast and beta_slow to whole frequencies",
        used_by=_read_by("yarn"),
    )
    attention_factor: float | None = key(
        None,
        "factor of cos and sin; null: computed from model.rope_factor, as published",
        above=0,
        high=1e6,
        used_by=_read_by("yarn", "longrope"),
    )
    mscale: float | None = key(
        None,
        "YaRN: factor of the logarithm in the numerator of the attention factor; null: plain YaRN",
        above=0,
        high=1e6,
        used_by=(_read_by("yarn"), _WITHOUT_ATTENTION_FACTOR),
    )
    mscale_all_dim: float | None = key(
        None,
        "YaRN: factor of the logarithm in the denominator of the attention factor; null: "
        "plain YaRN",
        above=0,
        high=1e6,
        used_by=(_read_by("yarn"), _WITHOUT_ATTENTION_FACTOR),
    )
    short_factors: tuple[float, ...] = key(
        (),
        "LongRoPE: stretch of each frequency in rows up to the original length, head_dim / 2 "
        "numbers",
        used_by=_read_by("longrope"),
    )
    long_factors: tuple[float, ...] = key(
        (),
        "LongRoPE: stretch of each frequency in longer rows, head_dim / 2 numbers",
        used_by=_read_by("longrope"),
    )


@dataclasses.dataclass(frozen=True)
class LatentConfig:
    """Attention over latents. The last rope_dim numbers of a head of queries and keys are rotated;
    model.head_dim counts all of them."""

    query_rank: int | None = key(
        None,
        "MLA: rank of the compressed queries; null: queries are not compressed",
        low=1,
        high=1 << 20,
        used_by=OF_DEEPSEEK,
    )
    kv_rank: int = key(
        512,
        "MLA: rank of the compressed latent from which keys and values are computed",
        low=1,
        high=1 << 20,
        used_by=OF_DEEPSEEK,
    )
    rope_dim: int = key(
        64,
        "MLA: dims of a head that have rotary positions",
        low=2,
        high=1 << 14,
        used_by=OF_DEEPSEEK,
    )
    value_dim: int = key(128, "MLA: dims of a value head", low=1, high=1 << 14, used_by=OF_DEEPSEEK)
    interleaved: bool = key(
        True,
        "rotate pairs of neighbouring dims, instead of one half against the other",
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
    ] = key("llama", "architecture: the kind of layers, and the names of Hugging Face checkpoints")
    vocab_size: int | None = key(
        None, "V, vocabulary size; null: that of the training data's tokenizer", low=1
    )
    num_layers: int = key(4, "L, number of layers", low=1, high=MAX_LAYERS)
    embed_dim: int = key(256, "D, model width", low=1, high=1 << 20)
    mlp_dim: int = key(704, "F, feed-forward width", low=1, high=1 << 22)
    num_heads: int = key(4, "N, query heads", low=1, high=1 << 14)
    num_kv_heads: int = key(4, "K, key/value heads; must divide num_heads", low=1, high=1 << 14)
    head_dim: int | None = key(
        None, "H, size of a head; null: embed_dim / num_heads", low=2, high=1 << 14
    )
    tie_embeddings: bool = key(False, "use the embedding table as the output head")
    max_length: int = key(8192, "longest sequence that the model is meant for, in tokens", low=1)
    norm_eps: float = key(
        1e-5, "epsilon of the norms, added to the mean square or to the variance", low=1e-12, high=1
    )
    window: int | None = key(
        None,
        "sliding window: tokens that a query sees, itself included; null: no window",
        low=1,
        used_by=_LOCAL,
    )
    layer_types: tuple[LayerType, ...] = key(
        (),
        "attention types of the layers, repeated in this order; only sliding_attention uses "
        "the window; empty: those of the family",
        used_by=UsedBy({"model.family": _ALTERNATING}),
    )
    query_pre_attn_scalar: float | None = key(
        None,
        "attention scores are divided by the square root of this; null: head_dim",
        above=0,
        high=1e6,
        used_by=_GEMMA,
    )
    attention_softcap: float | None = key(
        None,
        "soft cap on attention scores, by tanh; null: none",
        above=0,
        high=1e6,
        used_by=_GEMMA,
    )
    logit_softcap: float | None = key(
        None, "soft cap on the logits, by tanh; null: none", above=0, high=1e6, used_by=_GEMMA
    )
    rope_theta: float = key(
        500_000.0, "base of the rotary frequencies (RoPE)", low=1, high=1e15, used_by=_TURNED
    )
    rope_scaling: Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"] = key(
        "none", "method that stretches the rotary frequencies for longer contexts", used_by=_TURNED
    )
    rope_factor: float = key(
        8.0,
        "rope scaling: factor by which wavelengths are stretched; with longrope, the factor "
        "of the context length",
        low=1,
        high=1e6,
        used_by=_read_by("llama3", "linear", "dynamic", "yarn", "longrope"),
    )
    rope_low_freq_factor: float = key(
        1.0,
        "rope scaling: frequencies with fewer turns in the original length than this are "
        "stretched fully",
        above=0,
        high=1e6,
        used_by=_read_by("llama3"),
    )
    rope_high_freq_factor: float = key(
        4.0,
        "rope scaling: frequencies with more turns in the original length than this are not "
        "stretched",
        above=0,
        high=1e6,
        used_by=_read_by("llama3"),
    )
    rope_original_length: int = key(
        8192,
        "rope scaling: context length of the model before stretching, in tokens",
        low=1,
        used_by=_read_by("llama3", "dynamic", "yarn", "longrope"),
    )
    rope: RopeConfig = key(RopeConfig(), "settings of single rope scalings")
    latent: LatentConfig = key(LatentConfig(), "multi-head latent attention (MLA)")
    moe: MoeConfig = key(MoeConfig(), "architecture of expert layers (MoE)")
    routing: RoutingConfig = key(
        RoutingConfig(), "run-time settings of experts: load balancing and kernel"
    )
    score: bool = key(
        False,
        "replace the logits by one score per text: a reward model",
        used_by=UsedBy(
            {"objective": ("reward",)},
            "{key}={value} is not used with {cause}. Set objective=reward, or leave it out.",
        ),
    )
    value: bool = key(
        False,
        "add a value head that predicts a value of each token; its weights start at zero",
        used_by=UsedBy(
            {"objective": ("ppo",)},
            "{key}={value} is not used with {cause}. Set objective=ppo, or leave it out.",
        ),
    )
    lora: LoraConfig = key(LoraConfig(), "low-rank adapters, which train in the place of weights")
    attention: Literal["auto", "eager", "xla", "cudnn", "triton", "mosaic", "flash", "ring"] = key(
        "auto",
        "attention kernel: eager: slow reference; xla; cudnn, triton, mosaic: GPUs; flash: "
        "TPUs; ring: with mesh.context; auto: the best one for the run",
    )
    scan_layers: bool = key(
        True, "run layers as one scanned loop (fast compile) or unrolled (fast step)"
    )
    remat: Literal["none", "full", "dots", "dots_no_batch", "named"] = key(
        "none",
        "activations that the backward pass recomputes: none; full: all inside a layer; dots,"
        " dots_no_batch: all but matrix products (of weights only); named: all but model.kept",
    )
    kept: RematNamesConfig = key(
        RematNamesConfig(), "activations kept for the backward pass with model.remat=named"
    )
    pipeline: PipelineConfig = key(PipelineConfig(), "pipeline schedule, with mesh.stage")
    loss_chunk: int = key(
        2048, "tokens per device whose logits are in memory at the same time; 0: all at once", low=0
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
    """Return how many numbers of a head the rotary embedding turns."""
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
