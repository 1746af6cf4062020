"""Making of a rollout: prompts -> completions -> rewards -> advantages -> log-probabilities.

Rewards are computed in a thread, so that steps may be made between `begin` and `finish`.

With grpo.dynamic_sampling, groups whose rewards are all equal have no learning signal, and are
replaced by groups of prompts that the plan reads later. These are completed by the weights that are
about to train, even if older weights sampled the rest one rollout ahead; each token has the
log-probability of the weights that sampled it. The later prompts are read again in their own turn.
Otherwise the prompts of a step, and the end of an epoch, would depend on all earlier samples.
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
from maxtrain.rl.rewarder import Rewarder, TimedScores, joined
from maxtrain.rl.rewards.registry import RewardScores, failures, require_rewards
from maxtrain.rl.rollout import Rollout
from maxtrain.rl.sampler import Sampler
from maxtrain.train_step.state import TrainState


class PendingRollout(NamedTuple):
    """A rollout as it was sampled, and its rewards on their way; None: it gets none."""

    steps: range
    prompts: list[Prompt]
    rollout: Rollout
    rewards: concurrent.futures.Future[TimedScores] | None = None


class RolloutWorker:
    """Makes rollouts. All processes call its functions in the same order.

    Args:
        config: the section `grpo` of the run's config.
        ppo: settings of per-token advantages; None: advantages per completion, by groups.
        data: the prompts.
        sampler: samples the completions.
        rewarder: computes the rewards.
        progress: receives the log lines.
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
        # Names of rewards whose failure was reported.
        self._reported: set[str] = set()

    @property
    def rewards(self) -> Rewards:
        """Return the rewards of completions."""
        return self._rewarder.rewards

    def close(self) -> None:
        """End the processes of rewards."""
        self._rewarder.close()

    def start(self, steps: range, state: TrainState, about: dict[str, Any]) -> PendingRollout:
        """Sample completions for these steps, and start computing their rewards.

        `about`: further entries of the rollout's record.
        """
        prompts = self._prompts(steps)
        self._progress.phase("sampling")
        slots = self._slots(prompts)
        sampled = self._sampler.sampled(prompts, steps.start, 0, state, slots)
        self._progress.phase("")
        return self._pending(steps, prompts, sampled._replace(about=sampled.about | about))

    def resume_pending(self, steps: range, sampled: Rollout) -> PendingRollout:
        """Resume a rollout whose completions an earlier launch sampled."""
        return self._pending(steps, self._prompts(steps), sampled)

    def collect(self, pending: PendingRollout, state: TrainState, about: dict[str, Any]) -> Rollout:
        """Return the rollout with rewards, advantages and the log-probabilities by the weights of
        this state.

        `about`: further entries of the rollout's record.
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

    def _report_failures(self, scores: RewardScores) -> None:
        """Log the first failure of each reward, with its first cause."""
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
        """Read the prompts of these steps of the plan."""
        return read_together(prompts_of, self._data, steps)

    def _slots(self, prompts: list[Prompt]) -> int:
        """Return the number of completions that are generated at once. It is the same for fewer
        additional prompts, because another number would need other compiled programs."""
        return min(len(prompts) * self._config.num_generations, self._config.slots)

    def _has_signal(self, scores: RewardScores) -> Bool[np.ndarray, "P"]:
        """Return which groups have a learning signal."""
        return has_signal(scores.values, self._config.num_generations, scores.weights)

    def _filled(
        self, pending: PendingRollout, counted: TimedScores, state: TrainState
    ) -> tuple[Rollout, TimedScores, dict[str, float]]:
        """Replace groups without a signal, as far as rounds of sampling find others; return the
        rollout, its rewards and the metrics."""
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
        return rollout.taken(places), TimedScores(scores, reward_seconds), numbers


def filled_places(signals: Bool[np.ndarray, "P"], count: int) -> list[int]:
    """Return which group fills each of `count` places: its own, or if that has no signal the next
    additional group with one, while there are any.

    Args:
        signals: whether each group has a signal; the first `count` groups are those of the places.
        count: number of places.
    """
    others = iter(np.flatnonzero(signals[count:]) + count)
    places = []
    for number in range(count):
        if signals[number]:
            places.append(number)
        else:
            places.append(int(next(others, number)))
    return places


def _numbers(rollout: Rollout, scores: RewardScores) -> dict[str, float]:
    """Return the metrics of the completions of the planned prompts, without times."""
    return reward_numbers(scores) | length_numbers(rollout)


def length_numbers(rollout: Rollout) -> dict[str, float]:
    """Return the metrics of the lengths of completions."""
    return {
        "completion_length": float(rollout.lengths.mean()),
        "longest_completion": float(rollout.lengths.max()),
        "truncated": float(rollout.truncated.mean()),
    }
