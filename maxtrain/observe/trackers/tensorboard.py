"""TensorBoard: event files in RUN/tensorboard, written by tensorboardX, without TensorFlow.

A run that goes on, or back, writes a further file, at whose beginning TensorBoard hides what was
written about later steps.
"""

import os
import time
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
                f"({error}). Run pip install tensorboardX, or leave tensorboard "
                "out of observe.trackers."
            ) from error
        self._package: Any = tensorboardX
        self._folder = Path()
        self._file: Any = None
        self._flushed = 0.0

    def start(self, run: RunInfo) -> str:
        self._folder = run.folder / "tensorboard"
        self._open(run.step)
        return ""

    def log(self, step: int, values: Mapping[str, Value], kind: Kind) -> None:
        make = self._package.summary.scalar
        for name, number in numbers(by_name(values, kind)).items():
            self._write(step=step, summary=make(name, number))
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self._file.flush()
            self._flushed = time.monotonic()

    def show_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        text = self._package.summary.text(f"samples/{samples[0].set}", as_markdown(samples))
        self._write(step=step, summary=text)

    def rewind(self, step: int) -> None:
        self._file.close()
        self._open(step)

    def finish(self, status: Status) -> None:
        self._file.close()

    def _open(self, step: int) -> None:
        """Open a new file, which hides records of steps after this one in other files."""
        # Two files may be opened within a second, which is all that the package's names tell apart.
        suffix = f".{os.getpid()}.{time.monotonic_ns()}"
        self._folder.mkdir(parents=True, exist_ok=True)
        # `SummaryWriter` has a thread of its own. If that dies, on a full disk for example, its
        # handler at exit waits for ever, and so does the process.
        events = self._package.event_file_writer.EventsWriter
        self._file = events(str(self._folder / "events"), suffix)
        if step:
            log = self._package.proto.event_pb2.SessionLog
            self._write(step=step + 1, file_version="brain.Event:2")
            self._write(step=step + 1, session_log=log(status=log.START))

    def _write(self, **fields: Any) -> None:
        event = self._package.proto.event_pb2.Event(wall_time=time.time(), **fields)
        self._file.write_event(event)
