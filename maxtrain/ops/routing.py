"""Routing of tokens to experts: choices, weights, and load-balancing losses.

Everything here is float32, whatever type activations are stored in, because a rounded router makes
other choices. Padding goes to no expert and is not counted.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from maxtrain.ops.sums import WeightedSum

Noise = Literal["none", "jitter", "gaussian", "gumbel"]
Scope = Literal["sequence", "micro_batch", "global"]
# Added to a sum of chosen scores, which may be 0 in float32; as in DeepSeek's code.
_TINY = 1e-20


class Routing(NamedTuple):
    """The expert choices of tokens.

    Attributes:
        experts: the expert of each choice of a token, the best first; E, the number of experts, for
            no expert.
        weights: the factor of each choice's output; 0 for no expert.
        shares: router probabilities of all experts, which sum to 1 for each token; used by
            load-balancing losses.
    """

    experts: Int[Array, "B T C"]
    weights: Float[Array, "B T C"]
    shares: Float[Array, "B T E"]


def choose(
    logits: Float[Array, "B T E"],
    is_token: Bool[Array, "B T"],
    num_choices: int,
    *,
    scores: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    correction: Float[Array, " E"] | None = None,
    num_groups: int = 1,
    top_groups: int = 1,
    best_of_group: int = 1,
) -> Routing:
    """Choose the best experts of each token.

    Args:
        logits: logits of the router, float32.
        is_token: false for padding.
        num_choices: number of experts per token (top-k).
        scores: the function from logits to scores.
        normalize: whether the scores of a token's experts are divided by their sum. With softmax,
            that is a softmax over the logits of the chosen experts only.
        scale: factor of the final weights.
        correction: bias added to the scores for the choice, not for the weights; None: no bias.
        num_groups, top_groups: consecutive experts form groups of equal size, and a token only goes
            to experts of its best groups.
        best_of_group: the score of a group is the sum of this number of its best scores.

    Returns:
        the choices; experts with equal scores are chosen in their order.

    Sources: Shazeer et al. 2017, https://arxiv.org/abs/1701.06538; groups: DeepSeek-AI 2024,
        https://arxiv.org/abs/2405.04434, section 2.2.2; sigmoid and correction: DeepSeek-AI 2024,
        https://arxiv.org/abs/2412.19437, section 2.1.2.
    """
    num_experts = logits.shape[-1]
    if scores == "softmax":
        values = jax.nn.softmax(logits, axis=-1)
        shares = values
    elif scores == "sigmoid":
        values = jax.nn.sigmoid(logits)
        shares = values / (values.sum(-1, keepdims=True) + _TINY)
    else:
        raise AssertionError(f"scores={scores} is not known")
    ranked = values
    if correction is not None:
        ranked = ranked + correction
    ranked = jax.lax.stop_gradient(ranked)
    if num_groups > 1:
        ranked = _within_best_groups(ranked, num_groups, top_groups, best_of_group)
    _, experts = jax.lax.top_k(ranked, num_choices)
    weights = jnp.take_along_axis(values, experts, axis=-1)
    if normalize:
        weights = weights / (weights.sum(-1, keepdims=True) + _TINY)
    weights = weights * scale
    real = is_token[..., None]
    return Routing(
        jnp.where(real, experts, num_experts),
        jnp.where(real, weights, 0.0),
        jnp.where(real, shares, 0.0),
    )


def _within_best_groups(
    ranked: Float[Array, "B T E"], num_groups: int, top_groups: int, best_of_group: int
) -> Float[Array, "B T E"]:
    """Return the scores, minus infinity outside a token's best groups."""
    grouped = ranked.reshape(*ranked.shape[:-1], num_groups, -1)
    best, _ = jax.lax.top_k(grouped, best_of_group)
    _, groups = jax.lax.top_k(best.sum(-1), top_groups)
    chosen = jax.nn.one_hot(groups, num_groups, dtype=bool).any(-2)
    return jnp.where(chosen[..., None], grouped, -jnp.inf).reshape(ranked.shape)


def with_noise(
    logits: Float[Array, "B T E"],
    keys: Key[Array, " B"],
    noise: Noise,
    scale: Float[Array, "#B"] | float,
) -> Float[Array, "B T E"]:
    """Add noise to the logits of each token and expert, with a random key for each row.

    gaussian adds `scale` times a normal deviate. gumbel adds `scale` times a Gumbel deviate, so
    that with 1 the best expert is a draw from the softmax. jitter is for inputs, see `jittered`.
    The scale may differ between rows.
    """
    scale = jnp.reshape(scale, (-1, 1, 1))
    if noise == "gaussian":
        return logits + scale * _drawn(jax.random.normal, keys, logits.shape)
    if noise == "gumbel":
        return logits + scale * _drawn(jax.random.gumbel, keys, logits.shape)
    raise AssertionError(f"noise={noise} is none of logits")


