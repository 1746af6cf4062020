"""Rewards as configs name them: `gsm8k`, `overlong(max_tokens=512, cache_tokens=64)`."""

import ast
import os
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import GrpoConfig
from maxtrain.rl.rewards.registry import RewardSet
from maxtrain.rl.rewards.verify import WARM_UP
from maxtrain.rl.rewards.workers import RewardWorkers

# Completions whose rewards are computed by so many processes at once.
_MOST_WORKERS = 8


class RewardCall(NamedTuple):
    """A reward by name, and its options."""

    name: str
    options: dict[str, Any]


def parse_reward(text: str) -> RewardCall:
    """What an element of grpo.rewards names. ConfigError: options that are none."""
    name, bracket, rest = text.strip().partition("(")
    name = name.strip()
    if not bracket:
        return RewardCall(name, {})
    options = {}
    try:
        call = ast.parse(f"f({rest}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            raise ValueError("they are not name=value")
        for keyword in call.keywords:
            if keyword.arg is None:
                raise ValueError("they are not name=value")
            options[keyword.arg] = ast.literal_eval(keyword.value)
    except (ValueError, SyntaxError) as error:
        raise ConfigError(
            f"grpo.rewards has {text!r}, whose options can't be read ({error}). Write it as "
            "'overlong(max_tokens=512, cache_tokens=64)'."
        ) from error
    return RewardCall(name, options)


def make_pool(config: GrpoConfig) -> RewardWorkers:
    """The processes in which rewards of a config run. To be closed."""
    workers = min(os.cpu_count() or 1, _MOST_WORKERS)
    preload = []
    if any(parse_reward(text).name == "math" for text in config.rewards):
        # Else the first answer of each process would pay for it, out of its own seconds.
        preload = [WARM_UP]
    return RewardWorkers(workers, seconds=config.reward_seconds, preload=preload)


def make_rewards(config: GrpoConfig, pool: RewardWorkers, num_generations: int) -> RewardSet:
    """The rewards of a config, for so many completions of each prompt. ConfigError: there is no
    such reward."""
    calls = [parse_reward(text) for text in config.rewards]
    return RewardSet(
        [call.name for call in calls],
        options={call.name: call.options for call in calls if call.options},
        weights=config.reward_weights or None,
        pool=pool,
        num_generations=num_generations,
    )
