"""Copies of the metrics for other programs to show; today TensorBoard."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import tensorboardX


class TensorBoard:
    """Writes every number as a scalar `train/NAME` or `eval/SET/NAME`. Does nothing but on process 0.

    Args:
        run_dir: directory of the run; event files go to its folder `tensorboard`.
        resume_step: the run goes on from this step; TensorBoard hides what was written about later ones.
        process_index: index of this process in the job.
    """

    def __init__(self, run_dir: str | Path, resume_step: int = 0, process_index: int = 0):
        self._writer = None
        if process_index == 0:
            folder = str(Path(run_dir) / "tensorboard")
            self._writer = tensorboardX.SummaryWriter(
                folder, purge_step=resume_step + 1 if resume_step else None, flush_secs=10
            )

    def append(self, step: int, values: Mapping[str, Any], kind: Literal["train", "eval"] = "train") -> None:
        """Write one record of metrics; what is not a number is left out.

        Args:
            step: number of finished optimizer steps.
            values: as for `MetricsLog.append`; the string `set` names the evaluation set.
            kind: what the numbers are about.
        """
        if self._writer is None:
            return
        prefix = f"{kind}/{values['set']}" if "set" in values else kind
        for name, value in values.items():
            if value is not None and not isinstance(value, str):
                self._writer.add_scalar(f"{prefix}/{name}", float(value), step)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._writer is not None:
            self._writer.close()