def jittered(
    x: Float[Array, "B T D"], keys: Key[Array, " B"], scale: Float[Array, "#B"] | float
) -> Float[Array, "B T D"]:
    """Multiply each of the router's inputs by a number between 1 - scale and 1 + scale; float32.
    The scale may differ between rows.

    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, section 2.4 and appendix C.
    """
    scale = jnp.reshape(scale, (-1, 1, 1))
    return x * (1.0 + scale * (2.0 * _drawn(jax.random.uniform, keys, x.shape) - 1.0))


def _drawn(draw: Callable[..., Array], keys: Array, shape: tuple[int, ...]) -> Array:
    return jax.vmap(lambda key: draw(key, shape[1:], jnp.float32))(keys)


def choices_of(experts: Int[Array, "*s T C"], num_experts: int) -> Int[Array, "*s E"]:
    """Count the choices of each expert, summed over tokens."""
    numbers = jnp.arange(num_experts)
    # Choices are counted one after another, because a comparison of all at once needs C times the
    # memory.
    counts = jnp.zeros((*experts.shape[:-2], num_experts), jnp.int32)
    for choice in range(experts.shape[-1]):
        counts += (experts[..., choice, None] == numbers).sum(-2, dtype=jnp.int32)
    return counts


def imbalance(
    routing: Routing, scope: Scope, whole: Int[Array, " E"] | None = None
) -> Float[Array, ""]:
    """Return the load-balancing loss, which is smallest for equal shares, summed over tokens.

    For n tokens it is n E sum_e f_e p_e, where f_e is the fraction of choices of expert e, and p_e
    the mean of its router probability. Divided by n, it is 1 for equal shares, and E if one expert
    gets everything. Only the router probabilities have a gradient.

    Args:
        routing: the routing of a micro-batch.
        scope: the tokens over which f and p are computed. `sequence`: each row by itself, so that
            the sum does not depend on how a batch is split; `micro_batch` and `global`: all rows
            together.
        whole: with `global`, the choices of the whole batch, so that the sum over its micro-batches
            equals that of the batch; None: the micro-batch is the whole batch.

    Source: Fedus et al. 2021, https://arxiv.org/abs/2101.03961, equations 4 to 6; over sequences:
        DeepSeek-AI 2024, https://arxiv.org/abs/2412.19437, equations 17 to 20.
    """
    num_experts = routing.shares.shape[-1]
    counts = choices_of(routing.experts, num_experts).astype(jnp.float32)
    shares = routing.shares.sum(-2)
    if scope != "sequence":
        counts = counts.sum(0)
        shares = shares.sum(0)
    if scope == "global" and whole is not None:
        counts = whole.astype(jnp.float32)
    # Each token contributes one choice to each of its `num_choices` experts.
    total = counts.sum(-1)
    overlap = (jax.lax.stop_gradient(counts) * shares).sum(-1)
    return (num_experts * overlap / jnp.where(total > 0, total, 1.0)).sum()


def z_of(logits: Float[Array, "B T E"], is_token: Bool[Array, "B T"]) -> Float[Array, ""]:
    """Return the router z-loss logsumexp(logits)^2, which keeps logits small, summed over tokens.

    Source: Zoph et al. 2022, https://arxiv.org/abs/2202.08906, section 3.2.
    """
    squares = jax.nn.logsumexp(logits, axis=-1) ** 2
    return jnp.where(is_token, squares, 0.0).sum()


class CapacityAssignment(NamedTuple):
    """The choices that experts with a capacity accept.

    Attributes:
        experts: as in `Routing`, with E also for dropped choices.
        places: the index of each choice among those of its row that its expert accepts, from 0.
        dropped: number of dropped choices, with the number of all choices as weight.
    """

    experts: Int[Array, "B T C"]
    places: Int[Array, "B T C"]
    dropped: WeightedSum


def within_capacity(
    experts: Int[Array, "B T C"], num_experts: int, capacity: int
) -> CapacityAssignment:
    """Return the choices that experts accept: the first `capacity` of each row, token by token, and
    of one token the best first.

    Whether a token's choice is dropped depends only on earlier tokens of its row, never on later
    tokens or other rows. So batch, mesh and accumulation do not change it.
    """
    rows, length, num_choices = experts.shape
    flat = experts.reshape(rows, length * num_choices)
    is_chosen = flat[..., None] == jnp.arange(num_experts)
    before = jnp.cumsum(is_chosen, axis=1, dtype=jnp.int32) - 1
    places = jnp.where(is_chosen, before, 0).sum(-1)
    is_choice = flat < num_experts
    fits = is_choice & (places < capacity)
    dropped = (is_choice & ~fits).sum().astype(jnp.float32)
    kept = jnp.where(fits, flat, num_experts)
    return CapacityAssignment(
        kept.reshape(experts.shape),
        jnp.where(fits, places, 0).reshape(experts.shape),
        WeightedSum(dropped, is_choice.sum().astype(jnp.float32)),
    )


def capacity_of(length: int, num_choices: int, num_experts: int, factor: float) -> int:
    """Return the choices that an expert accepts in a row of this length: `factor` times an equal
    share, rounded up, and at most the number of tokens."""
    # The factor counts as written: 1.1 is not 1.1000000000000001.
    wanted = math.ceil(Fraction(str(factor)) * length * num_choices / num_experts)
    return max(1, min(length, wanted))
