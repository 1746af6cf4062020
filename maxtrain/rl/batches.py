"""Batches made from rollouts, and the steps that share a rollout.

With num_iterations=n, steps k n + 1 to k n + n read their prompts together, and each of them trains
on all completions. So the order of prompts follows the plan for any n.
"""

import hashlib
import json

import numpy as np
from jax.sharding import Mesh

from data_pipeline.loader.batch_checks import checksum
from data_pipeline.loader.loader import DerivedBatch, HostBatch, TrainingData
from data_pipeline.plan.plan import BatchShape as BatchShape
from maxtrain.config import RunConfig
from maxtrain.config.rollouts import require_settings
from maxtrain.models.cost import relative_quadratic
from maxtrain.objectives.objective import Batch
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.sharding import batch_shards
from maxtrain.rl.rollout import FOLDER, Rollout
from maxtrain.rl.rows import CompletionIndices, RowShape, batch_arrays

# Arrays of a batch that the training forward pass reads.
_READ = ("inputs", "targets", "segment_ids", "positions")
# Arrays of a batch that trains on the tokens of completions only.
OF_TOKENS = (*_READ, "loss_mask", "source")
# For each token of a completion, [B, T]: the number of the completion in its step, uint32, and the
# index of the token in the completion, int32. They determine the random number that draws it.
COMPLETION = "completion"
NUMBER = "number"


class RolloutBatches:
    """Batches made from rollouts. Use it inside `jax.set_mesh(mesh)`.

    Args:
        config: config of an on-policy run.
        data: the prompts.
        mesh: the mesh of the batches.
    """

    def __init__(self, config: RunConfig, data: TrainingData, mesh: Mesh):
        self._config = config
        self._settings = require_settings(config)
        self._data = data
        self._mesh = mesh
        self._length = max(length for _, length in data.shapes())
        self._quadratic = relative_quadratic(config.model)
        self._layouts: dict[int, BatchLayout] = {}

    @property
    def accumulation(self) -> int:
        """Return the number of micro-batches of a step."""
        return self._config.optimizer.micro_batches

    @property
    def is_exact(self) -> bool:
        """Return whether completions must be those that the training forward pass draws. A
        divergence from a teacher does not need the sampler's log-probabilities."""
        return self._config.determinism == "full" and self._config.objective != "distill"

    @property
    def first_step(self) -> int:
        """Return the step where the plan of the data begins: 0, or the step of the last change of
        data."""
        return self._data.plan.spans[0].step

    def steps_of(self, step: int) -> range:
        """Return the steps, numbered from 0, that read the same rollout as this one."""
        first = self.round_down(step)
        end = min(first + self._settings.num_iterations, self._data.plan.num_steps)
        return range(max(first, self.first_step), end)

    def round_down(self, step: int) -> int:
        """Return the first step that reads the same rollout, if the data has not changed in
        between."""
        return step - step % self._settings.num_iterations

    def identity(self, steps: range) -> str:
        """Return an identity of the rollout of these steps: a hash of prompts, settings and
        seed."""
        settings = {
            "prompts": [self._data.digest_at(step) for step in steps],
            "shards": [shards.uid for shards in self._data.shards],
            "seed": self._config.seed,
            **self._settings.identity,
        }
        if self.is_exact:
            settings["exact"] = True
        text = json.dumps(settings, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def batch(self, step: int, rollout: Rollout, is_left_out: bool) -> tuple[Batch, HostBatch]:
        """Return the batch of a step, on the devices, and its host batch.

        Args:
            step: numbered from 0.
            rollout: the rollout of the step.
            is_left_out: whether the batch has no targets, so that the step changes nothing.
        """
        is_first = step == self.steps_of(step).start
        arrays, _ = batch_arrays(rollout, self._shape(), is_first)
        if self._config.objective == "distill":
            arrays = {name: arrays[name] for name in OF_TOKENS}
        if is_left_out:
            arrays["loss_mask"] = np.zeros_like(arrays["loss_mask"])
        rows, length = arrays["targets"].shape
        unused_rows = int((arrays["loss_mask"] <= 0).all(axis=1).sum())
        layout = self._layout(rows)
        own = layout.own_part(arrays)
        first_column, _, _ = layout.part.columns.indices(length)
        origin = HostBatch(
            step=step,
            arrays={},
            num_targets=int(np.count_nonzero(arrays["loss_mask"])),
            digest=rollout.content()[:16],
            content=checksum(own["targets"], layout.part.rows, first_column),
            # Equal completions may come again, which is no problem of the data.
            place=FOLDER,
            made=DerivedBatch(
                shape=BatchShape(rows, length),
                unused_rows=unused_rows,
                numbers=rollout.about["numbers"],
            ),
        )
        return layout.to_global(own), origin

    def to_score(self, rollout: Rollout, first: int = 0) -> tuple[Batch, CompletionIndices]:
        """Return the arrays of a rollout's batch that the training forward pass reads, on the
        devices and in the shapes of its steps; and where completions are in it.

        `first`: the number of the first completion within the step.
        """
        arrays, places = batch_arrays(rollout, self._shape(), is_first=True)
        found = {name: arrays[name] for name in _READ}
        if self.is_exact:
            of_token = np.repeat(np.arange(len(rollout.lengths)), rollout.lengths)
            begins = np.cumsum(rollout.lengths) - rollout.lengths
            numbers = np.arange(len(of_token)) - begins[of_token]
            found[COMPLETION] = places.spread((first + of_token).astype(np.uint32), self._length)
            found[NUMBER] = places.spread(numbers.astype(np.int32), self._length)
        layout = self._layout(places.num_rows)
        return layout.to_global(layout.own_part(found)), places

    def _layout(self, rows: int) -> BatchLayout:
        """Return the layout of batches with this number of rows."""
        if rows not in self._layouts:
            self._layouts[rows] = BatchLayout(self._mesh, rows, self._length)
        return self._layouts[rows]

    def _shape(self) -> RowShape:
        """Return how completions are laid out in rows."""
        unit = self.accumulation * batch_shards()
        room = None
        if self.is_exact:
            room = self._settings.max_completion_length
        masks = self._settings.mask_truncated_completions
        return RowShape(self._length, unit, self._quadratic, masks, room)
