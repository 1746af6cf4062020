"""Replay of stored rollouts for steps that are made again, and a check whether the run's weights
would make the same ones."""

from collections.abc import Callable, Iterator

from data_pipeline.base.errors import DataError
from data_pipeline.loader.loader import HostBatch
from maxtrain.objectives.objective import Batch
from maxtrain.rl.maker import PendingRollout
from maxtrain.rl.rollout import DamagedRolloutError, Rollout
from maxtrain.rl.rollouts import RolloutParts, weights_of
from maxtrain.rl.store import RolloutStore
from maxtrain.train_step.state import TrainState

# The name reported for a rollout that other weights scored.
WEIGHTS = "weights"


class ReplayedRollouts:
    """Batches of stored rollouts, for replays. Nothing is written.

    Args:
        parts: make rollouts and their batches.
        store: the rollouts of the run.
        again: whether rollouts are made again and compared with the stored ones.

    Attributes:
        different: names of arrays that differ from the stored ones, by the first step that reads
            the rollout, counted from 1.
        num_compared: number of compared arrays.
        not_made: first steps, counted from 1, of rollouts that cannot be made again, because their
            weights are from before the first replayed step.
    """

    def __init__(self, parts: RolloutParts, store: RolloutStore, again: bool):
        self._parts = parts
        self._store = store
        self._again = again
        # The samples for the next rollout, if it is sampled ahead.
        self._ahead: PendingRollout | None = None
        self.different: dict[int, list[str]] = {}
        self.num_compared = 0
        self.not_made: list[int] = []

    def close(self) -> None:
        """End the processes of rewards."""
        self._parts.close()

    def batches(
        self, start: int, stop: int, state: Callable[[], TrainState], left_out: frozenset[int]
    ) -> Iterator[tuple[Batch, HostBatch]]:
        """Iterate over batches of the steps from `start` up to `stop`, as `Rollouts.batches` does.

        Raises a DataError if a rollout is missing, damaged, or of other prompts or settings.
        """
        steps = range(0)
        rollout = None
        for step in range(start, stop):
            if step not in steps:
                steps = self._parts.batches.steps_of(step)
                rollout = self._load(steps)
                self._check(steps, step, rollout, state(), stop)
            assert rollout is not None
            yield self._parts.batches.batch(step, rollout, step in left_out)

    def _load(self, steps: range) -> Rollout:
        """Load the stored rollout of these steps, and check its identity."""
        path = self._store.path(steps.start)
        try:
            rollout = self._store.load(path)
        except DamagedRolloutError as damage:
            raise DataError(
                f"{path}: {damage}. Replay steps whose rollouts are there; with "
                "grpo.keep_rollouts=true a run keeps all of them."
            ) from damage
        if rollout.about["identity"] != self._parts.batches.identity(steps):
            raise DataError(
                f"{path} is of other prompts or settings than the run has at step "
                f"{steps.start + 1:,}. Bring back the data that the run has read."
            )
        return rollout

    def _check(
        self, steps: range, step: int, stored: Rollout, state: TrainState, stop: int
    ) -> None:
        """Compare a rollout with the weights before its first step, and with one made again from
        them."""
        if step != steps.start:
            if self._again:
                self.not_made.append(steps.start + 1)
            return
        weights = weights_of(state)
        found = []
        if stored.about["scored_by"] != weights:
            found.append(WEIGHTS)
        if self._again:
            pending = self._sampled(steps, stored, state, weights)
            if pending is None:
                self.not_made.append(steps.start + 1)
            else:
                fresh = self._parts.collect(pending, step, state, weights)
                found += self._compared(stored, fresh)
            self._ahead = self._sampled_ahead(steps, state, weights, stop)
        if found:
            self.different[steps.start + 1] = found

    def _sampled(
        self, steps: range, stored: Rollout, state: TrainState, weights: str
    ) -> PendingRollout | None:
        """Sample these steps with the weights that sampled the stored rollout; None: these weights
        are gone."""
        after = stored.about["sampled_after"]
        if after == steps.start:
            return self._parts.start(steps, after, state, weights)
        ahead = self._ahead
        if ahead is None or ahead.steps != steps:
            return None
        if ahead.rollout.about["sampled_after"] != after:
            return None
        return ahead

    def _sampled_ahead(
        self, steps: range, state: TrainState, weights: str, stop: int
    ) -> PendingRollout | None:
        """Sample the following steps, if they were sampled by these weights and will be made; else
        None."""
        if steps.stop >= stop:
            return None
        ahead = self._parts.batches.steps_of(steps.stop)
        if self._load(ahead).about["sampled_after"] != steps.start:
            return None
        return self._parts.start(ahead, steps.start, state, weights)

    def _compared(self, stored: Rollout, fresh: Rollout) -> list[str]:
        """Return the names of arrays that are not equal bit for bit."""
        different = []
        then = stored.arrays()
        for name, array in fresh.arrays().items():
            self.num_compared += 1
            same_kind = (array.dtype, array.shape) == (then[name].dtype, then[name].shape)
            if not same_kind or array.tobytes() != then[name].tobytes():
                different.append(name)
        return different
