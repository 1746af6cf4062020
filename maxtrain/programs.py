"""The compiled train step of a run, for each shape of batch in its plan."""

import jax

from data_pipeline.errors import ConfigError
from maxtrain.objectives.objective import Batch
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import raise_together
from maxtrain.parallel.memory import (
    STEP_MEND,
    bytes_beside_arguments,
    is_out_of_memory,
    require_memory,
)
from maxtrain.training.state import TrainState


class Programs:
    """Compiles the step at the first batch of each shape.

    Args:
        step: the jitted step, (state, batch) -> (state, metrics).
        progress: shows that the step is being compiled.
        clock: counts the time as `compile`.
    """

    def __init__(self, step: jax.stages.Wrapped, progress: Progress, clock: Stopwatch):
        self._step = step
        self._progress = progress
        self._clock = clock
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}

    def of(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """The step for batches of this shape. All processes call this for the same batches.

        Raises:
            ConfigError: in all processes: a device of one of them has not enough memory for it.
        """
        shape = batch["targets"].shape
        if shape not in self._compiled:
            self._progress.phase("compiling the step")
            with self._clock.during("compile"):
                self._compiled[shape] = self._compile(state, batch)
            self._progress.phase("")
        return self._compiled[shape]

    def _compile(self, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        rows, length = batch["targets"].shape
        what = f"a step of {rows:,} rows x {length:,} tokens"
        compiled = None
        refused = None
        try:
            compiled = self._step.lower(state, batch).compile()
            # On a CPU the process keeps the memory that earlier steps needed, and it would be
            # counted as taken.
            if not self._compiled or jax.default_backend() != "cpu":
                needed = bytes_beside_arguments(compiled)
                require_memory(needed, f"{what}, beside the training state,", STEP_MEND)
        except ConfigError as error:
            refused = error
        except jax.errors.JaxRuntimeError as error:
            if not is_out_of_memory(error):
                raise
            reason = str(error).splitlines()[0][:300]
            refused = ConfigError(f"{what} does not fit: {reason}. {STEP_MEND}.")
        raise_together(refused)
        assert compiled is not None
        return compiled
