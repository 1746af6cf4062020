"""Settings for sampling completions of prompts, the same for all objectives that learn from
them.
"""

import dataclasses
from typing import NamedTuple

from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.grpo import FROM_REWARDS

# Settings that change nothing of a rollout.
_IDLE = ("keep_rollouts",)
# Keys of `distill` that decide what is sampled.
_OF_DISTILL = (
    "num_generations",
    "max_completion_length",
    "slots",
    "sampling_temperature",
    "num_iterations",
    "mask_truncated_completions",
)


class RolloutSettings(NamedTuple):
    """Keys that decide how completions are sampled and read, with the names they have in the
    sections `grpo` and `distill`.

    `identity` has all settings that a stored rollout depends on, by their section.
    """

    num_generations: int
    max_completion_length: int
    slots: int
    temperature: float
    num_iterations: int
    staleness: int
    keep_rollouts: bool
    mask_truncated_completions: bool
    identity: dict[str, dict[str, object]]


def rollout_settings(config: RunConfig) -> RolloutSettings | None:
    """Return how the run samples its training rollouts; None if it learns from data."""
    if config.objective in FROM_REWARDS:
        grpo = config.grpo
        settings = dataclasses.asdict(grpo)
        for name in _IDLE:
            del settings[name]
        identity: dict[str, dict[str, object]] = {"grpo": settings}
        if config.objective == "ppo":
            identity["ppo"] = dataclasses.asdict(config.ppo)
        return RolloutSettings(
            num_generations=grpo.num_generations,
            max_completion_length=grpo.max_completion_length,
            slots=grpo.slots,
            temperature=grpo.temperature,
            num_iterations=grpo.num_iterations,
            staleness=grpo.staleness,
            keep_rollouts=grpo.keep_rollouts,
            mask_truncated_completions=grpo.mask_truncated_completions,
            identity=identity,
        )
    if config.objective == "distill" and config.distill.on_policy:
        distill = config.distill
        return RolloutSettings(
            num_generations=distill.num_generations,
            max_completion_length=distill.max_completion_length,
            slots=distill.slots,
            temperature=distill.sampling_temperature,
            num_iterations=distill.num_iterations,
            # There are no rewards to be computed while steps are made.
            staleness=0,
            keep_rollouts=distill.keep_rollouts,
            mask_truncated_completions=distill.mask_truncated_completions,
            identity={"distill": {name: getattr(distill, name) for name in _OF_DISTILL}},
        )
    return None


def require_settings(config: RunConfig) -> RolloutSettings:
    """Return the rollout settings of a run that is known to sample."""
    settings = rollout_settings(config)
    assert settings is not None, "a run that learns from rollouts"
    return settings
