"""Rewards as the config names them: `gsm8k`, `overlong(max_tokens=512, cache_tokens=64)`."""

import ast
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import ConfigError
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import GrpoConfig
from maxtrain.inference.text import decode_new
from maxtrain.rl.completions import Completion
from maxtrain.rl.prompts import Prompt
from maxtrain.rl.rewards.registry import RewardScores, RewardSet
from maxtrain.rl.rewards.verify import WARM_UP
from maxtrain.rl.rewards.workers import RewardWorkers

# Most processes that compute rewards at once.
_MOST_WORKERS = 8


class RewardCall(NamedTuple):
    """A reward by name, with its options."""

    name: str
    options: dict[str, Any]


def parse_reward(text: str) -> RewardCall:
    """Parse an element of grpo.rewards. Raise a ConfigError if its options are invalid."""
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


class Rewards:
    """The rewards that a config names, for all completions of a run, and their processes, which
    start when the first reward needs one. Must be closed.

    Args:
        config: the section that names the rewards.
        tokenizer: the tokenizer of prompts and completions.

    Raises:
        ConfigError: a reward does not exist.
    """

    def __init__(self, config: GrpoConfig, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        workers = min(os.cpu_count() or 1, _MOST_WORKERS)
        calls = [parse_reward(text) for text in config.rewards]
        preload = []
        if any(call.name == "math" for call in calls):
            # Otherwise the import would count against the time limit of the first answer of each
            # process.
            preload = [WARM_UP]
        self._pool = RewardWorkers(
            workers,
            seconds=config.reward_seconds,
            preload=preload,
            passed=config.reward_environment,
        )
        # Sets of rewards by the number of completions of a prompt: that of training, and one for
        # evaluations.
        self._sets: dict[int, RewardSet] = {}
        for num_generations in {1, config.num_generations}:
            self._sets[num_generations] = RewardSet(
                [call.name for call in calls],
                options={call.name: call.options for call in calls if call.options},
                weights=config.reward_weights or None,
                pool=self._pool,
                num_generations=num_generations,
            )

    def check(self, columns: Sequence[str] | None = None) -> None:
        """Raise a ConfigError if a reward cannot be imported, or requires an argument that is
        neither a standard one nor one of these columns; None: columns are not known."""
        self._sets[1].check(columns)

    def close(self) -> None:
        """End the processes of rewards; they start again with the next reward."""
        self._pool.close()

    def nothing(self) -> RewardScores:
        """Return the rewards of no completions."""
        rewards = self._sets[1].rewards
        return RewardScores(
            values=np.zeros((len(rewards), 0)),
            names=tuple(reward.name for reward in rewards),
            weights=tuple(reward.weight for reward in rewards),
            outcomes={},
            details={},
            right=np.zeros(0),
            judgements=[[] for _ in rewards],
        )

    def texts(self, prompts: Sequence[Prompt], made: Sequence[Completion]) -> list[str]:
        """Return the texts of completions, without stop ids; completions of a prompt are
        consecutive."""
        group = len(made) // len(prompts)
        found = []
        for number, completion in enumerate(made):
            ids = completion.ids
            if completion.has_ended:
                ids = ids[:-1]
            found.append(decode_new(self._tokenizer, prompts[number // group].ids, ids))
        return found

    def __call__(
        self,
        prompts: Sequence[Prompt],
        made: Sequence[Completion],
        texts: list[str],
        names: Sequence[str],
    ) -> RewardScores:
        """Compute the rewards of completions.

        Args:
            prompts: at least one prompt.
            made: the completions, equally many for each prompt; those of a prompt are consecutive.
            texts: the texts of the completions, from `texts`.
            names: the columns that rewards receive.

        Raises:
            ConfigError: a column that a reward needs is missing.
            DataError: a reward returned an invalid value.
        """
        group = len(made) // len(prompts)
        of_rows = [prompt for prompt in prompts for _ in range(group)]
        columns = {name: [prompt.columns.get(name) for prompt in of_rows] for name in names}
        ids = [completion.ids for completion in made]
        originals = [prompt.original for prompt in of_rows]
        return self._sets[group](originals, texts, ids, columns)


def column_names(prompts: Sequence[Prompt]) -> list[str]:
    """Return all columns that some of these prompts have."""
    return list(dict.fromkeys(name for prompt in prompts for name in prompt.columns))
