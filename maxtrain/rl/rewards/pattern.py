"""The reward `pattern`: a completion matches a regular expression. It runs in the pool, since an
expression may take exponential time."""

import re
from collections.abc import Callable

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.contract import OK, RewardBatch, RowReward
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.workers import RewardWorkers

MATCHES = "maxtrain.rl.rewards.pattern:matches"
WHERE = ("whole", "begin", "anywhere")


def matches(completion: str, regex: str, where: str) -> bool:
    """Return whether a completion matches. Runs in a worker."""
    expression = re.compile(regex, re.DOTALL)
    if where == "whole":
        return expression.fullmatch(completion) is not None
    if where == "begin":
        return expression.match(completion) is not None
    return expression.search(completion) is not None


def pattern(
    pool: RewardWorkers | None,
    regex: str,
    where: str = "whole",
    reward: float = 1.0,
    on_failure: float | None = 0.0,
) -> Callable[[RewardBatch], list[RowReward]]:
    """Build a reward for completions that match a regular expression, in which `.` also matches
    newlines; any other completion gives 0.

    Args:
        regex: the expression, in the syntax of Python's `re`.
        where: "whole": the whole completion matches; "begin": its beginning; "anywhere": a part.
        reward: the reward of a match.
        on_failure: the reward of a completion for which the expression took too long; None: the
            reward does not apply.
    """
    workers = required(pool, "pattern")
    if where not in WHERE:
        raise ConfigError(f"pattern.where={where} is not known. Set it to {', '.join(WHERE)}.")
    try:
        re.compile(regex, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"pattern.regex={regex!r} is no regular expression ({error}). Correct it; "
            "`re` of Python says how they are written."
        ) from error

    def score(batch: RewardBatch) -> list[RowReward]:
        items = [(text, regex, where) for text in batch.completions]
        found = []
        for result in workers.run(MATCHES, items):
            if result.outcome == OK:
                found.append(RowReward(reward * result.value))
            else:
                found.append(RowReward(on_failure, result.outcome, result.detail))
        return found

    return score
