"""How a rollout is made: prompts -> completions -> rewards -> advantages -> log-probabilities.

Rewards are computed in a thread, so that steps may be made between `start` and `collect`. With
grpo.dynamic_sampling, groups whose rewards are all equal teach nothing, and are replaced by groups
of prompts that the plan reads later. These are completed by the weights that are about to train,
also where older ones have sampled the rest one rollout ahead: each token has the log-probability of
what has sampled it. The prompts are read again in their own turn: if a step moved on in the data by
as many prompts as it happened to need, what a step reads and when a pass over the data ends would
depend on all that was sampled before.
"""

import concurrent.futures
import itertools
import time
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from data_pipeline.loader.loader import TrainingData
from maxtrain import failpoints
from maxtrain.config.schema import GrpoConfig, PpoConfig
from maxtrain.observe.progress import Progress
from maxtrain.observe.samples import as_text
from maxtrain.rl.advantages import advantages, has_signal
from maxtrain.rl.completions import completions_of
from maxtrain.rl.prompts import Prompt, later_prompts, prompts_of, read_together
from maxtrain.rl.returns import with_returns
from maxtrain.rl.reward_calls import Rewards
from maxtrain.rl.reward_numbers import reward_numbers
from maxtrain.rl.rewarder import Counted, Rewarder, joined
from maxtrain.rl.rewards.registry import Scores, failures, require_rewards
from maxtrain.rl.rollout import Rollout
from maxtrain.rl.sampler import Sampler
from maxtrain.train_step.state import TrainState


class PendingRollout(NamedTuple):
    """A rollout as it was sampled, and its rewards on their way; None: it gets none."""

    steps: range
    prompts: list[Prompt]
    rollout: Rollout
    rewards: concurrent.futures.Future[Counted] | None = None


