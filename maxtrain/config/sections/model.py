"""The section `model`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.config_key import UsedBy, key
from maxtrain.config.words import divisors, multiples, nearest

_LOCAL = UsedBy({"model.family": ("mistral", "gemma2", "gemma3")})
_GEMMA = UsedBy({"model.family": ("gemma2", "gemma3")})
_STRETCHED = UsedBy(
    {"model.rope_scaling": ("llama3",)},
    "{key}={value} is not used with {cause}. Set model.rope_scaling=llama3, or leave it out.",
)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The architecture. Letters in shapes: D embed, F mlp, N heads, K kv heads, H head dim, L
    layers, V vocabulary."""

    family: Literal["llama", "mistral", "qwen2", "qwen3", "olmo2", "gemma2", "gemma3", "gpt2"] = (
        key("llama", "the kind of layers, and the names at Hugging Face")
    )
    vocab_size: int | None = key(
        None, "V; null: the vocabulary of the training data's tokenizer", low=1
    )
    num_layers: int = key(4, "L", low=1, high=10_000)
    embed_dim: int = key(256, "D, model width", low=1, high=1 << 20)
    mlp_dim: int = key(704, "F, feed-forward width", low=1, high=1 << 22)
    num_heads: int = key(4, "N, query heads", low=1, high=1 << 14)
    num_kv_heads: int = key(4, "K, key/value heads; must divide num_heads", low=1, high=1 << 14)
    head_dim: int | None = key(None, "H; null: embed_dim / num_heads", low=2, high=1 << 14)
    tie_embeddings: bool = key(False, "use the embedding table as the output head")
    max_length: int = key(8192, "longest sequence that the model is meant for, tokens", low=1)
    norm_eps: float = key(1e-5, "added to the mean square in RMSNorm", low=1e-12, high=1)
    window: int | None = key(
        None,
        "tokens that a query sees in layers with a window, its own the last; null: all",
        low=1,
        used_by=_LOCAL,
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
    rope_local_theta: float = key(
        10_000.0,
        "rope_theta of layers with a window",
        low=1,
        high=1e15,
        used_by=UsedBy({"model.family": ("gemma3",)}),
    )
    rope_theta: float = key(500_000.0, "base of the rotary frequencies", low=1, high=1e15)
    rope_scaling: Literal["none", "llama3"] = key(
        "none", "how the rotary frequencies are stretched for long contexts"
    )
    rope_factor: float = key(
        8.0, "rope scaling: stretch of the long wavelengths", low=1, high=1e6, used_by=_STRETCHED
    )
    rope_low_freq_factor: float = key(
        1.0,
        "rope scaling: below this many turns, stretch fully",
        above=0,
        high=1e6,
        used_by=_STRETCHED,
    )
    rope_high_freq_factor: float = key(
        4.0,
        "rope scaling: above this many turns, do not stretch",
        above=0,
        high=1e6,
        used_by=_STRETCHED,
    )
    rope_original_length: int = key(
        8192,
        "rope scaling: context of the unstretched model, tokens",
        low=1,
        used_by=_STRETCHED,
    )
    attention: Literal["eager", "xla", "cudnn", "flash"] = key(
        "xla", "kernel: plain reference, blocks in XLA, cuDNN on GPUs, or flash attention on TPUs"
    )
    scan_layers: bool = key(
        True, "run layers as one scanned loop (fast compile) or unrolled (fast step)"
    )
    remat: Literal["none", "full", "dots", "dots_no_batch"] = key(
        "none", "what the backward pass recomputes; see models/decoder.py"
    )
    loss_chunk: int = key(
        2048, "tokens per device whose logits are in memory at one time; 0: all at once", low=0
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
            f"model.num_kv_heads={model.num_kv_heads} must be {heads} with model.family=gpt2, which "
            f"has no groups of queries. Set model.num_kv_heads={model.num_heads}."
        )
    if model.head_dim is not None and model.head_dim % 2:
        valid = multiples(model.head_dim, 2)
        yield (
            f"model.head_dim={model.head_dim} must be even (rotary pairs). "
            f"Set model.head_dim to {valid}."
        )
