"""Records of a run's steps, written to metrics.jsonl, the trackers and the progress display.

Steps arrive with their metrics on the host, already checked (health.py). The recorder sums and
writes, and decides nothing about the run.
"""

import contextlib
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.loader.loader import HostBatch
from data_pipeline.plan.plan import Plan
from maxtrain.checkpoint.rollback import Rollback
from maxtrain.checkpoint.run_state import RecorderState
from maxtrain.config.schema import ANOMALIES
from maxtrain.observe.metrics import MetricsLog, read_metrics
from maxtrain.observe.progress import Progress
from maxtrain.observe.samples import FILE_NAME as SAMPLES
from maxtrain.observe.samples import KIND, CompletionSample, read_samples
from maxtrain.observe.speed import SpeedMeter
from maxtrain.observe.stragglers import HostTime, Stragglers, in_record, slowest_of
from maxtrain.observe.tracking import Trackers
from maxtrain.ops.digest import hash_text
from maxtrain.parallel.memory import memory_in_use
from maxtrain.train_step.norms import MEASURED

# Tolerance for passes over a source, which are sums of floats.
_ROUNDING = 1e-9


class Recorder:
    """Accumulator of the steps since the last record, and writer of records to every log.

    Args:
        folder: the folder of the run.
        plan: the rows of each step.
        terms: names of the objective's metrics among a step's metrics, in the order of the record.
        trackers: receive every record, once they have started.
        speed: measures the steps between two records.
        progress: shows each training record.
        log_interval: steps between training records.
        norms_interval: steps between records of the norms of each layer; 0: no such records.
        slow_host_factor: see `Stragglers`.
        norm_names: names of the norms, in the order of a step's metrics.
        keeps_samples: whether completions of prompts are written to samples.jsonl.

    Attributes:
        made_before: the last step of the dropped records, known to process 0.
        end_at: the step of the last `end` record, which says why the run ended early; known to
            process 0.
    """

    def __init__(
        self,
        folder: Path,
        plan: Plan,
        terms: Sequence[str],
        trackers: Trackers,
        speed: SpeedMeter,
        progress: Progress,
        log_interval: int,
        norms_interval: int,
        slow_host_factor: float,
        norm_names: Sequence[str],
        keeps_samples: bool = False,
    ):
        self.made_before = 0
        self.end_at: int | None = None
        self._folder = folder
        self._plan = plan
        self._terms = terms
        self._trackers = trackers
        self._speed = speed
        self._progress = progress
        self._log_interval = log_interval
        self._norms_interval = norms_interval
        self._stragglers = Stragglers(slow_host_factor)
        self._norm_names = norm_names
        self._keeps_samples = keeps_samples
        self._samples: MetricsLog | None = None
        # The step of the last samples of each set.
        self._sampled_at: dict[str, int] = {}
        # The last epoch of each source whose beginning was logged.
        self._epoch_logged: dict[str, int] = {}
        # The log whose position checkpoints remember, on process 0; open between `open_logs` and
        # `close_logs`.
        self._metrics: MetricsLog | None = None
        self._is_open = False
        self.restore(RecorderState(), [])

    # What a checkpoint remembers

    def restore(self, saved: RecorderState, rollbacks: Sequence[Rollback]) -> None:
        """Restore the state `saved` of a checkpoint; it is empty for a new run."""
        self._rollbacks = rollbacks
        self._tokens_seen = saved.tokens_seen
        # Total and weight of the loss since the last record, of all sources together.
        self._sums = np.array(saved.since_record, np.float64)
        # Loss in nats and number of targets of each source.
        nothing = np.zeros((2, len(self._plan.names)))
        self._by_source = np.array(saved.by_source, np.float64)
        # The shape differs for a new run, or if data.accept_changes changed the sources.
        if self._by_source.shape != nothing.shape:
            self._by_source = nothing
        # The position in the log when the checkpoint was saved.
        self._mark = saved.log
        self._speed.restart()

    def state(self) -> RecorderState:
        """Return what a checkpoint has to remember."""
        log = None
        if self._metrics:
            log = self._metrics.mark()
        total, weight = self._sums.tolist()
        return RecorderState(
            log=log,
            tokens_seen=self._tokens_seen,
            since_record=(total, weight),
            by_source=self._by_source.tolist(),
        )

    # The logs

    def evaluated(self, step: int) -> dict[str, set[str | None]]:
        """Return the evaluation sets on record at a step, each with the identities of its text;
        None: a record without one."""
        found = defaultdict[str, set[str | None]](set)
        # `open_logs` reports records that cannot be read.
        with contextlib.suppress(DataError):
            for record in read_metrics(self._folder):
                if record["kind"] == "eval" and record["step"] == step:
                    found[record["set"]].add(record.get("data"))
        return found

    def open_logs(self, step: int, again: Sequence[str] = (), run: str = "") -> None:
        """Continue metrics.jsonl and the trackers from this step. Later records are dropped, and
        records of the sets in `again` at this step.

        `run` is the id of the run. Records that are missing or cannot be read are reported.
        """
        self.close_logs()
        if jax.process_index() == 0:
            # This creates the folder.
            self._metrics = MetricsLog(self._folder, step, again, run, self._mark)
            problems = self._metrics.problems
            if self._keeps_samples:
                self._samples = MetricsLog(self._folder, step, again, run, file_name=SAMPLES)
                problems = [*problems, *self._samples.problems]
                self._sampled_at = {
                    taken.sample.set: taken.step for taken in read_samples(self._folder)
                }
            for problem in problems:
                self._progress.message(problem, style="bold red")
            self.end_at = self._metrics.end_at
            self.made_before = self._metrics.dropped_to
            self._is_open = True
            self._trackers.rewind(step)
        self._progress.update(step)

    def close_logs(self) -> None:
        """Close metrics.jsonl and samples.jsonl, whose records are on the disk already."""
        if self._metrics and self._is_open:
            self._is_open = False
            self._metrics.close()
            if self._samples:
                self._samples.close()

    def write(
        self, step: int, values: Mapping[str, Any], kind: Literal["train", "eval", "end", "norms"]
    ) -> None:
        """Write one record to every log; kinds are those of `MetricsLog`."""
        if self._metrics and self._is_open:
            self._metrics.append(step, values, kind=kind)
            self._trackers.log(step, values, kind)

    def write_samples(self, step: int, samples: Sequence[CompletionSample]) -> None:
        """Write completions of prompts after this step, all of one set, to samples.jsonl and the
        trackers, and show them."""
        if not samples or not self._samples or not self._is_open:
            return
        for sample in samples:
            self._samples.append(step, sample.record(), kind=KIND)
            self._progress.sample(step, sample.prompt, sample.words())
        self._trackers.show_samples(step, samples)
        self._sampled_at[samples[0].set] = step

    def has_samples(self, step: int, name: str) -> bool:
        """Return whether the log has samples of this set after this step."""
        return self._sampled_at.get(name) == step

    # Steps

    def add(self, origin: HostBatch, value: Mapping[str, Any], shape: tuple[int, int]) -> None:
        """Count a step.

        Args:
            origin: the host batch of the step.
            value: the metrics of the step, on the host.
            shape: rows and length of the batch.
        """
        targets = float(value["targets"])
        # A non-finite count means a damaged batch, whose step was skipped.
        is_known = math.isfinite(targets)
        num_targets = 0
        if is_known:
            num_targets = int(targets)
        self._speed.add(num_targets, *shape)
        self._tokens_seen += num_targets
        weight = float(value["loss_weight"])
        if is_known and math.isfinite(value["loss"]):
            self._sums += (float(value["loss"]) * weight, weight)
        if "source_nll" in value:
            self._by_source += np.stack([value["source_nll"], value["source_targets"]])
        interval = self._norms_interval
        if interval and (origin.step + 1) % interval == 0:
            self._write_norms(origin.step + 1, value["norms"])

    def _write_norms(self, step: int, norms: np.ndarray) -> None:
        """Write a record of the norms of each layer at this step."""
        record = {}
        for measured, row in zip(MEASURED, norms, strict=True):
            for name, norm in zip(self._norm_names, row, strict=True):
                record[f"{measured}/{name}"] = norm.item()
        self.write(step, record, "norms")

    def record(
        self, origin: HostBatch, value: Mapping[str, Any], hosts: Sequence[HostTime]
    ) -> None:
        """Write one record: the numbers of this step, and means and speed since the last record.

        The step is the last one that was added. `hosts` has the processes' own times since the last
        record.
        """
        step = origin.step + 1
        num_steps = self._speed.num_steps
        speed = self._speed.lap()
        record: dict[str, Any] = dict(self._losses(value))
        record["learning_rate"] = value["learning_rate"].item()
        record["skipped"] = value["skipped"].item()
        for name in (*self._terms, "loss_scale", "weight_norm"):
            if name in value:
                record[name] = value[name].item()
        if origin.made is not None:
            record |= origin.made.numbers
        record |= self._counts(step, value)
        record |= self._losses_by_source()
        record["batch"] = origin.digest
        for name, words in value.items():
            if name.endswith("_hash"):
                record[name] = hash_text(words)
        record["tokens_seen"] = self._tokens_seen
        record |= speed
        slowest = slowest_of(hosts)
        record |= in_record(slowest, num_steps)
        warning = self._stragglers.warning(slowest, num_steps, speed["step_seconds"] or 0.0)
        if warning:
            self._progress.message(f"step {step:,}: {warning}", style="yellow")
        record |= memory_in_use(jax.local_devices())
        for name, passes in self._plan.epochs_at(step).items():
            record[f"epochs/{name}"] = passes
        for name, number in self._epochs_begun(step).items():
            record[f"epoch_begun/{name}"] = number
            # Steps that are repeated after a rollback are not logged again.
            if number > self._epoch_logged.get(name, 1):
                self._epoch_logged[name] = number
                self._progress.message(f"step {step:,}: epoch {number:,} of {name} has begun")
        self.write(step, record, "train")
        self._progress.update(step, record)

    def _losses(self, value: Mapping[str, Any]) -> dict[str, float | None]:
        """Return the mean loss since the last record, and the numbers of this step alone."""
        total, weight = self._sums
        self._sums = np.zeros_like(self._sums)
        of_step: dict[str, float | None] = {
            "step_loss": value["loss"].item(),
            "objective": value["objective"].item(),
            "grad_norm": value["grad_norm"].item(),
        }
        # A mean over no targets is null, not 0.
        if not value["targets"]:
            of_step = dict.fromkeys(of_step)
        loss = of_step["step_loss"]
        if weight:
            # Rounded to float32 like every loss, so that the mean of one step equals the number
            # that the device computed.
            loss = np.float32(total / weight).item()
        return {"loss": loss, **of_step}

    def _counts(self, step: int, value: Mapping[str, Any]) -> dict[str, int]:
        """Count the anomalies of each kind in this run, and the rollbacks."""
        counts = {}
        for kind, count in zip(ANOMALIES, value["anomalies"], strict=True):
            if count:
                counts[f"anomalies/{kind}"] = count.item()
        rollbacks = [rollback for rollback in self._rollbacks if step >= rollback["left_out"][0]]
        if rollbacks:
            counts["rollbacks"] = len(rollbacks)
        return counts

    def _epochs_begun(self, step: int) -> dict[str, int]:
        """Return the number (from 2 on) of each epoch that began since the record before this step,
        by source.

        The result depends on the step alone, so that a run that was stopped has the same records.
        """
        last_record = (step - 1) // self._log_interval * self._log_interval
        # A plan that continues from a cursor does not cover the steps before it.
        first = self._plan.spans[0].step
        before = self._plan.epochs_at(max(first, last_record))
        begun = {}
        for name, passes in self._plan.epochs_at(step).items():
            # A whole number of passes means that the next epoch has not begun yet.
            number = math.ceil(passes - _ROUNDING)
            if number > max(1, math.ceil(before[name] - _ROUNDING)):
                begun[name] = number
        return begun

    def _losses_by_source(self) -> dict[str, float]:
        """Return the mean loss of each source since the last record."""
        totals, counts = self._by_source
        self._by_source = np.zeros_like(self._by_source)
        losses = {}
        for name, total, count in zip(self._plan.names, totals, counts, strict=True):
            if count:
                losses[f"loss/{name}"] = total / count
        return losses
