"""Batches of on-policy runs: rollouts are made, stored, and read again when a run resumes.

A rollout is scored before the first step that reads it, by the weights that are about to train, and
stored before that step. With grpo.staleness=0 the same weights sample it. With 1 it was sampled one
rollout before, and its samples were stored before the first step of that rollout. So for every
checkpoint that a run may resume from, the samples of weights that are gone are stored. Its rewards
are computed while those steps are made.

Sampling itself does not overlap with steps: programs of two threads on the same devices, with
collectives, could run in a different order on each host.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import jax
from flax import nnx
from jax.sharding import Mesh

from data_pipeline.loader.loader import HostBatch, TrainingData
from maxtrain import failpoints
from maxtrain.config import RunConfig
from maxtrain.config.rollouts import require_settings
from maxtrain.config.sections.grpo import FROM_REWARDS
from maxtrain.objectives.objective import Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.speed import ROLLOUT
from maxtrain.ops.digest import digests, hash_text
from maxtrain.rl.batches import RolloutBatches
from maxtrain.rl.maker import PendingRollout, RolloutWorker
from maxtrain.rl.prompts import first_of_each, read_together
from maxtrain.rl.reward_calls import Rewards, column_names
from maxtrain.rl.rewarder import Rewarder
from maxtrain.rl.rollout import DamagedRolloutError, Rollout
from maxtrain.rl.sampler import Sampler, stop_ids
from maxtrain.rl.store import RolloutStore
from maxtrain.rl.unrewarded import UnrewardedRolloutWorker
from maxtrain.train_step.state import TrainState, policy_variables


class RolloutParts:
    """The parts that make the rollouts and batches of a run. Use it inside `jax.set_mesh(mesh)`.

    Args:
        config: config of an on-policy run.
        data: the prompts.
        mesh: the mesh of the models.
        graphdefs: the structure of each model, as for `models_from`.
        clock: receives the heartbeat for the watchdog.
        progress: receives the log lines.

    Raises:
        ConfigError: a reward does not exist or cannot be imported.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        mesh: Mesh,
        graphdefs: Mapping[str, nnx.GraphDef | None],
        clock: Stopwatch,
        progress: Progress,
    ):
        self.batches = RolloutBatches(config, data, mesh)
        ends = stop_ids(data.tokenizer, data.shards[0])
        settings = require_settings(config)
        sampler = Sampler(settings, config.seed, ends, self.batches, mesh, graphdefs, clock)
        self._maker: RolloutWorker | UnrewardedRolloutWorker
        if config.objective in FROM_REWARDS:
            ppo = None
            if config.objective == "ppo":
                ppo = config.ppo
            prompts = read_together(first_of_each, data)
            rewarder = Rewarder(config.grpo, data.tokenizer, column_names(prompts))
            self._maker = RolloutWorker(config.grpo, ppo, data, sampler, rewarder, progress)
        else:
            self._maker = UnrewardedRolloutWorker(settings, data, sampler, progress)

    def close(self) -> None:
        """End the processes of rewards."""
        self._maker.close()

    @property
    def rewards(self) -> Rewards:
        """Return the rewards of completions."""
        assert isinstance(self._maker, RolloutWorker), "of an objective that has rewards"
        return self._maker.rewards

    def start(self, steps: range, step: int, state: TrainState, weights: str) -> PendingRollout:
        """Sample completions for these steps, by the weights after `step` steps, whose digest is
        `weights`."""
        about = {
            "steps": [steps.start + 1, steps.stop],
            "identity": self.batches.identity(steps),
            "weights": weights,
            "sampled_after": step,
        }
        return self._maker.start(steps, state, about)

    def resume_pending(self, steps: range, sampled: Rollout) -> PendingRollout:
        """Resume the rollout of these steps from stored samples."""
        return self._maker.resume_pending(steps, sampled)

    def collect(
        self, pending: PendingRollout, step: int, state: TrainState, weights: str
    ) -> Rollout:
        """Return the complete rollout, scored by the weights after `step` steps."""
        rollout = self._maker.collect(pending, state, {"scored_by": weights})
        numbers = rollout.about["numbers"]
        behind = step - rollout.about["sampled_after"]
        about = {"numbers": numbers | {"steps_behind": float(behind)}}
        return rollout._replace(about=rollout.about | about)


