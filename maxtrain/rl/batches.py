"""Which steps read a rollout together, and the batches that they make of it.

With num_iterations=n, steps k n + 1 to k n + n read their prompts together, and each of them
trains on all completions. So prompts are read as the plan says, whatever n is.
"""

import hashlib
import json

import numpy as np
from jax.sharding import Mesh

from data_pipeline.loader.batch_checks import checksum
from data_pipeline.loader.loader import HostBatch, Made, TrainingData
from data_pipeline.plan.plan import Shape as BatchShape
from maxtrain.config import RunConfig
from maxtrain.config.rollouts import require_settings
from maxtrain.models.cost import relative_quadratic
from maxtrain.objectives.objective import Batch
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.sharding import batch_shards
from maxtrain.rl.rollout import FOLDER, Rollout
from maxtrain.rl.rows import Places, Shape, batch_arrays

# What the training forward reads of a batch.
_READ = ("inputs", "targets", "segment_ids", "positions")
# What a batch has where nothing of a completion is learnt but its tokens.
OF_TOKENS = (*_READ, "loss_mask", "source")
# Of each token of a completion, [B, T]: the number of the completion among those of a step, uint32,
# and its own number in the completion, int32; they say what it is drawn by.
COMPLETION = "completion"
NUMBER = "number"


class RolloutBatches:
    """Batches of rollouts. To be used inside `jax.set_mesh(mesh)`.

    Args:
        config: of a run that learns from rollouts.
        data: the prompts.
        mesh: that batches lie on.
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
        """Micro-batches of a step."""
        return self._config.optimizer.micro_batches

    @property
    def is_exact(self) -> bool:
        """Whether completions have to be those that the training forward draws. A divergence from a
        teacher does not ask how likely a token was to the sampler."""
        return self._config.determinism == "full" and self._config.objective != "distill"

    @property
    def first_step(self) -> int:
        """Where the plan of the data begins: 0, or the step from which on it is another."""
        return self._data.plan.spans[0].step

    def steps_of(self, step: int) -> range:
        """The steps, numbered from 0, that read the same rollout as this one."""
        first = self.round_down(step)
        end = min(first + self._settings.num_iterations, self._data.plan.num_steps)
        return range(max(first, self.first_step), end)

    def round_down(self, step: int) -> int:
        """The first step that reads the same rollout, where the data has not changed meanwhile."""
        return step - step % self._settings.num_iterations

    def identity(self, steps: range) -> str:
        """Of what is asked for with the rollout of these steps: prompts, settings and seed."""
        asked = {
            "prompts": [self._data.digest_at(step) for step in steps],
            "shards": [shards.uid for shards in self._data.shards],
            "seed": self._config.seed,
            **self._settings.identity,
        }
        if self.is_exact:
            asked["exact"] = True
        text = json.dumps(asked, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def batch(self, step: int, rollout: Rollout, is_left_out: bool) -> tuple[Batch, HostBatch]:
        """The batch of a step, on the devices, and where it comes from.

        Args:
            step: numbered from 0.
            rollout: that it reads.
            is_left_out: it has no target, so that it changes nothing.
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
            # The same completions may be written again: that is no fault of the data.
            place=FOLDER,
            made=Made(
                shape=BatchShape(rows, length),
                unused_rows=unused_rows,
                numbers=rollout.about["numbers"],
            ),
        )
        return layout.to_global(own), origin

    def to_score(self, rollout: Rollout, first: int = 0) -> tuple[Batch, Places]:
        """What the training forward reads of a batch of a rollout, on the devices, in the shapes of
        its steps; and where completions lie in it.

        `first`: the number of the first completion among those of the step.
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
        if rows not in self._layouts:
            self._layouts[rows] = BatchLayout(self._mesh, rows, self._length)
        return self._layouts[rows]

    def _shape(self) -> Shape:
        unit = self.accumulation * batch_shards()
        room = None
        if self.is_exact:
            room = self._settings.max_completion_length
        masks = self._settings.mask_truncated_completions
        return Shape(self._length, unit, self._quadratic, masks, room)
