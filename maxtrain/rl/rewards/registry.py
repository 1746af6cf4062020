"""Registry of rewards by name, and sets of rewards that score a batch."""

import collections
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.rl.rewards import gsm8k, unsloth_compat, user, workers
from maxtrain.rl.rewards.code import code
from maxtrain.rl.rewards.contract import INVALID, OK, Reward, RewardBatch, RowReward, checked
from maxtrain.rl.rewards.dotted import is_dotted
from maxtrain.rl.rewards.exact import exact
from maxtrain.rl.rewards.length import length, overlong
from maxtrain.rl.rewards.mathematics import math
from maxtrain.rl.rewards.pattern import pattern
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.verify import CORRECT, SKIPPED
from maxtrain.rl.rewards.workers import RewardWorkers

# Names of several rewards, which may also be named one by one: gsm8k.correctness.
PROFILES: dict[str, dict[str, Reward]] = {
    "gsm8k": {
        "correctness": gsm8k.correctness,
        "integer": gsm8k.integer,
        "strict_format": gsm8k.strict_format,
        "soft_format": gsm8k.soft_format,
        "tags": gsm8k.tags,
    },
    "unsloth_compat": {
        each.__name__: each
        for each in (
            unsloth_compat.correctness_reward_func,
            unsloth_compat.int_reward_func,
            unsloth_compat.strict_format_reward_func,
            unsloth_compat.soft_format_reward_func,
            unsloth_compat.xmlcount_reward_func,
        )
    },
}
# Rewards with options that run in this process, and rewards that run in the pool.
SIMPLE: dict[str, Callable[..., Reward]] = {
    "exact": exact,
    "length": length,
    "overlong": overlong,
}
POOLED: dict[str, Callable[..., Callable[[RewardBatch], list[RowReward]]]] = {
    "math": math,
    "pattern": pattern,
    "code": code,
}

# Built-in rewards that decide whether an answer is correct. A wrong answer gets 0, except with
# options of `math`, whose outcome decides instead.
_MATH = "math"
VERIFYING = (
    "exact",
    _MATH,
    "code",
    "gsm8k.correctness",
    "unsloth_compat.correctness_reward_func",
)


# Outcomes of rows that a reward could not judge, for reasons other than the completion.
FAILURES = (workers.ERROR, workers.TIMEOUT, workers.CRASH, workers.SKIPPED, INVALID)


class NamedReward(NamedTuple):
    """A reward with its name in records, its weight, and whether it verifies answers."""

    name: str
    score: Callable[[RewardBatch], list[RowReward]]
    weight: float
    verifies: bool = False


class Judgement(NamedTuple):
    """The outcome of a reward for one row, with its detail text, which is mostly empty."""

    outcome: str
    detail: str


class RewardScores(NamedTuple):
    """The rewards of a batch of N rows by R rewards.

    Attributes:
        values: NaN if a reward does not apply.
        names: names of the rewards.
        weights: weights of the rewards.
        outcomes: number of rows with each outcome, by the name of a reward.
        details: first text about a problem, if there was one, by the name of a reward.
        right: 1 if every applicable verifying reward calls the answer correct, else 0; NaN if there
            is none.
        judgements: the judgement of each row, for each reward in the order of `names`.
    """

    values: Float[np.ndarray, "R N"]
    names: tuple[str, ...]
    weights: tuple[float, ...]
    outcomes: dict[str, dict[str, int]]
    details: dict[str, str]
    right: Float[np.ndarray, " N"]
    judgements: list[list[Judgement]]


