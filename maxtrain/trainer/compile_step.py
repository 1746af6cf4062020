"""Compiled train steps of a run, one for each batch shape in its plan."""

from collections.abc import Mapping
from typing import Any

import jax

from data_pipeline.base.errors import ConfigError
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.parallel.agreement import raise_together
from maxtrain.parallel.memory import (
    STEP_MEND,
    bytes_beside_arguments,
    bytes_on_device,
    is_out_of_memory,
    require_memory,
    size,
)
from maxtrain.train_step.state import TrainState

# Arrays of a batch by name, or their abstract values.
AnyBatch = Mapping[str, Any]


class Programs:
    """Cache of compiled train steps, filled at the latest at the first batch of each shape.

    Args:
        step: the jitted step, (state, batch) -> (state, metrics).
        progress: displays that the step is being compiled.
        clock: the stopwatch that counts the time as `compile`.
    """

    def __init__(self, step: jax.stages.Wrapped, progress: Progress, clock: Stopwatch):
        self._step = step
        self._progress = progress
        self._clock = clock
        self._compiled: dict[frozenset[Any], jax.stages.Compiled] = {}
        self._has_run = False

    def compile(self, state: TrainState, batch: AnyBatch) -> jax.stages.Compiled:
        """Compile the step for batches of this shape, without a check that it fits.

        Args:
            state, batch: arrays, or their abstract values.

        Raises:
            JaxRuntimeError: the compilation fails, also for lack of device memory.
        """
        key = _key(batch)
        if key not in self._compiled:
            self._progress.phase("compiling the step")
            with self._clock.during("compile"):
                self._compiled[key] = self._step.lower(state, batch).compile()
            self._progress.phase("")
        return self._compiled[key]

    def prepare(self, state: TrainState, batch: AnyBatch, waiting: int) -> None:
        """Compile the step for batches of this shape, before the first such batch is read.

        Args:
            state: the arrays of the train state.
            batch: abstract arrays.
            waiting: number of prefetched batches that will be on the devices at the same time.

        Raises:
            ConfigError: in all processes: a device of one of them has not enough memory for it.
        """
        if _key(batch) not in self._compiled:
            self._checked(state, batch, (1 + waiting) * bytes_on_device(batch))

    def of(self, state: TrainState, batch: AnyBatch) -> jax.stages.Compiled:
        """Return the step for batches of this shape, which is about to run. All processes call this
        for the same batches.

        Raises:
            ConfigError: in all processes: a device of one of them has not enough memory for it.
        """
        found = self._compiled.get(_key(batch))
        if found is None:
            found = self._checked(state, batch, 0)
        self._has_run = True
        return found

    def _checked(self, state: TrainState, batch: AnyBatch, more: int) -> jax.stages.Compiled:
        """Compile the step, and require that it fits in device memory. `more`: further bytes needed
        on each device.

        `more`: bytes on each device that are needed beside it.
        """
        rows, length = batch["targets"].shape
        what = f"a step of {rows:,} rows x {length:,} tokens"
        compiled = None
        refused = None
        try:
            compiled = self.compile(state, batch)
            needed = bytes_beside_arguments(compiled)
            self._report(what, needed)
            # On a CPU the process keeps the memory that earlier steps needed, and it would be
            # counted as taken.
            if not self._has_run or jax.default_backend() != "cpu":
                require_memory(needed + more, f"{what}, beside the training state,", STEP_MEND)
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

    def _report(self, what: str, needed: int) -> None:
        """Log the bytes that a step needs on each device beside the training state."""
        if jax.device_count() > 1:
            self._progress.message(
                f"{what}: {size(needed)} of activations, gradients and the like a device"
            )


def _key(batch: AnyBatch) -> frozenset[Any]:
    """Return the shapes and types of a batch's arrays, which decide which program it needs."""
    return frozenset((name, x.shape, str(x.dtype)) for name, x in batch.items())
