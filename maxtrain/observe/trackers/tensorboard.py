"""TensorBoard: event files in RUN/tensorboard, written by tensorboardX, without TensorFlow.

A run that goes on, or back, writes a further file, at whose beginning TensorBoard hides what was
written about later steps.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import UsageError
from maxtrain.config.schema import ObserveConfig
from maxtrain.observe.samples import CompletionSample, as_markdown
from maxtrain.observe.tracker import Kind, RunInfo, Status, Tracker, Value, by_name, numbers

_FLUSH_SECONDS = 10


class TensorBoard(Tracker):
    """Writes every number as a scalar `train/NAME` or `eval/SET/NAME`, and samples as the text
    `samples/SET`.

    Raises:
        UsageError: its package is not installed.
    """

    def __init__(self, config: ObserveConfig):
        del config
        try:
            # Here, since it brings clients of cloud storage where they are installed.
            import tensorboardX  # noqa: PLC0415
        except ImportError as error:
            raise UsageError(
                f"observe.trackers: tensorboard needs tensorboardX, which is not installed "
                f"({error}). Run pip install tensorboardX, or set observe.tensorboard=false."
            ) from error
        self._package = tensorboardX
        self._folder = Path()
        self._writer: Any = None

    def start(self, run: RunInfo) -> str:
        self._folder = run.folder / "tensorboard"
        self._open(run.step)
        return ""

    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        for name, number in numbers(by_name(values, kind)).items():
            self._writer.add_scalar(name, number, step)

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        self._writer.add_text(f"samples/{samples[0].set}", as_markdown(samples), step)

    def rewind(self, step: int) -> None:
        self._writer.close()
        self._open(step)

    def finish(self, status: Status) -> None:
        self._writer.close()

    def _open(self, step: int) -> None:
        """A new file, which hides what others say of steps after this one."""
        purge_step = None
        if step:
            purge_step = step + 1
        self._writer = self._package.SummaryWriter(
            str(self._folder), purge_step=purge_step, flush_secs=_FLUSH_SECONDS
        )