class RewardSet:
    """A set of rewards that scores batches.

    Args:
        names: built-in names (`names_of_ours`), or dotted paths of users' functions,
            `package.module:function` or `package.module.function`.
        options: keyword arguments of a reward, by its name in `names`.
        weights: one for each of `names`; None: 1 each. The weight of a profile applies to each of
            its rewards.
        pool: the processes of `math`, `pattern`, `code` and users' rewards.
        num_generations: rows of a group, which are consecutive.

    Raises:
        ConfigError: a name, an option or a weight is invalid.
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        weights: Sequence[float] | None = None,
        pool: RewardWorkers | None = None,
        num_generations: int = 1,
    ):
        options = dict(options or {})
        if weights is None:
            weights = [1.0] * len(names)
        _check(names, options, weights)
        self._pool = pool
        self._users = [name for name in names if not _is_ours(name)]
        self.rewards: list[NamedReward] = []
        for name, weight in zip(names, weights):
            given = options.get(name, {})
            for own_name, score in _made(name, given, pool, num_generations):
                verifies = own_name in VERIFYING or bool(given.get("verifies"))
                self.rewards.append(NamedReward(own_name, score, float(weight), verifies))
        times = collections.Counter(reward.name for reward in self.rewards)
        if repeated := [name for name in times if times[name] > 1]:
            raise ConfigError(
                f"the reward {repeated[0]} is named twice. Name it once, with a larger weight."
            )

    def check(self, columns: Sequence[str] | None = None) -> None:
        """Run the checks that need the rewards themselves. Call it before a run begins.

        Args:
            columns: names of the columns of the dataset; None: they are not known.

        Raises:
            ConfigError: a user's function cannot be imported, or requires an argument that is
                neither a standard one nor a column; or this machine cannot confine the programs of
                `code`.
        """
        for path in self._users:
            user.check(path, required(self._pool, path), columns)
        for reward in self.rewards:
            if isinstance(reward.score, code):
                reward.score.check()

    def __call__(
        self,
        prompts: list,
        completions: list[str],
        completion_ids: list[list[int]],
        columns: Mapping[str, list],
    ) -> RewardScores:
        """Score the rows.

        Raises:
            ConfigError: a column is missing, or does not have one entry for each row.
            DataError: a reward did not return a list with one number for each row.
        """
        batch = RewardBatch(prompts, completions, completion_ids, columns)
        _check_rows(batch)
        values = np.empty((len(self.rewards), len(completions)), np.float64)
        outcomes = {}
        details = {}
        judgements = []
        verdicts = []
        for row, reward in zip(values, self.rewards):
            found = reward.score(batch)
            if reward.verifies:
                verdicts.append([_verdict(reward.name, each) for each in found])
            row[:] = [np.nan if each.value is None else each.value for each in found]
            judgements.append([Judgement(each.outcome, each.detail) for each in found])
            outcomes[reward.name] = dict(collections.Counter(each.outcome for each in found))
            texts = [each.detail for each in found if each.detail and each.outcome in FAILURES]
            texts += [each.detail for each in found if each.detail]
            if texts:
                details[reward.name] = texts[0]
        names = tuple(reward.name for reward in self.rewards)
        weights = tuple(reward.weight for reward in self.rewards)
        right = _right(verdicts, len(completions))
        return RewardScores(values, names, weights, outcomes, details, right, judgements)


def failures(scores: RewardScores) -> dict[str, int]:
    """Return how many rows each reward could not judge, for rewards with such rows."""
    found = {}
    for name, outcomes in scores.outcomes.items():
        count = sum(outcomes.get(outcome, 0) for outcome in FAILURES)
        if count:
            found[name] = count
    return found


def require_rewards(scores: RewardScores, what: str) -> None:
    """Raise a DataError if no reward applies to any row, so that there is no learning signal.

    Rows that got `on_failure` because their call failed do not count as rewarded.

    Args:
        what: the rows, for the message.
    """
    rows = scores.values.shape[1]
    failed = failures(scores)
    causes = []
    for name, row in zip(scores.names, scores.values, strict=True):
        applied = int((~np.isnan(row)).sum())
        if name not in names_of_ours():
            applied = min(applied, rows - failed.get(name, 0))
        if applied:
            return
        cause = scores.details.get(name) or "it returned None for all of them"
        outcomes = scores.outcomes.get(name, {})
        counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items())
        causes.append(f"{name} ({counts}): {cause}")
    if rows:
        raise DataError(
            f"no reward applies to any of the {rows} {what}. {'; '.join(causes)}. Fix the reward, "
            "or the column that it reads."
        )


def names_of_ours() -> list[str]:
    """Return the names of all built-in rewards."""
    parts = [f"{profile}.{part}" for profile, parts in PROFILES.items() for part in parts]
    return [*PROFILES, *parts, *SIMPLE, *POOLED]


def _verdict(name: str, scored: RowReward) -> float:
    """Return 1 if a verifying reward calls the answer correct, 0 if wrong, NaN if it cannot
    decide."""
    is_math = name == _MATH
    if scored.value is None and not is_math:
        return np.nan
    # Without a gold answer the value is None, and nothing went wrong.
    if is_math and scored.outcome in (SKIPPED, OK):
        return np.nan
    if is_math:
        return float(scored.outcome == CORRECT)
    # The value of a failed user's call says nothing about the answer.
    if name not in names_of_ours() and scored.outcome != OK:
        return np.nan
    return float(scored.value != 0)


def _right(verdicts: list[list[float]], rows: int) -> np.ndarray:
    """Return whether all known verdicts call each answer correct; see `RewardScores`."""
    if not verdicts:
        return np.full(rows, np.nan)
    of_rewards = np.array(verdicts, np.float64)
    is_known = ~np.isnan(of_rewards)
    is_right = np.where(is_known, of_rewards, 1.0).min(axis=0)
    return np.where(is_known.any(axis=0), is_right, np.nan)


def _is_ours(name: str) -> bool:
    """Return whether a name is that of a built-in reward."""
    return name in names_of_ours()


def _made(
    name: str, options: Mapping[str, Any], pool: RewardWorkers | None, num_generations: int
) -> list[tuple[str, Callable[[RewardBatch], list[RowReward]]]]:
    """Build the rewards that a name stands for, each with its own name."""
    profile, _, part = name.partition(".")
    if _is_ours(name) and profile in PROFILES:
        if options:
            raise ConfigError(f"the reward {name} has no options. Remove {', '.join(options)}.")
        parts = list(PROFILES[profile])
        if part:
            parts = [part]
        return [_in_process(f"{profile}.{each}", PROFILES[profile][each]) for each in parts]
    if name in SIMPLE:
        _check_options(name, SIMPLE[name], options, ())
        return [_in_process(name, SIMPLE[name](**options))]
    if name in POOLED:
        _check_options(name, POOLED[name], options, (pool,))
        return [(name, POOLED[name](pool, **options))]
    given = (name, pool, num_generations)
    _check_options(name, user.user, options, given)
    return [(name, user.user(*given, **options))]


def _in_process(name: str, reward: Reward) -> tuple[str, Callable[[RewardBatch], list[RowReward]]]:
    return name, functools.partial(_scored_here, name, reward)


def _scored_here(name: str, reward: Reward, batch: RewardBatch) -> list[RowReward]:
    return checked(name, batch.call(reward), len(batch.completions))


def _check(
    names: Sequence[str], options: Mapping[str, Mapping[str, Any]], weights: Sequence[float]
) -> None:
    """Raise a ConfigError if a name, an option or a weight is invalid."""
    if not names:
        raise ConfigError("there is no reward. Name one, such as gsm8k.")
    for name in names:
        if not _is_ours(name) and (not is_dotted(name) or name.split(".")[0] in PROFILES):
            raise ConfigError(
                f"there is no reward {name!r}. Name one of {', '.join(names_of_ours())}, or a "
                "function of yours by its dotted path, such as my_rewards:brevity."
            )
    if unused := sorted(set(options) - set(names)):
        raise ConfigError(
            f"there are options for {unused[0]}, which is not among the rewards "
            f"{', '.join(names)}. Name it there, or remove its options."
        )
    if len(weights) != len(names):
        raise ConfigError(
            f"there are {len(weights)} weights for {len(names)} rewards: there must be one "
            "for each. Set as many, or none for 1 each."
        )


def _check_options(
    name: str, factory: Callable, options: Mapping[str, Any], given: tuple[Any, ...]
) -> None:
    """Raise a ConfigError if a reward does not accept these options, or lacks one."""
    signature = inspect.signature(factory)
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        known = ", ".join(list(signature.parameters)[len(given) :])
        raise ConfigError(
            f"the options of the reward {name}: {error}. Its options are {known}."
        ) from error


def _check_rows(batch: RewardBatch) -> None:
    """Raise a ConfigError if a column does not have one entry for each row."""
    rows = len(batch.completions)
    lists = {"prompts": batch.prompts, "completion_ids": batch.completion_ids}
    for name in batch.columns:
        if name in RewardBatch._fields:
            raise ConfigError(
                f"the dataset has a column {name!r}, which is an argument of every reward. Rename "
                "the column."
            )
    for name, values in (lists | dict(batch.columns)).items():
        if len(values) != rows:
            raise ConfigError(
                f"{name} has {len(values)} entries for {rows} completions: every row needs one. "
                "Repeat those of a prompt for each of its completions."
            )
