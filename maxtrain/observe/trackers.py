"""Copies of the metrics for other programs to show; today TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from data_pipeline.errors import UsageError


class TensorBoard:
    """Writes every number as a scalar `train/NAME` or `eval/SET/NAME` into RUN/tensorboard. Make it
    on process 0 only.

    The run goes on from `resume_step`; TensorBoard hides what was written about later ones.

    Raises:
        UsageError: its package is not installed.
    """

    def __init__(self, run_dir: str | Path, resume_step: int = 0):
        try:
            import tensorboardX  # noqa: PLC0415 - brings clients of cloud storage, where they are installed
        except ImportError as error:
            rule = f"observe.tensorboard=true needs tensorboardX, which is not installed ({error})"
            raise UsageError(
                f"{rule}. Run pip install tensorboardX, or set observe.tensorboard=false."
            ) from error
        purge_step = resume_step + 1 if resume_step else None
        self._writer = tensorboardX.SummaryWriter(
            str(Path(run_dir) / "tensorboard"), purge_step=purge_step, flush_secs=10
        )

    def append(
        self,
        step: int,
        values: Mapping[str, Any],
        kind: Literal["train", "eval", "end", "norms"] = "train",
    ) -> None:
        """Write the numbers of one record; arguments as for `MetricsLog.append`."""
        prefix = f"{kind}/{values['set']}" if "set" in values else kind
        for name, value in values.items():
            if value is not None and not isinstance(value, str):
                self._writer.add_scalar(f"{prefix}/{name}", float(value), step)

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()
