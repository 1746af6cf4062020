"""Evaluation on prompts: each prompt is completed once, greedily, and the rewards of its completion
are recorded. Rewards that verify answers give the accuracy."""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from data_pipeline.shards import TokenShards
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import GrpoConfig
from maxtrain.inference.engine import Engine
from maxtrain.inference.generation import Generation
from maxtrain.inference.sampling import Sampling
from maxtrain.models.decoder import Decoder
from maxtrain.observe.samples import CompletionSample, as_text
from maxtrain.parallel.agreement import raise_together
from maxtrain.rl.advantages import weighted_sum
from maxtrain.rl.completions import Completion, GenerationConfig, GenerationRequest, complete
from maxtrain.rl.prompts import Prompt, read_prompt, read_together
from maxtrain.rl.reward_calls import Rewards, column_names
from maxtrain.rl.reward_numbers import reward_numbers
from maxtrain.rl.rewards.registry import RewardScores, require_rewards
from maxtrain.rl.sampler import stop_ids

# The metric that decides the best evaluation of a set of prompts; higher is better.
REWARD = "reward"


class ScoredCompletions(NamedTuple):
    """The completions of N prompts by a model, with their scores.

    Attributes:
        prompts: the prompts.
        texts: the completions.
        lengths: the tokens of each completion, with the stop id that ended it.
        truncated: whether a completion was truncated at the longest length.
        failed: number of completions with a log-probability that was not finite.
        scores: the rewards of the completions.
        seconds: duration of the evaluation.
    """

    prompts: Sequence[Prompt]
    texts: list[str]
    lengths: list[int]
    truncated: Bool[np.ndarray, " N"]
    failed: int
    scores: RewardScores
    seconds: float

    def record(self) -> dict[str, Any]:
        """Return the metrics of an evaluation. `reward` is NaN if a completion failed, since the
        weights cannot be used then; it is missing if no reward applies to any completion."""
        numbers: dict[str, Any] = dict(reward_numbers(self.scores))
        if self.failed:
            numbers[REWARD] = math.nan
        numbers["completion_length"] = float(np.mean(self.lengths))
        numbers["longest_completion"] = max(self.lengths)
        numbers["truncated"] = float(self.truncated.mean())
        numbers["prompts"] = len(self.prompts)
        return numbers

    def samples(self, name: str, count: int) -> list[CompletionSample]:
        """Return the first completions as samples.

        Args:
            name: the set that the prompts are from.
            count: most samples.
        """
        values = self.scores.values
        totals = weighted_sum(values, np.array(self.scores.weights, np.float64))
        found = []
        for i, prompt in enumerate(self.prompts[:count]):
            rewards = {
                name: _number(row[i]) for name, row in zip(self.scores.names, values, strict=True)
            }
            found.append(
                CompletionSample(
                    set=name,
                    number=i,
                    prompt=as_text(prompt.original),
                    completion=self.texts[i],
                    reward=_number(totals[i]),
                    rewards=rewards,
                    length=self.lengths[i],
                    truncated=bool(self.truncated[i]),
                )
            )
        return found


class RewardedPromptEvaluator:
    """Asks a model for completions, and rewards them.

    Args:
        config: settings, such as the longest completion.
        tokenizer: the tokenizer of prompts and model.
        slots: completions that are generated at once. Each number needs its own compiled programs.
        rewards: the rewards of completions.
    """

    def __init__(self, config: GrpoConfig, tokenizer: Tokenizer, slots: int, rewards: Rewards):
        self._longest = config.max_completion_length
        self._tokenizer = tokenizer
        self._slots = slots
        self._rewards = rewards

    def __call__(
        self,
        model: Decoder,
        shards: TokenShards,
        count: int,
        sign_of_life: Callable[[], object] = lambda: None,
    ) -> ScoredCompletions:
        """Complete the first prompts of a set, and reward the completions.

        Args:
            model: on one device, or sharded over the current mesh.
            shards: the prompts.
            count: number of prompts, at least 1.
            sign_of_life: called every few tokens. An exception that it raises ends the evaluation.
        """
        began = time.perf_counter()
        prompts = read_together(first_prompts, shards, count)
        ends = stop_ids(self._tokenizer, shards)
        generations = likeliest(model, prompts, ends, self._longest, self._slots, sign_of_life)
        made = [Completion.of(each) for each in generations]
        texts = self._rewards.texts(prompts, made)
        scores = None
        error = None
        try:
            scores = self._rewards(prompts, made, texts, column_names(prompts))
            require_rewards(scores, "completions of this evaluation")
        except Exception as problem:
            error = problem
        # An error of one process is raised in all processes.
        raise_together(error)
        assert scores is not None
        return ScoredCompletions(
            prompts=prompts,
            texts=texts,
            lengths=[len(each.ids) for each in made],
            truncated=np.array([not each.has_ended for each in made]),
            failed=sum(each.reason == "failed" for each in generations),
            scores=scores,
            seconds=time.perf_counter() - began,
        )


def likeliest(
    model: Decoder,
    prompts: Sequence[Prompt],
    stop_ids: Sequence[int],
    longest: int,
    slots: int,
    sign_of_life: Callable[[], object],
) -> list[Generation]:
    """Complete each prompt greedily.

    Args:
        model: on one device, or sharded over the current mesh.
        prompts: the prompts to complete.
        stop_ids: tokens that end a completion.
        longest: most tokens of a completion.
        slots: completions that are generated at once.
        sign_of_life: called every few tokens. An exception that it raises ends the generation.
    """
    generation = GenerationConfig(Sampling(temperature=0.0), longest, tuple(stop_ids))
    requests = [GenerationRequest(prompt.ids, row) for row, prompt in enumerate(prompts)]
    engine = Engine(model, slots=slots, eager=True)
    return complete(engine, requests, generation, sign_of_life)


def first_prompts(shards: TokenShards, count: int) -> list[Prompt]:
    """Read the first prompts of a set."""
    return [read_prompt(shards, number) for number in range(count)]


def _number(value: float) -> float | None:
    """Return a number, or None for NaN."""
    if math.isnan(value):
        return None
    return float(value)