class RolloutWorker:
    """Makes rollouts. All processes call its functions in the same order.

    Args:
        config: of the run.
        ppo: how advantages of tokens are made; None: those of completions are, by their groups.
        data: the prompts.
        sampler: of the completions.
        rewarder: of their rewards.
        progress: what is told of it.
    """

    def __init__(
        self,
        config: GrpoConfig,
        ppo: PpoConfig | None,
        data: TrainingData,
        sampler: Sampler,
        rewarder: Rewarder,
        progress: Progress,
    ):
        self._config = config
        self._ppo = ppo
        self._data = data
        self._sampler = sampler
        self._rewarder = rewarder
        self._progress = progress
        # Names of rewards of which a failure was reported.
        self._reported: set[str] = set()

    @property
    def rewards(self) -> Rewards:
        """Of completions."""
        return self._rewarder.rewards

    def close(self) -> None:
        """Ends the processes of rewards."""
        self._rewarder.close()

    def start(self, steps: range, state: TrainState, about: dict[str, Any]) -> PendingRollout:
        """Samples completions of what these steps read, and begins with their rewards.

        `about`: more that is known of the rollout.
        """
        prompts = self._prompts(steps)
        self._progress.phase("sampling")
        slots = self._slots(prompts)
        sampled = self._sampler.sampled(prompts, steps.start, 0, state, slots)
        self._progress.phase("")
        return self._pending(steps, prompts, sampled._replace(about=sampled.about | about))

    def resume_pending(self, steps: range, sampled: Rollout) -> PendingRollout:
        """Likewise, where completions were sampled by an earlier launch."""
        return self._pending(steps, self._prompts(steps), sampled)

    def collect(self, pending: PendingRollout, state: TrainState, about: dict[str, Any]) -> Rollout:
        """The rollout with rewards, advantages and the log-probabilities by the weights of this
        state.

        `about`: more that is known of it.
        """
        self._progress.phase("computing rewards")
        assert pending.rewards is not None
        failpoints.hit("rewards", pending.steps.start + 1)
        counted = self._rewarder.collect(pending.rewards)
        self._report_failures(counted.scores)
        require_rewards(counted.scores, "completions of this rollout")
        numbers = _numbers(pending.rollout, counted.scores)
        if self._ppo is None:
            signals = self._has_signal(counted.scores)
            numbers["groups_without_signal"] = float((~signals).mean())
        of_first = completions_of(pending.rollout.taken([0]))
        texts = [
            as_text(pending.prompts[0].original),
            self._rewarder.rewards.texts(pending.prompts[:1], of_first)[0],
        ]
        rollout = pending.rollout
        if self._config.dynamic_sampling:
            rollout, counted, more = self._filled(pending, counted, state)
            numbers |= more
        scores = counted.scores
        rollout = rollout._replace(rewards=scores.values)
        if self._ppo is None:
            found = advantages(
                scores.values,
                self._config.num_generations,
                weights=scores.weights,
                scale_rewards=self._config.scale_rewards,
            )
            rollout = rollout._replace(advantages=found.values)
        self._progress.phase("scoring")
        failpoints.hit("scoring", pending.steps.start + 1)
        began = time.perf_counter()
        rollout = self._sampler.with_scores(rollout, state)
        if self._ppo is not None:
            masks = self._config.mask_truncated_completions
            rollout, of_values = with_returns(rollout, scores.weights, self._ppo, masks)
            numbers |= of_values
        first_seconds = pending.rollout.about["sampling_seconds"]
        numbers = {"sampling_seconds": first_seconds} | numbers
        numbers |= {
            "sampled_tokens_per_second": float(pending.rollout.lengths.sum()) / first_seconds,
            "reward_seconds": counted.seconds,
            "scoring_seconds": time.perf_counter() - began,
        }
        for name in ("sampling_passes", "tokens_replaced"):
            if name in pending.rollout.about:
                numbers[name] = float(pending.rollout.about[name])
        self._progress.phase("")
        about = about | {
            "names": list(scores.names),
            "weights_of_rewards": list(scores.weights),
            "outcomes": scores.outcomes,
            "details": scores.details,
            "judgements": [list(map(list, of_reward)) for of_reward in scores.judgements],
            "texts": texts,
            "numbers": numbers,
        }
        return rollout._replace(about=rollout.about | about)

    def _report_failures(self, scores: Scores) -> None:
        """Says of each reward that it has failed, the first time, with the first cause."""
        for name, count in failures(scores).items():
            if name in self._reported:
                continue
            self._reported.add(name)
            self._progress.message(
                f"The reward {name} failed for {count:,} of {scores.values.shape[1]:,} "
                f"completions: {scores.details.get(name, 'no cause is known')}. Further failures "
                f"are counted in metrics.jsonl, as reward_outcomes/{name}/...",
                style="yellow",
            )

    def _pending(self, steps: range, prompts: list[Prompt], sampled: Rollout) -> PendingRollout:
        return PendingRollout(steps, prompts, sampled, self._rewarder.start(prompts, sampled))

    def _prompts(self, steps: range) -> list[Prompt]:
        """Those that the plan reads at these steps."""
        return read_together(prompts_of, self._data, steps)

    def _slots(self, prompts: list[Prompt]) -> int:
        """Completions of a rollout of these prompts that are made at once, also where further
        prompts are fewer: another number has programs of its own."""
        return min(len(prompts) * self._config.num_generations, self._config.slots)

    def _has_signal(self, scores: Scores) -> Bool[np.ndarray, "P"]:
        return has_signal(scores.values, self._config.num_generations, scores.weights)

    def _filled(
        self, pending: PendingRollout, counted: Counted, state: TrainState
    ) -> tuple[Rollout, Counted, dict[str, float]]:
        """A rollout in which groups without a signal are replaced, as far as rounds of sampling
        have found others; its rewards; and what is recorded of it."""
        rollout = pending.rollout
        scores = counted.scores
        reward_seconds = counted.seconds
        sampling_seconds = 0.0
        count = len(pending.prompts)
        later = later_prompts(self._data, pending.steps)
        for _ in range(self._config.dynamic_sampling):
            missing = count - int(self._has_signal(scores).sum())
            if missing <= 0:
                break
            prompts = read_together(itertools.islice, later, missing)
            before = len(rollout.prompt_lengths)
            self._progress.phase(f"sampling {missing:,} more prompts")
            slots = self._slots(pending.prompts)
            more = self._sampler.sampled(prompts, pending.steps.start, before, state, slots)
            sampling_seconds += more.about["sampling_seconds"]
            counted = self._rewarder.collect(self._rewarder.start(prompts, more))
            reward_seconds += counted.seconds
            rollout = rollout.joined(more)
            scores = joined(scores, counted.scores)
        places = filled_places(self._has_signal(scores), count)
        group = self._config.num_generations
        values = scores.values.reshape(len(scores.values), -1, group)[:, places]
        numbers = {
            "further_prompts": float(len(rollout.prompt_lengths) - count),
            "groups_replaced": float(np.mean(np.array(places) >= count)),
            "sampling_seconds": rollout.about["sampling_seconds"] + sampling_seconds,
        }
        right = scores.right.reshape(-1, group)[places].reshape(-1)
        rows = (np.array(places)[:, None] * group + np.arange(group)).reshape(-1).tolist()
        judgements = [[of_reward[row] for row in rows] for of_reward in scores.judgements]
        scores = scores._replace(
            values=values.reshape(len(values), -1), right=right, judgements=judgements
        )
        return rollout.taken(places), Counted(scores, reward_seconds), numbers


def filled_places(signals: Bool[np.ndarray, "P"], count: int) -> list[int]:
    """Which group is at each of `count` places: its own, but for one without a signal the next of
    those behind that has one; while there are any.

    Args:
        signals: of all groups, of which the first `count` are those of the places.
        count: of places.
    """
    others = iter(np.flatnonzero(signals[count:]) + count)
    places = []
    for number in range(count):
        if signals[number]:
            places.append(number)
        else:
            places.append(int(next(others, number)))
    return places


def _numbers(rollout: Rollout, scores: Scores) -> dict[str, float]:
    """What is recorded of the completions of what the plan reads, but for times."""
    return reward_numbers(scores) | length_numbers(rollout)


def length_numbers(rollout: Rollout) -> dict[str, float]:
    """What is recorded of the lengths of completions."""
    return {
        "completion_length": float(rollout.lengths.mean()),
        "longest_completion": float(rollout.lengths.max()),
        "truncated": float(rollout.truncated.mean()),
    }
