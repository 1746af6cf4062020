"""Arithmetic of a model, counted from its shapes: a compiler's count takes a scanned layer once."""

from typing import NamedTuple

from maxtrain.config.schema import ModelConfig
from maxtrain.models.init import head_dim


class TokenFlops(NamedTuple):
    """FLOPs of training on one token, forward and backward (three times the forward pass), a
    multiply-add being two.

    `full` counts attention over the whole square, as published MFU figures do (Chowdhery et al.
    2022, appendix B); `causal` counts the half that causal attention needs. Recomputation is not
    counted: it is a means, not work.
    """

    full: float
    causal: float


def token_flops(config: ModelConfig, length: int) -> TokenFlops:
    """Of matrix products only, with vocab_size known, in rows of `length` tokens, over which
    attention reaches."""
    assert config.vocab_size is not None
    D, F, H, N, K = (
        config.embed_dim,
        config.mlp_dim,
        head_dim(config),
        config.num_heads,
        config.num_kv_heads,
    )
    weights = (
        config.num_layers * (D * H * (N + 2 * K) + N * H * D + 3 * D * F) + D * config.vocab_size
    )
    attention = (
        config.num_layers * 2 * N * H * length
    )  # scores, and weighted values: one multiply-add each
    return TokenFlops(
        6.0 * (weights + attention), 6.0 * (weights + attention * (length + 1) / (2 * length))
    )


def sequence_cost(config: ModelConfig) -> tuple[float, float]:
    """(a, b) of the FLOPs a n + b n^2 of training on a sequence of n tokens, of which attention
    sees nothing else: the cost for data_pipeline.balance.pack. Causal attention counts the half
    that it needs."""
    one, two = (token_flops(config, length).causal for length in (1, 2))
    return 2 * one - two, two - one  # a + b n is what a token costs
