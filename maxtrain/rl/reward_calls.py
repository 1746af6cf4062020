"""Rewards as configs name them: `gsm8k`, `overlong(max_tokens=512, cache_tokens=64)`."""

import ast
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError


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
