"""Rollouts without rewards, for objectives that judge the tokens of completions themselves."""

from typing import Any

import numpy as np

from data_pipeline.loader.loader import TrainingData
from maxtrain.config.rollouts import RolloutSettings
from maxtrain.inference.text import decode_new
from maxtrain.observe.progress import Progress
from maxtrain.observe.samples import as_text
from maxtrain.rl.maker import PendingRollout, length_numbers
from maxtrain.rl.prompts import prompts_of, read_together
from maxtrain.rl.rollout import Rollout
from maxtrain.rl.sampler import Sampler
from maxtrain.train_step.state import TrainState


class UnrewardedRolloutWorker:
    """Worker for rollouts without rewards, advantages and old log-probabilities: prompts ->
    completions.

    Args:
        settings: rollout settings of the run.
        data: the prompts.
        sampler: samples the completions.
        progress: receives the log lines.
    """

    def __init__(
        self, settings: RolloutSettings, data: TrainingData, sampler: Sampler, progress: Progress
    ):
        self._settings = settings
        self._data = data
        self._sampler = sampler
        self._progress = progress

    def close(self) -> None:
        """Do nothing; there are no processes to end."""

    def start(self, steps: range, state: TrainState, about: dict[str, Any]) -> PendingRollout:
        """Sample completions for these steps.

        `about`: further entries of the rollout's record.
        """
        prompts = read_together(prompts_of, self._data, steps)
        self._progress.phase("sampling")
        slots = min(len(prompts) * self._settings.num_generations, self._settings.slots)
        sampled = self._sampler.sampled(prompts, steps.start, 0, state, slots)
        self._progress.phase("")
        return PendingRollout(steps, prompts, sampled._replace(about=sampled.about | about))

    def resume_pending(self, steps: range, sampled: Rollout) -> PendingRollout:
        """Resume a rollout whose completions an earlier launch sampled."""
        return PendingRollout(steps, read_together(prompts_of, self._data, steps), sampled)

    def collect(self, pending: PendingRollout, state: TrainState, about: dict[str, Any]) -> Rollout:
        """Return the rollout with its complete record.

        `about`: further entries of the rollout's record.
        """
        del state
        rollout = pending.rollout
        first = pending.prompts[0]
        ids = rollout.tokens[: rollout.lengths[0]].tolist()
        if not rollout.truncated[0]:
            ids = ids[:-1]
        seconds = rollout.about["sampling_seconds"]
        numbers = {"sampling_seconds": seconds} | length_numbers(rollout)
        numbers["sampled_tokens_per_second"] = float(rollout.lengths.sum()) / seconds
        about = about | {
            "names": [],
            "weights_of_rewards": [],
            "outcomes": {},
            "details": {},
            "texts": [as_text(first.original), decode_new(self._data.tokenizer, first.ids, ids)],
            "numbers": numbers,
        }
        # The objective needs no log-probabilities by the training forward pass.
        nothing = np.zeros(0, np.float32)
        return rollout._replace(old=nothing, about=rollout.about | about)
