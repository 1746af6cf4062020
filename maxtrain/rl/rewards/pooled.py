"""A check shared by the rewards that run in the processes of a pool."""

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.workers import RewardWorkers


def required(pool: RewardWorkers | None, name: str) -> RewardWorkers:
    """Return the pool of a reward. Raise a ConfigError if there is none."""
    if pool is None:
        raise ConfigError(
            f"the reward {name} runs in processes of its own, since it may not end. Give "
            "RewardSet(..., pool=RewardWorkers())."
        )
    return pool
