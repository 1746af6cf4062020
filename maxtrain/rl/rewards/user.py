"""Rewards of users, by dotted path: they run in the pool, so that a hang or crash affects its own
rows only.

They are called as TRL calls them: all arguments are keywords, and completions of conversational
prompts are lists of one message. Differences: `trainer_state` and other arguments that only a
trainer of TRL has are missing, and a function gets only the arguments that it has parameters for.
"""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.rl.rewards.contract import OK, RewardBatch, RowReward, checked
from maxtrain.rl.rewards.dotted import load_function
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.workers import ERROR, RewardWorkers

CALL = "maxtrain.rl.rewards.user:call"
BY = ("item", "group")
# Seconds in which an imported function must report its parameters.
_CHECK_SECONDS = 60.0
_REFUSED = "refused"
_PARAMETERS = "maxtrain.rl.rewards.user:required_parameters"
_STANDARD = ("prompts", "completions", "completion_ids")


def call(path: str, batch: tuple) -> list:
    """Return the rewards of some rows, as ["ok", [[value, outcome, detail], ...]], or what is wrong
    with the return value, as ["refused", message]. Runs in a worker."""
    reward = load_function(path)
    rows = RewardBatch(*batch)
    returned = reward(**_arguments(reward, rows))
    if inspect.iscoroutine(returned):
        returned = asyncio.run(returned)
    # An array of numpy or of a similar package.
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    try:
        return [OK, [list(each) for each in checked(path, returned, len(rows.completions))]]
    except DataError as error:
        return [_REFUSED, str(error)]


def required_parameters(path: str) -> list[str]:
    """Return the parameters without a default of a function. Positional-only ones have a trailing
    slash, since rewards are called by keywords. Runs in a worker."""
    try:
        parameters = inspect.signature(load_function(path)).parameters.values()
    except ValueError:
        # A function written in C may not have a signature.
        return []
    found = []
    for each in parameters:
        if each.kind in (each.VAR_KEYWORD, each.VAR_POSITIONAL) or each.default is not each.empty:
            continue
        found.append(each.name + "/" * (each.kind == each.POSITIONAL_ONLY))
    return found


def check(path: str, pool: RewardWorkers, columns: Sequence[str] | None = None) -> None:
    """Raise a ConfigError if a worker cannot import a function, or the function requires an
    argument that it will not get.

    Args:
        columns: names of the columns of the dataset; None: they are not known.
    """
    (result,) = pool.run(_PARAMETERS, [(path,)], imports=[path], seconds=_CHECK_SECONDS)
    if result.outcome == ERROR:
        raise ConfigError(
            f"{path} cannot be used as a reward: {result.detail} Fix the module, or the path to it."
        )
    for name in result.value or []:
        if name.endswith("/"):
            raise ConfigError(
                f"the reward {path} has the positional parameter {name[:-1]!r}, and rewards are "
                "called with keywords. Remove the `/` from its parameters."
            )
        if columns is not None and name not in (*_STANDARD, *columns):
            known = ", ".join(sorted(columns)) or "none"
            raise ConfigError(
                f"the reward {path} requires the argument {name!r}, which is neither one of "
                f"{', '.join(_STANDARD)} nor a column of the dataset, which has {known}. Add the "
                "column, or give the parameter a default."
            )


def _arguments(reward: Callable[..., Any], rows: RewardBatch) -> dict[str, Any]:
    """Return the arguments that a function takes, as TRL passes them."""
    completions: list[Any] = []
    for prompt, text in zip(rows.prompts, rows.completions, strict=True):
        if isinstance(prompt, str):
            completions.append(text)
        else:
            completions.append([{"role": "assistant", "content": text}])
    given = {"prompts": rows.prompts, "completions": completions}
    given |= {"completion_ids": rows.completion_ids} | dict(rows.columns)
    try:
        parameters = inspect.signature(reward).parameters
    except ValueError:
        return given
    if any(each.kind == each.VAR_KEYWORD for each in parameters.values()):
        return given
    return {name: value for name, value in given.items() if name in parameters}


def user(
    path: str,
    pool: RewardWorkers | None,
    num_generations: int,
    by: str = "item",
    on_failure: float | None = None,
    seconds: float | None = None,
    verifies: bool = False,
) -> Callable[[RewardBatch], list[RowReward]]:
    """Build the reward of a dotted path. What the function prints is lost, unless it goes to
    stderr.

    Args:
        num_generations: rows of a group.
        by: "item": each call has one row, and each row its own time limit; "group": each call has
            the rows of one prompt, so that the function can compare them, and they share their
            limits.
        on_failure: the reward of rows whose call took too long, crashed or raised an exception;
            None: the reward does not apply to them.
        seconds: time limit of a row; None: that of the pool.
        verifies: whether the function verifies answers: it returns 0 for a wrong answer, and
            another number for a correct one. Training records and evaluations report this as
            accuracy.

    Raises, when it is called: DataError: the function did not return a list with one number or None
        for each row. NaN and infinite numbers count as "invalid" and do not apply.
    """
    # RewardSet reads this option; calls do not need it.
    del verifies
    workers = required(pool, path)
    if by not in BY:
        raise ConfigError(f"{path}.by={by} is not known. Set it to item or group.")
    size = 1
    if by == "group":
        size = num_generations

    def score(batch: RewardBatch) -> list[RowReward]:
        starts = range(0, len(batch.completions), size)
        items = [(path, tuple(batch.rows(start, start + size))) for start in starts]
        limit = size * (seconds or workers.seconds)
        results = workers.run(CALL, items, seconds=limit, imports=[path])
        found: list[RowReward] = []
        for item, result in zip(items, results):
            rows = len(item[1][1])
            if result.outcome != OK:
                found += [RowReward(on_failure, result.outcome, result.detail)] * rows
                continue
            kind, values = result.value
            if kind == _REFUSED:
                raise DataError(values)
            found += [RowReward(*each) for each in values]
        return found

    return score
