"""FLOPs of a model, counted from its shapes, because a compiler's count takes a scanned layer only
once."""

import dataclasses
from typing import NamedTuple

from flax import nnx

from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.quantized import weights_of
from maxtrain.models.specs import StackSpec


class TokenFlops(NamedTuple):
    """FLOPs of training on one token, forward and backward (three times the forward pass), a
    multiply-add being two.

    `full` counts attention over the whole square, as published MFU figures do (Chowdhery et al.
    2022, appendix B); `causal` counts the half that causal attention needs. Recomputation is not
    counted.
    """

    full: float
    causal: float


def token_flops(config: ModelConfig, length: int, frozen: int = 0) -> TokenFlops:
    """Count the FLOPs per token of matrix products only, with vocab_size known, in rows of `length`
    tokens over which attention reaches.

    Args:
        frozen: number of frozen weights in products. They have no gradient of their own, which is a
            third of their FLOPs. The gradient of their inputs counts, although a compiler may
            remove it below the first trained layer.
    """
    assert config.vocab_size is not None
    stack = FAMILIES[config.family].spec(config).stack
    outputs = config.vocab_size
    if config.score:
        outputs = 1
    if config.value:
        outputs += 1
    return stack_flops(stack, config.embed_dim, outputs, length, frozen)


def product_weights(params: nnx.State, config: ModelConfig) -> int:
    """Count the weights among these parameters that a token is multiplied with; of experts, those
    of the chosen ones."""
    is_tied = config.tie_embeddings and not config.score
    count = 0
    for path, variable in nnx.to_flat_state(params):
        is_matrix = "kernel" in path[-2:]
        if is_matrix or (is_tied and path[-1] == "embedding"):
            size = weights_of(variable)
            if "exp" in variable.get_metadata("axes"):
                size = size // config.moe.num_experts * config.moe.experts_per_token
            count += size
    return count


def stack_flops(
    stack: StackSpec, embed_dim: int, vocab_size: int, length: int, frozen: int = 0
) -> TokenFlops:
    """Count the FLOPs per token of any layers; a window limits what attention reaches."""
    D = embed_dim
    weights = D * vocab_size
    # Sums over a whole row, so that all numbers are integers.
    square = 0
    causal = 0
    for layer in stack.layers():
        weights += layer.mixer.token_weights(D)
        weights += layer.mlp.token_weights(D)
        reach = length
        if layer.window is not None:
            reach = min(layer.window, length)
        # Scores, and weighted values: one multiply-add each.
        square += layer.mixer.pair_products * length * reach
        seen = reach * (reach + 1) // 2 + (length - reach) * reach
        causal += layer.mixer.pair_products * seen
    not_made = 2.0 * frozen
    return TokenFlops(
        6.0 * (weights + square / length) - not_made, 6.0 * (weights + causal / length) - not_made
    )


def relative_quadratic(config: ModelConfig) -> float:
    """Return b of the cost n + b n^2 of a document of n tokens, from the model's layers.

    The vocabulary is left out, because the data may decide it. The result has three digits, so that
    details of the computation do not matter.
    """
    linear, quadratic = sequence_cost(dataclasses.replace(config, vocab_size=0))
    return float(f"{quadratic / linear:.2e}")


def sequence_cost(config: ModelConfig) -> tuple[float, float]:
    """Return (a, b) of the FLOPs a n + b n^2 of training on a sequence of n tokens that only
    attends to itself: the cost for data_pipeline.loader.balance.pack. Causal attention counts the
    half that it needs."""
    one, two = (token_flops(config, length).causal for length in (1, 2))
    return 2 * one - two, two - one  # a + b n is what a token costs
