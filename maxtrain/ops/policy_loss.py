"""Losses of policies that learn from their own samples: GRPO and its kin, token by token.

Each token of a completion has the log-probability that the policy gives it now, the one that it had
when the completion was taken up for training, and the advantage of the completion. What a loss is
divided by is the objective's affair: see objectives/grpo.py.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.ops.sums import sums_of_documents

# Of the difference of log-probabilities, so that a ratio is finite.
_MOST_APART = 20.0


class RatioClip(NamedTuple):
    """How far a ratio counts.

    Attributes:
        low, high: it is clipped to [1 - low, 1 + high]; with `cispo`, to at most `high`.
        delta: dual clip: the ratio itself is at most this; None: there is no bound.
        level: `token`: each token's own ratio; `sequence`: all tokens of a completion have the
            geometric mean of theirs.
        cispo: the clipped ratio is a constant weight, and no token is without a gradient.
    """

    low: float = 0.2
    high: float = 0.2
    delta: float | None = None
    level: Literal["token", "sequence"] = "token"
    cispo: bool = False


class TokenPolicyLoss(NamedTuple):
    """Of each token."""

    # To be minimised.
    loss: Float[Array, "B T"]
    # Policy now / policy when the completion was taken up.
    ratio: Float[Array, "B T"]
    # The gradient is cut off, below and above.
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
    """-min(ratio * advantage, clip(ratio) * advantage) of each token.

    Args:
        log_probs: by the policy, nats; the gradient flows through them alone.
        old: by the policy when the completion was taken up.
        advantages: of each token's completion.
        mask: 1 for the tokens of completions.
        completions: the number of each token's completion in its row, from 1 on; 0: none's. Only
            read with clip.level=sequence.
        clip: what becomes of ratios far from 1.

    Differs: log-ratios are bounded by +-20 first, where their exponential is not finite any more.

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
    """min(policy / sampler, cap) of each token, for completions that another policy has sampled
    than the one that took them up for training.

    Without the bound, the mean of a weighted loss is that over the policy's own samples; a few
    large weights would rule it. No gradient flows through them.

    Args:
        old: by the policy when the completion was taken up, nats.
        sampled: by the one that sampled it, nats.
        mask, completions, level: as of `policy_loss`, whose ratios continue from here.
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
    """An estimate of KL(policy || reference) from the sampled token alone, never below 0.

    exp(d) - d - 1 with d = log(reference / policy): without bias for tokens that the policy
    sampled, and of less variance than -d, whose gradient says nothing of the reference.

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
    """Half the squared error of each value, that of the value itself or of the one that is at most
    `cliprange` from the old one, whichever is larger; and where it is the latter, so that there is
    no gradient.

    Args:
        values: of today; the gradient flows through them alone.
        old: when the completions were taken up.
        returns: that they should be.
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
    """The mean of values over the tokens of each completion, at each of its tokens; 0 where it has
    none."""
    totals = sums_of_documents(values * mask, completions)
    counts = sums_of_documents(mask, completions)
    means = totals / jnp.where(counts > 0, counts, 1.0)
    return jnp.take_along_axis(means, completions, axis=1)
