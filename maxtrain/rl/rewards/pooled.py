"""What rewards have in common that run in the processes of a pool."""

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.workers import RewardWorkers


def required(pool: RewardWorkers | None, name: str) -> RewardWorkers:
    """ConfigError: a reward needs a pool, and there is none."""
    if pool is None:
        raise ConfigError(
            f"the reward {name} runs in processes of its own, since it may not end. Give "
            "RewardSet(..., pool=RewardWorkers())."
        )
    return pool
