"""Advantages and returns of tokens from rewards and values (PPO): pure functions of numpy arrays in
float64.

A completion ends with its last token, whether it ended itself or was truncated: the value after it
is 0.
"""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from maxtrain.config.schema import PpoConfig
from maxtrain.rl.advantages import weighted_sum
from maxtrain.rl.rollout import Rollout

# Added to a variance, as in TRL.
_EPSILON = 1e-8


class AdvantageEstimate(NamedTuple):
    """Advantage and return of each token."""

    advantages: Float[np.ndarray, " S"]
    returns: Float[np.ndarray, " S"]


def divergence(
    log_probs: Float[np.ndarray, " S"], reference: Float[np.ndarray, " S"], estimator: str
) -> Float[np.ndarray, " S"]:
    """Estimate KL(policy || reference) at each token from the sampled token.

    k1: log(policy / reference). k3: exp(d) - 1 - d with d = log(reference / policy), never below 0.

    Source: Schulman, http://joschu.net/blog/kl-approx.html.
    """
    apart = reference.astype(np.float64) - log_probs.astype(np.float64)
    if estimator == "k1":
        return -apart
    if estimator != "k3":
        raise AssertionError(f"kl_estimator={estimator} is not known")
    return np.expm1(apart) - apart


def estimate(
    rewards: Float[np.ndarray, " S"],
    values: Float[np.ndarray, " S"],
    lengths: Int[np.ndarray, " N"],
    gamma: float,
    lambda_: float,
) -> AdvantageEstimate:
    """Compute generalised advantages (GAE), and returns, which are advantages plus values.

        A_t = d_t + gamma lambda A_{t+1},  d_t = r_t + gamma V_{t+1} - V_t

    with V and A after the last token of a completion 0.

    Args:
        rewards, values: numbers of the tokens of completions, concatenated.
        lengths: tokens of each completion.
        gamma: discount factor of rewards.
        lambda_: 0: one-step temporal difference; 1: all following rewards.

    Source: Schulman et al., https://arxiv.org/abs/1506.02438, equation 16.
    """
    values = values.astype(np.float64)
    advantages = np.zeros(len(values))
    end = len(values)
    for length in lengths[::-1].tolist():
        next_value = 0.0
        ahead = 0.0
        for t in range(end - 1, end - length - 1, -1):
            error = rewards[t] + gamma * next_value - values[t]
            ahead = error + gamma * lambda_ * ahead
            advantages[t] = ahead
            next_value = values[t]
        end -= length
    return AdvantageEstimate(advantages, advantages + values)


def whitened(
    values: Float[np.ndarray, " S"], counts: Bool[np.ndarray, " S"]
) -> Float[np.ndarray, " S"]:
    """Scale values to mean 0 and variance 1 over the tokens that count; the others are 0.

    The variance has n - 1 in its denominator, as in TRL; for a single token it is 0.
    """
    chosen = values[counts]
    found = np.zeros(len(values))
    if chosen.size:
        apart = chosen - chosen.mean()
        variance = (apart**2).sum() / max(chosen.size - 1, 1)
        found[counts] = apart / np.sqrt(variance + _EPSILON)
    return found


def explained_variance(
    values: Float[np.ndarray, " S"], returns: Float[np.ndarray, " S"]
) -> float | None:
    """Return 1 - var(returns - values) / var(returns): 1 for perfect values, 0 for constant ones;
    None: all returns are equal."""
    if not returns.size or returns.min() >= returns.max():
        return None
    return float(1 - np.var(returns - values) / np.var(returns))


def token_rewards(
    rollout: Rollout, scores: Float[np.ndarray, " N"], config: PpoConfig
) -> Float[np.ndarray, " S"]:
    """Return the reward of each token: minus kl_coef times its divergence from the reference, and
    at the last token of a completion its score, minus the penalty if it was truncated."""
    rewards = np.zeros(len(rollout.tokens))
    if config.kl_coef:
        apart = divergence(rollout.old, rollout.reference, config.kl_estimator)
        rewards -= config.kl_coef * apart
    scores = np.nan_to_num(scores)
    if config.missing_eos_penalty is not None:
        scores = scores - config.missing_eos_penalty * rollout.truncated
    rewards[np.cumsum(rollout.lengths) - 1] += scores
    return rewards


def counted_completions(rollout: Rollout, mask_truncated: bool) -> Bool[np.ndarray, " N"]:
    """Return which completions train: those with an applicable reward, and with `mask_truncated`
    only those that were not truncated."""
    counts = ~np.isnan(rollout.rewards).all(0)
    if mask_truncated:
        counts &= ~rollout.truncated
    return counts


def with_returns(
    rollout: Rollout, weights: tuple[float, ...], config: PpoConfig, mask_truncated: bool
) -> tuple[Rollout, dict[str, float]]:
    """Return the rollout with advantages and returns of its tokens, and the metrics of these.

    Args:
        rollout: a rollout with rewards, log-probabilities and values.
        weights: weights of the rewards.
        config: settings of PPO.
        mask_truncated: whether truncated completions are ignored.

    Returns:
        the rollout, and the metrics `score` (mean reward of completions minus divergence and
        penalty) and `explained_variance` (of the values, before training on them).
    """
    scores = weighted_sum(rollout.rewards, np.array(weights, np.float64))
    rewards = token_rewards(rollout, scores, config)
    found = estimate(rewards, rollout.values, rollout.lengths, config.gamma, config.lambda_)
    completions = counted_completions(rollout, mask_truncated)
    counts = np.repeat(completions, rollout.lengths)
    advantages = np.where(counts, found.advantages, 0.0)
    if config.whiten_advantages:
        advantages = whitened(found.advantages, counts)
    numbers = {}
    if counts.any():
        numbers["score"] = float(rewards[counts].sum() / completions.sum())
        values = rollout.values.astype(np.float64)[counts]
        explained = explained_variance(values, found.returns[counts])
        if explained is not None:
            numbers["explained_variance"] = explained
    made = rollout._replace(token_advantages=advantages, returns=found.returns)
    return made, numbers
