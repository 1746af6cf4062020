"""Rewards of the number of tokens: `length` favours short completions in general, and `overlong`
only penalises completions near the limit."""

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.contract import Reward


def length(max_tokens: int) -> Reward:
    """Build the reward -L / max_tokens, at least -1, for a completion of L tokens."""
    if max_tokens < 1:
        raise ConfigError(
            f"length.max_tokens={max_tokens} must be at least 1. Set it to max_completion_length."
        )

    def score(
        prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> list[float | None]:
        return [max(-1.0, -len(ids) / max_tokens) for ids in completion_ids]

    return score


def overlong(max_tokens: int, cache_tokens: int) -> Reward:
    """Build DAPO's soft penalty for overlong completions, for L tokens:

        min(0, max(-1, (max_tokens - cache_tokens - L) / cache_tokens))

    The reward is 0 up to max_tokens - cache_tokens, and -1 from max_tokens on.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 1 <= cache_tokens < max_tokens:
        raise ConfigError(
            f"overlong.cache_tokens={cache_tokens} must be at least 1 and below "
            f"overlong.max_tokens={max_tokens}: it is the part in which the penalty grows. Set it "
            "to a fifth of that."
        )

    def score(
        prompts: list, completions: list[str], completion_ids: list[list[int]], **columns: list
    ) -> list[float | None]:
        free = max_tokens - cache_tokens
        rewards: list[float | None] = []
        for ids in completion_ids:
            rewards.append(min(0.0, max(-1.0, (free - len(ids)) / cache_tokens)))
        return rewards

    return score
