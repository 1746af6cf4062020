"""Advantages from groups of rewards: pure functions of numpy arrays in float64.

A group is the completions of one prompt: `num_generations` consecutive rows. NaN stands for a
reward that is not applicable (None), which is not 0. Means and deviations are over the rows that
apply. A row without any applicable reward has advantage 0 and is marked.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from data_pipeline.base.errors import ConfigError, DataError

SCALES = ("group", "batch", "none")
BASELINES = ("mean", "leave_one_out")
AGGREGATIONS = ("sum_then_normalize", "normalize_then_sum")
# Added to a deviation, so that rounding differences are not amplified.
EPSILON = 1e-4


class Advantages(NamedTuple):
    """The advantages of a batch of N rows, and the number of groups without a learning signal.

    Attributes:
        values: one for each row.
        applies: whether a reward applies to the row; otherwise its advantage is 0.
        num_groups: groups of the batch.
        equal_groups: groups whose rewards are all exactly equal, so that their advantages are
            exactly 0.
        empty_groups: groups in which no reward applies to any row.
    """

    values: Float[np.ndarray, "N"]
    applies: Bool[np.ndarray, "N"]
    num_groups: int
    equal_groups: int
    empty_groups: int


def as_array(rewards: Sequence[Sequence[float | None]]) -> Float[np.ndarray, "R N"]:
    """Return lists of rewards as an array, with None as NaN."""
    rows = []
    for values in rewards:
        rows.append([math.nan if value is None else float(value) for value in values])
    return np.array(rows, np.float64)


def weighted_sum(
    rewards: Float[np.ndarray, "R N"], weights: Float[np.ndarray, "R"]
) -> Float[np.ndarray, "N"]:
    """Return sum_k w_k r_k over the rewards k that apply to each row; NaN if none does."""
    applies = ~np.isnan(rewards)
    total = np.where(applies, weights[:, None] * rewards, 0.0).sum(0)
    return np.where(applies.any(0), total, np.nan)


def deviation(rewards: Float[np.ndarray, "P G"]) -> Float[np.ndarray, "P 1"]:
    """Return the sample standard deviation (n - 1) of each row without NaN; 0 for fewer than two
    values."""
    count = (~np.isnan(rewards)).sum(-1, keepdims=True)
    mean = np.nansum(rewards, -1, keepdims=True) / np.maximum(count, 1)
    squares = np.nansum((rewards - mean) ** 2, -1, keepdims=True)
    return np.sqrt(squares / np.maximum(count - 1, 1))


def centred(rewards: Float[np.ndarray, "P G"], baseline: str) -> Float[np.ndarray, "P G"]:
    """Return rewards minus their baseline; NaN stays NaN, and a group of equal rewards is exactly
    0.

    baseline="mean":           r_i - mean_j(r_j)
    baseline="leave_one_out":  r_i - mean_{j != i}(r_j)  =  n / (n - 1) * (r_i - mean_j(r_j))

    The second is RLOO's. The only row of a group has no other row to be compared with: 0.
    """
    count = (~np.isnan(rewards)).sum(-1, keepdims=True)
    mean = np.nansum(rewards, -1, keepdims=True) / np.maximum(count, 1)
    result = rewards - mean
    if baseline == "leave_one_out":
        result = result * count / np.maximum(count - 1, 1)
    # The mean of equal numbers may round to another number.
    return np.where(_equal(rewards)[:, None] & ~np.isnan(rewards), 0.0, result)


def has_signal(
    rewards: Float[np.ndarray, "R N"], num_generations: int, weights: Sequence[float]
) -> Bool[np.ndarray, "P"]:
    """Return for each group whether its weighted sums of rewards differ; otherwise its advantages
    are all 0.

    The arguments are those of `advantages` with aggregation="sum_then_normalize".
    """
    total = weighted_sum(rewards, np.array(weights, np.float64)).reshape(-1, num_generations)
    return ~_equal(total)


def advantages(
    rewards: Float[np.ndarray, "R N"],
    num_generations: int,
    *,
    weights: Sequence[float] | None = None,
    scale_rewards: str = "group",
    baseline: str = "mean",
    aggregation: str = "sum_then_normalize",
    epsilon: float = EPSILON,
) -> Advantages:
    """Compute the advantages of a batch.

    With r the weighted sum of the rewards that apply, the advantage of row i of a group is

        A_i = (r_i - b_i) / (s + epsilon)

    with b the baseline (see `centred`) and s the deviation of the group's rewards
    (scale_rewards="group"), that of the whole batch's ("batch"), or no division at all ("none").

    With aggregation="normalize_then_sum", each reward is centred and scaled by itself, the weighted
    sum of these is taken, and that is divided by its deviation over the batch (+ epsilon): rewards
    whose sums coincide are then distinguished.

    Args:
        rewards: R rewards of N rows; NaN: not applicable.
        num_generations: rows of a group, which are consecutive.
        weights: one for each reward; None: 1 each.
        scale_rewards: "group", "batch" or "none".
        baseline: "mean" or "leave_one_out".
        aggregation: "sum_then_normalize" or "normalize_then_sum".
        epsilon: added to deviations; 0 makes the advantages independent of the unit of the rewards.

    Raises:
        ConfigError: an argument is out of range, or the rows are not complete groups.
        DataError: a reward is infinite.

    Source: GRPO, arXiv 2402.03300 (section 4.1.2); without the deviation Dr. GRPO, arXiv
        2503.20783; RLOO, arXiv 2402.14740; rewards one by one GDPO, arXiv 2601.05242.
    Differs: a group whose rewards are all exactly equal has advantage exactly 0; others divide the
        rounding error of its mean by epsilon.
    """
    if weights is None:
        weights = [1.0] * len(rewards)
    _check(rewards, num_generations, weights, scale_rewards, baseline, aggregation)
    factors = np.array(weights, np.float64)
    total = weighted_sum(rewards, factors).reshape(-1, num_generations)
    applies = ~np.isnan(total)
    if aggregation == "sum_then_normalize":
        values = _normalized(total, scale_rewards, baseline, epsilon)
        equal = _equal(total)
    else:
        groups = rewards.reshape(len(rewards), -1, num_generations)
        each = [_normalized(reward, scale_rewards, baseline, epsilon) for reward in groups]
        weighted = factors[:, None, None] * np.nan_to_num(np.stack(each))
        summed = weighted.sum(0)
        spread = deviation(np.where(applies, summed, np.nan).reshape(1, -1))
        values = _divided(summed, spread, epsilon)
        equal = np.all([_equal(reward) for reward in groups], axis=0)
    empty = ~applies.any(-1)
    return Advantages(
        values=np.where(applies, values, 0.0).reshape(-1),
        applies=applies.reshape(-1),
        num_groups=len(total),
        equal_groups=int((equal & ~empty).sum()),
        empty_groups=int(empty.sum()),
    )


def _normalized(
    rewards: Float[np.ndarray, "P G"], scale_rewards: str, baseline: str, epsilon: float
) -> Float[np.ndarray, "P G"]:
    """Centre and scale rewards."""
    result = centred(rewards, baseline)
    if scale_rewards == "group":
        return _divided(result, deviation(rewards), epsilon)
    if scale_rewards == "batch":
        return _divided(result, deviation(rewards.reshape(1, -1)), epsilon)
    return result


def _divided(
    values: Float[np.ndarray, "P G"], spread: Float[np.ndarray, "#P 1"], epsilon: float
) -> Float[np.ndarray, "P G"]:
    """Return values / (spread + epsilon). Without a spread all values are 0, and stay 0."""
    divisor = spread + epsilon
    return values / np.where(divisor > 0, divisor, 1.0)


def _equal(rewards: Float[np.ndarray, "P G"]) -> Bool[np.ndarray, "P"]:
    """Return which groups have applicable rewards that are all exactly equal, or none."""
    least = np.where(np.isnan(rewards), np.inf, rewards).min(-1)
    most = np.where(np.isnan(rewards), -np.inf, rewards).max(-1)
    return least >= most


def _check(
    rewards: Float[np.ndarray, "R N"],
    num_generations: int,
    weights: Sequence[float],
    scale_rewards: str,
    baseline: str,
    aggregation: str,
) -> None:
    """Raise an error if the arguments of `advantages` are out of range."""
    choices = (
        ("scale_rewards", scale_rewards, SCALES),
        ("baseline", baseline, BASELINES),
        ("aggregation", aggregation, AGGREGATIONS),
    )
    for name, value, known in choices:
        if value not in known:
            raise ConfigError(f"{name}={value} is not known. Set it to {', '.join(known)}.")
    if len(weights) != len(rewards):
        raise ConfigError(
            f"reward_weights has {len(weights)} numbers for {len(rewards)} rewards: there must be "
            "one for each. Set as many, or none for 1 each."
        )
    rows = rewards.shape[1]
    if num_generations < 1 or rows % num_generations:
        raise ConfigError(
            f"num_generations={num_generations} must divide the {rows} rows of the batch: a group "
            "has this number of consecutive rows. Set it to the number of completions per prompt."
        )
    if np.isinf(rewards).any():
        place = int(np.argwhere(np.isinf(rewards))[0, 1])
        raise DataError(
            f"the reward of row {place} is infinite: advantages are differences of finite numbers. "
            "Fix the reward function, or let it return None where it does not apply."
        )
