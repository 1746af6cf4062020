"""Metrics of the rewards of a batch."""

import numpy as np

from maxtrain.rl.advantages import weighted_sum
from maxtrain.rl.rewards.registry import RewardScores


def reward_numbers(scores: RewardScores) -> dict[str, float]:
    """Return means over the rows that a reward applies to; a reward that applies to no row has no
    mean.

    Returns:
        reward: weighted sum; reward/NAME: each reward; reward_outcomes/NAME/OUTCOME: number of
        rows with an outcome; accuracy: share of correct rows, if a reward verifies answers.
    """
    values = {"reward": weighted_sum(scores.values, np.array(scores.weights, np.float64))}
    for name, row in zip(scores.names, scores.values, strict=True):
        values[f"reward/{name}"] = row
    values["accuracy"] = scores.right
    numbers = {}
    for name, row in values.items():
        applies = row[~np.isnan(row)]
        if applies.size:
            numbers[name] = float(applies.mean())
    for name, outcomes in scores.outcomes.items():
        for outcome, count in outcomes.items():
            numbers[f"reward_outcomes/{name}/{outcome}"] = float(count)
    return numbers
