"""Losses of policies that train on their own samples: GRPO and its variants, token by token.

Each token of a completion has its present log-probability under the policy, the old one from the
beginning of training on the completion, and the advantage of the completion. The objective divides
the losses: see objectives/grpo.py.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.sums import sums_of_documents

# Largest difference of log-probabilities, so that a ratio is finite.
_MOST_APART = 20.0


class RatioClip(NamedTuple):
    """Settings of the clipping of ratios.

    Attributes:
        low, high: a ratio is clipped to [1 - low, 1 + high]; with `cispo`, to at most `high`.
        delta: dual clip: upper bound of the unclipped ratio; None: no bound.
        level: `token`: each token's own ratio; `sequence`: all tokens of a completion have the
            geometric mean of theirs.
        cispo: whether the clipped ratio is a constant weight, so that every token has a gradient.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    level: Literal["token", "sequence"] = "token"
    cispo: bool = False


class TokenPolicyLoss(NamedTuple):
    """Policy loss of each token, with its ratio and whether it was clipped."""

    # The loss to minimise.
    loss: Float[Array, "B T"]
    # Present policy / old policy.
    ratio: Float[Array, "B T"]
    # Whether clipping removed the gradient, below and above.
    clipped_low: Bool[Array, "B T"]
    clipped_high: Bool[Array, "B T"]


def policy_loss(
    log_probs: Float[Array, "B T"],
    old: Float[Array, "B T"],
    advantages: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    completions: Int[Array, "B T"],
    clip: RatioClip,
) -> TokenPolicyLoss:
    """Return -min(ratio * advantage, clip(ratio) * advantage) of each token.

    Args:
        log_probs: log-probabilities by the policy, nats; only these have a gradient.
        old: log-probabilities by the old policy.
        advantages: advantage of each token's completion.
        mask: 1 for the tokens of completions.
        completions: the number of each token's completion in its row, from 1 on; 0: no completion.
            Only read with clip.level=sequence.
        clip: settings of the clipping.

    Differs: log-ratios are first clipped to +-20, so that their exponential stays finite.

    Source: GRPO: Shao et al., https://arxiv.org/abs/2402.03300, equation 3; `high` apart from
        `low`: DAPO, Yu et al., https://arxiv.org/abs/2503.14476; `delta`: Ye et al.,
        https://arxiv.org/abs/1912.09729; `sequence`: GSPO, Zheng et al.,
        https://arxiv.org/abs/2507.18071; `cispo`: MiniMax, https://arxiv.org/abs/2506.13585.
    """
    log_ratio = log_probs - old
    if clip.level == "sequence":
        log_ratio = mean_of_each(log_ratio, mask, completions)
    ratio = jnp.exp(jnp.clip(log_ratio, -_MOST_APART, _MOST_APART))
    if clip.cispo:
        weight = jax.lax.stop_gradient(jnp.minimum(ratio, clip.high))
        loss = -weight * advantages * log_probs
        never = jnp.zeros(ratio.shape, bool)
        return TokenPolicyLoss(loss, ratio, never, (ratio > clip.high) & (advantages > 0))
    bounded = ratio
    if clip.delta is not None:
        bounded = jnp.minimum(ratio, clip.delta)
    clipped = jnp.clip(ratio, 1 - clip.low, 1 + clip.high)
    loss = -jnp.minimum(bounded * advantages, clipped * advantages)
    return TokenPolicyLoss(
        loss,
        ratio,
        (ratio < 1 - clip.low) & (advantages < 0),
        (ratio > 1 + clip.high) & (advantages > 0),
    )


def importance_weights(
    old: Float[Array, "B T"],
    sampled: Float[Array, "B T"],
    mask: Float[Array, "B T"],
    completions: Int[Array, "B T"],
    level: Literal["token", "sequence"],
    cap: float,
) -> Float[Array, "B T"]:
    """Return min(policy / sampler, cap) of each token, for completions that another policy sampled
    than the old policy.

    Without the cap, the weighted mean is an unbiased estimate over the policy's own samples, but a
    few large weights would dominate it. No gradient flows through the weights.

    Args:
        old: log-probabilities by the old policy, nats.
        sampled: log-probabilities by the sampling policy, nats.
        mask, completions, level: as for `policy_loss`, whose ratios continue from here.
        cap: the largest weight.

    Source: truncation: Ionides 2008, https://doi.org/10.1198/106186008X320456; a policy for
        sampling apart from that for ratios: Hilton et al., https://arxiv.org/abs/2110.00641.
    """
    log_weight = jax.lax.stop_gradient(old - sampled)
    if level == "sequence":
        log_weight = mean_of_each(log_weight, mask, completions)
    return jnp.minimum(jnp.exp(jnp.clip(log_weight, -_MOST_APART, _MOST_APART)), cap)


def reference_divergence(
    log_probs: Float[Array, "B T"], reference: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """Estimate KL(policy, reference) from the sampled token alone, never below 0.

    The estimate is exp(d) - d - 1 with d = log(reference / policy). It is unbiased for tokens that
    the policy sampled, and has less variance than -d, whose gradient does not depend on the
    reference.

    Source: Schulman, http://joschu.net/blog/kl-approx.html, k3.
    """
    apart = jnp.clip(reference - log_probs, -_MOST_APART, _MOST_APART)
    return jnp.expm1(apart) - apart


def clipped_value_loss(
    values: Float[Array, "B T"],
    old: Float[Array, "B T"],
    returns: Float[Array, "B T"],
    cliprange: float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return half the squared error of each value: the larger of that of the value itself and of
    the value clipped to `cliprange` around the old one. Also return where the latter is larger, so
    that there is no gradient.

    Args:
        values: present values; only these have a gradient.
        old: values by the old policy.
        returns: targets of the values.
        cliprange: how far values may move from the old ones.

    Source: Schulman et al., https://arxiv.org/abs/1707.06347, as their own code has it; the halves
        as in TRL's PPOTrainer.
    """
    bounded = old + jnp.clip(values - old, -cliprange, cliprange)
    plain = (values - returns) ** 2
    clipped = (bounded - returns) ** 2
    return 0.5 * jnp.maximum(plain, clipped), clipped > plain


def mean_of_each(
    values: Float[Array, "B T"], mask: Float[Array, "B T"], completions: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Return the mean of values over the tokens of each completion, at each of its tokens; 0 for a
    completion without tokens."""
    totals = sums_of_documents(values * mask, completions)
    counts = sums_of_documents(mask, completions)
    means = totals / jnp.where(counts > 0, counts, 1.0)
    return jnp.take_along_axis(means, completions, axis=1)
