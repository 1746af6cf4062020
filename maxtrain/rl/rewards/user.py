"""Rewards of users, by a dotted path: they run in the pool, so that one that hangs or crashes costs
its own rows only."""

from collections.abc import Callable

from data_pipeline.errors import ConfigError, DataError
from maxtrain.rl.rewards.contract import OK, Batch, Scored, checked
from maxtrain.rl.rewards.dotted import load_function
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.workers import ERROR, RewardWorkers

CALL = "maxtrain.rl.rewards.user:call"
BY = ("item", "group")
_REFUSED = "refused"
# A function that does nothing.
_NOTHING = "builtins:list"


def call(path: str, batch: tuple) -> list:
    """In a worker: the rewards of some rows, as ["ok", [[value, outcome, detail], ...]], or what is
    wrong with what the function returned, as ["refused", message]."""
    reward = load_function(path)
    rows = Batch(*batch)
    returned = rows.call(reward)
    # An array of numpy, or of another package that has this.
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    try:
        return [OK, [list(each) for each in checked(path, returned, len(rows.completions))]]
    except DataError as error:
        return [_REFUSED, str(error)]


def check(path: str, pool: RewardWorkers) -> None:
    """ConfigError: a worker cannot import the function of a path."""
    (result,) = pool.run(_NOTHING, [()], imports=[path])
    if result.outcome == ERROR:
        raise ConfigError(
            f"{path} cannot be used as a reward: {result.detail} Mend the module, or the path to "
            "it."
        )


def user(
    path: str,
    pool: RewardWorkers | None,
    num_generations: int,
    by: str = "item",
    on_failure: float | None = None,
    seconds: float | None = None,
    verifies: bool = False,
) -> Callable[[Batch], list[Scored]]:
    """The reward of a dotted path. What the function prints is lost, unless it goes to stderr.

    Args:
        num_generations: rows of a group.
        by: "item": each call of the function has one row, and each row its own limit; "group": each
            call has the rows of one prompt, so that the function can compare them, and all of them
            share their limits.
        on_failure: the reward of rows whose call took too long, crashed or raised an exception;
            None: it does not apply to them.
        seconds: limit of a row; None: that of the pool.
        verifies: the function tells whether an answer is right: it gives 0 to one that is wrong,
            and something else to one that is right. Records of training and evaluations count that
            as accuracy.

    Raises, when it is called:
        DataError: the function returned something else than a list of as many numbers (or None) as
            rows. NaN and infinite numbers count as "invalid" and do not apply.
    """
    # Of the values, not of the calls: see RewardSet.
    del verifies
    workers = required(pool, path)
    if by not in BY:
        raise ConfigError(f"{path}.by={by} is not known. Set it to item or group.")
    size = 1
    if by == "group":
        size = num_generations

    def score(batch: Batch) -> list[Scored]:
        starts = range(0, len(batch.completions), size)
        items = [(path, tuple(batch.rows(start, start + size))) for start in starts]
        limit = size * (seconds or workers.seconds)
        results = workers.run(CALL, items, seconds=limit, imports=[path])
        found: list[Scored] = []
        for item, result in zip(items, results):
            rows = len(item[1][1])
            if result.outcome != OK:
                found += [Scored(on_failure, result.outcome, result.detail)] * rows
                continue
            kind, values = result.value
            if kind == _REFUSED:
                raise DataError(values)
            found += [Scored(*each) for each in values]
        return found

    return score