def weights_of(state: TrainState) -> str:
    """Return a digest of the weights that sample and train."""
    return hash_text(digests(policy_variables(state)))


class Rollouts:
    """The rollouts of a run that trains.

    Args:
        config: config of an on-policy run.
        data: the prompts.
        mesh: the mesh of the models.
        graphdefs: the structure of each model, as for `models_from`.
        run: the folder of the run.
        clock: counts the time of sampling, rewards and scoring as `rollout`.
        progress: receives the log lines.
        saved_steps: returns the steps of existing checkpoints; rollouts that none of them needs are
            removed.

    Raises:
        ConfigError: a reward does not exist or cannot be imported.
    """

    def __init__(
        self,
        config: RunConfig,
        data: TrainingData,
        mesh: Mesh,
        graphdefs: Mapping[str, nnx.GraphDef | None],
        run: Path,
        clock: Stopwatch,
        progress: Progress,
        saved_steps: Callable[[], Sequence[int]],
    ):
        self._config = require_settings(config)
        self._num_steps = data.plan.num_steps
        self._parts = RolloutParts(config, data, mesh, graphdefs, clock, progress)
        self._batches = self._parts.batches
        self._store = RolloutStore(run)
        self._clock = clock
        self._progress = progress
        self._saved_steps = saved_steps
        # The last rollout that was read, and its steps.
        self._newest: tuple[range, Rollout] | None = None
        # The samples of the next rollout, with grpo.staleness.
        self._ahead: PendingRollout | None = None

    def close(self) -> None:
        """End the processes of rewards."""
        self._parts.close()

    @property
    def rewards(self) -> Rewards:
        """Return the rewards of completions, which training and evaluations share."""
        return self._parts.rewards

    def batches(
        self,
        start: int,
        state: Callable[[], TrainState],
        left_out: frozenset[int],
    ) -> Iterator[tuple[Batch, HostBatch]]:
        """Iterate over the batches from step `start` to the plan's end, each made on demand, with
        its host batch.

        Args:
            start: number of finished steps.
            state: returns the state before the next step; called when the batch is requested.
            left_out: steps whose batches have no targets, so that they change nothing.
        """
        self._newest = None
        self._ahead = None
        for step in range(start, self._num_steps):
            steps = self._batches.steps_of(step)
            if self._newest is None or self._newest[0] != steps:
                now = state()
                # Wait here, so that the time of earlier steps does not count as rollout time.
                jax.block_until_ready(now)
                with self._clock.during(ROLLOUT):
                    self._newest = (steps, self._rollout(steps, step, now))
            yield self._batches.batch(step, self._newest[1], step in left_out)

    def _rollout(self, steps: range, step: int, state: TrainState) -> Rollout:
        """Return the rollout of these steps, before `step`, and with grpo.staleness sample for the
        next ones."""
        weights = weights_of(state)
        rollout = self._stored(steps, step, weights)
        if rollout is None:
            pending = self._pending(steps, step, state, weights)
            rollout = self._parts.collect(pending, step, state, weights)
            self._store.save(self._store.path(steps.start), rollout)
            failpoints.hit("stored", steps.start + 1)
            self._remove_old(steps)
        if self._config.staleness and steps.stop < self._num_steps:
            ahead = self._batches.steps_of(steps.stop)
            self._ahead = self._sampled_ahead(ahead, step, rollout, state, weights)
        return rollout

    def _stored(self, steps: range, step: int, weights: str) -> Rollout | None:
        """Return the stored rollout, if it equals what would be made now; else None."""
        path = self._store.path(steps.start)
        try:
            stored = self._load(path, steps)
        except DamagedRolloutError as damage:
            # No file is expected when a rollout is made for the first time.
            if path.exists() or step != steps.start:
                self._report_made_again(path, damage, step, steps.start)
            return None
        if step == steps.start and stored.about["scored_by"] != weights:
            damage = DamagedRolloutError("other weights have made it")
            self._report_made_again(path, damage, step, steps.start)
            return None
        return stored

    def _load(self, path: Path, steps: range) -> Rollout:
        """Load a stored rollout. Raise a DamagedRolloutError if it is damaged, or of other prompts
        or settings."""
        stored = self._store.load(path)
        if stored.about["identity"] != self._batches.identity(steps):
            raise DamagedRolloutError("it is of other prompts or settings")
        return stored

    def _pending(self, steps: range, step: int, state: TrainState, weights: str) -> PendingRollout:
        """Return the samples for these steps: those sampled ahead, or new ones."""
        if self._ahead is not None and self._ahead.steps == steps:
            return self._ahead
        # Nothing was sampled ahead for the first steps of a plan.
        if self._config.staleness and steps.start > self._batches.first_step:
            before = self._batches.steps_of(steps.start - 1)
            path = self._store.path_as_sampled(steps.start)
            try:
                sampled = self._ahead_of(path, steps, self._scored_by(before))
                return self._parts.resume_pending(steps, sampled)
            except DamagedRolloutError as damage:
                self._report_made_again(path, damage, step, before.start)
        return self._parts.start(steps, step, state, weights)

    def _scored_by(self, steps: range) -> str:
        """Return the digest of the weights that scored the rollout of these steps. Raise a
        DamagedRolloutError if it is not known."""
        path = self._store.path(steps.start)
        try:
            return self._load(path, steps).about["scored_by"]
        except DamagedRolloutError as damage:
            rule = f"which weights had to make it is not known ({path.name}: {damage})"
            raise DamagedRolloutError(rule) from damage

    def _sampled_ahead(
        self, ahead: range, step: int, rollout: Rollout, state: TrainState, weights: str
    ) -> PendingRollout:
        """Sample for the steps after those of a rollout, by the weights that scored it, and store
        the samples."""
        path = self._store.path_as_sampled(ahead.start)
        before = self._batches.steps_of(step)
        try:
            sampled = self._ahead_of(path, ahead, rollout.about["scored_by"])
            return self._parts.resume_pending(ahead, sampled)
        except DamagedRolloutError as damage:
            if path.exists() or step != before.start:
                self._report_made_again(path, damage, step, before.start)
        pending = self._parts.start(ahead, step, state, weights)
        self._store.save(path, pending.rollout)
        failpoints.hit("ahead", ahead.start + 1)
        return pending

    def _ahead_of(self, path: Path, steps: range, weights: str) -> Rollout:
        """Load the samples for these steps by weights with this digest. Raise a DamagedRolloutError
        if there is no such file."""
        sampled = self._load(path, steps)
        if sampled.about["weights"] != weights:
            raise DamagedRolloutError("other weights have made it")
        return sampled

    def _report_made_again(
        self, path: Path, damage: DamagedRolloutError, step: int, expected: int
    ) -> None:
        """Log what is wrong with a file, and which weights make it again."""
        again = "It is made again"
        if step != expected:
            again += f", by the weights of step {step:,} and not those of {expected:,}"
        self._progress.message(f"{path}: {damage}. {again}.", style="yellow")

    def _remove_old(self, steps: range) -> None:
        """Remove rollouts that no checkpoint needs."""
        if self._config.keep_rollouts:
            return
        saved = self._saved_steps()
        if not saved:
            return
        first = self._batches.round_down(min(*saved, steps.start))
        if self._config.staleness and first > 0:
            # The rollout before names the weights that sampled the next one.
            first = self._batches.round_down(first - 1)
        self._store.remove_before(first)
