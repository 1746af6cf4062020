"""A trace of some steps of a run: what the host and the devices did, and when.

RUN/profile has what TensorBoard's profile plugin shows, and beside it `perfetto_trace.json.gz`,
which
https://ui.perfetto.dev opens. Every process writes its own; of several, each has a folder.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

from maxtrain.observe.metrics import Stopwatch

FOLDER = "profile"


class TraceRange(NamedTuple):
    """The steps that are traced, counted from 1: the first and the last."""

    first: int
    last: int


def traced_steps(text: str) -> TraceRange:
    """The steps of `observe.profile`, which has been checked."""
    first, last = text.split(":")
    return TraceRange(int(first), int(last))


class StepTrace:
    """Profiler trace of the steps of one launch, taken once.

    Args:
        folder: of the run.
        steps: which; None: none.
        clock: starting and writing a trace is not time of the steps.
        tell: prints a line.

    Attributes:
        is_open: a trace is being taken.
    """

    def __init__(
        self,
        folder: Path,
        steps: TraceRange | None,
        clock: Stopwatch,
        tell: Callable[[str], object],
    ):
        self.is_open = False
        self._folder = folder / FOLDER
        if jax.process_count() > 1:
            self._folder = self._folder / f"process-{jax.process_index()}"
        self._steps = steps
        self._clock = clock
        self._tell = tell
        self._begun_at = 0

    def due(self, step: int) -> bool:
        """Return whether to start or stop after `step` finished steps."""
        if self._steps is None:
            return False
        if self.is_open:
            return step >= self._steps.last
        return self._steps.first <= step + 1 <= self._steps.last

    def turn(self, step: int, state: Any) -> None:
        """Starts or stops, where that is due.

        Args:
            step: finished steps.
            state: what the last of these has made, which is waited for.
        """
        if self.is_open:
            self.close(step, state)
        else:
            self._open(step, state)

    def _open(self, step: int, state: Any) -> None:
        with self._clock.during("profile"):
            # Else the trace begins with the steps that are still under way.
            jax.block_until_ready(state)
            self._folder.mkdir(parents=True, exist_ok=True)
            # Every call of Python would make the trace many times as large, and the host slower.
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(
                str(self._folder), create_perfetto_trace=True, profiler_options=options
            )
        self.is_open = True
        self._begun_at = step + 1

    def close(self, step: int, state: Any = None) -> None:
        """Writes the trace, if one is open; it ends with `step`. Another one is not taken."""
        if not self.is_open:
            return
        self.is_open = False
        self._steps = None
        with self._clock.during("profile"):
            jax.block_until_ready(state)
            try:
                jax.profiler.stop_trace()
            except (OSError, ValueError) as error:
                # No run ends for want of a picture.
                self._tell(f"profile: the trace could not be written to {self._folder}: {error}")
                return
        (*_, newest) = sorted(self._folder.glob("plugins/profile/*/perfetto_trace.json.gz"))
        self._tell(
            f"profile: steps {self._begun_at:,} to {step:,} are in {newest}. Open it at "
            f"https://ui.perfetto.dev, or run tensorboard --logdir {self._folder} (with "
            f"tensorboard-plugin-profile)."
        )
