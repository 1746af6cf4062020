"""Rewards whose rows are scored in the processes of a pool."""

from collections.abc import Callable, Sequence

from data_pipeline.errors import ConfigError
from maxtrain.rl.rewards.contract import OK, Scored
from maxtrain.rl.rewards.workers import Result, RewardWorkers


def required(pool: RewardWorkers | None, name: str) -> RewardWorkers:
    """ConfigError: a reward needs a pool, and there is none."""
    if pool is None:
        raise ConfigError(
            f"the reward {name} runs in processes of its own, since it may not end. Give "
            "RewardSet(..., pool=RewardWorkers())."
        )
    return pool


def scored(
    results: Sequence[Result], value_of: Callable[[object], float], on_failure: float | None
) -> list[Scored]:
    """Results as rewards: `value_of` what a call returned, `on_failure` where none did."""
    found = []
    for result in results:
        if result.outcome == OK:
            found.append(Scored(value_of(result.value)))
        else:
            found.append(Scored(on_failure, result.outcome, result.detail))
    return found
