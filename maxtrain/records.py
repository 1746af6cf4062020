"""The steps of a run as they become known: fetched from the device, judged, written down."""

import contextlib
import math
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from data_pipeline.errors import DataError, DivergedError, UsageError
from data_pipeline.guard import BatchGuard
from data_pipeline.loader import Batch as HostBatch
from maxtrain.checkpoint.rollback import Rollback, left_out
from maxtrain.config.schema import ANOMALIES
from maxtrain.job import Job
from maxtrain.models.cost import token_flops
from maxtrain.observe.anomaly import Anomalies, Finding
from maxtrain.observe.metrics import Kept, MetricsLog, Stopwatch, read_metrics
from maxtrain.observe.progress import Progress
from maxtrain.observe.trackers import TensorBoard
from maxtrain.ops.digest import hash_text, leaf_names
from maxtrain.parallel.agreement import gather, gather_bytes, raise_together
from maxtrain.parallel.hardware import Peak
from maxtrain.training.step import Metrics


class Records:
    """What is known of a run's steps, and the logs that say so.

    Steps are fetched together, whenever something is due, so that the device need not wait for the
    host after each.
    """

    def __init__(self, job: Job, clock: Stopwatch, progress: Progress):
        self._job, self._config, self._data = job, job.config, job.data
        self._clock, self._progress = clock, progress
        self._folder = Path(job.config.output_dir, job.config.run_name)
        self._flops = {length: token_flops(self._config.model, length) for _, length in job.layouts}
        moments = [f"opt_state.{name}" for name in leaf_names(job.abstract.opt_state)]
        self._leaves = [*leaf_names(job.abstract.params), *moments]
        self.peak: Peak | None = None  # of one device, which the speed is compared with
        self._waited = 0.0  # seconds that steps had waited for their batches at the last record
        self._logs: list[MetricsLog | TensorBoard] = []
        self.made_before = 0  # the last step of the records that were dropped, known to process 0
        self.end_at: int | None = (
            None  # the step of the last record of why the run ended early, known to process 0
        )
        self._metrics: MetricsLog | None = (
            None  # the one of these that checkpoints remember, on process 0
        )
        self.restore(None, [])

    def restore(self, record: dict[str, Any] | None, rollbacks: Sequence[Rollback]) -> None:
        """As they were at a checkpoint with this record; None: as before the first step."""
        data, saved = self._config.data, record or {}
        self.guard = BatchGuard(
            data.zero_weight, data.min_fill, data.max_empty_rows, data.fill_patience, data.repeated
        )
        if "guard" in saved:
            self.guard.restore(saved["guard"])
        self._anomalies = Anomalies(self._config.anomaly, self._leaves, self._data.describe_rows)
        self._rollbacks, self.left_out = rollbacks, left_out(rollbacks)
        self._window: list[tuple[HostBatch, Metrics]] = []  # since the last look, on the device
        self._lap: list[
            tuple[int, int, int]
        ] = []  # targets, rows and length of each step since the last record
        self.skipped_in_row = 0  # non-finite steps, up to the last one that was looked at
        self.skipped = saved.get(
            "skipped", 0
        )  # steps of the whole run that changed nothing, likewise
        nothing = np.zeros((2, len(self._data.plan.names)))
        # Nats and targets of each source since the last record. Those of steps that were not finite
        # are saved as words.
        self._by_source = np.array(saved.get("by_source", nothing), np.float64)
        if self._by_source.shape != nothing.shape:  # other data, by data.accept_changes
            self._by_source = nothing
        self._sums = np.array(
            saved.get("since_record", (0.0, 0.0)), np.float64
        )  # nats and targets, of all sources
        self._tokens_seen = saved.get("tokens_seen", 0)
        self._kept = (
            Kept(**saved["metrics"]) if saved.get("metrics") else None
        )  # of the log, when the checkpoint was saved
        ending = saved.get("ending", "")
        self.ending = (
            ending if self._still_ends(ending, saved) else ""
        )  # why the run ends before its plan does

    def _still_ends(self, ending: str, saved: dict[str, Any]) -> bool:
        """Whether what ended the run does so with this config, too: the ending names it. Of
        evaluations others judge."""
        if self._data.start == saved.get("cursor"):  # other data, by data.accept_changes
            return False
        if "(data.repeated)" in ending:
            return self._config.data.repeated == "stop"
        return "(eval.stop_patience" in ending or self._config.data.zero_weight == "stop"

    def go_on_unless(self, still: str, cause: str) -> None:
        """Forgets an ending by this cause where it is none any more: nothing ends the run
        `still`."""
        if f"({cause}" in self.ending and not still:
            self.ending = ""

    def state(self) -> dict[str, Any]:
        """What a checkpoint's record has to hold of them."""
        return {
            "metrics": self._metrics.kept()._asdict() if self._metrics else None,
            "tokens_seen": self._tokens_seen,
            "skipped": self.skipped,
            "guard": self.guard.state(),
            "ending": self.ending,
            "since_record": self._sums.tolist(),
            "by_source": [
                [x if math.isfinite(x) else str(x) for x in row] for row in self._by_source.tolist()
            ],
        }

    def evaluated(self, step: int) -> dict[str, set[str | None]]:
        """Evaluation sets on record at a step, each with the texts that it was; None: a record that
        does not say."""
        found = defaultdict[str, set[str | None]](set)
        with contextlib.suppress(
            DataError
        ):  # what can't be read is told of where the log is opened
            for record in read_metrics(self._folder):
                if record["kind"] == "eval" and record["step"] == step:
                    found[record["set"]].add(record.get("data"))
        return found

    def open_logs(self, step: int, again: Sequence[str] = (), run: str = "") -> None:
        """Logs that go on from this step; what they said of later ones is dropped, and of sets
        evaluated `again` there.

        `run` is the id of the run. Records that are not there any more, or can't be read, are told
        of.
        """
        self.close_logs()
        folder = self._folder
        if jax.process_index() == 0:
            log = MetricsLog(folder, step, again, run, self._kept)  # makes the folder
            for problem in log.problems:
                self._progress.message(problem, style="bold red")
            self._logs.append(log)
            self._metrics = log
            self.end_at = log.end_at
            self.made_before = log.dropped_to
            if self._config.observe.tensorboard:
                try:
                    self._logs.append(TensorBoard(folder, step))
                except (
                    UsageError
                ) as missing:  # no run ends for want of a picture: metrics.jsonl has every number
                    self._progress.message(
                        f"{missing} The run goes on without its files.", style="yellow"
                    )
        self._progress.update(step)

    def close_logs(self) -> None:
        """Closes the logs, whose records are on the disk already."""
        logs, self._logs = self._logs, []
        for log in logs:
            log.close()

    def write(
        self, step: int, values: dict[str, Any], kind: Literal["train", "eval", "end"]
    ) -> None:
        """One record in every log; kinds are those of `MetricsLog`."""
        for log in self._logs:
            log.append(step, values, kind=kind)

    def add(self, origin: HostBatch, metrics: Metrics) -> None:
        """A step that is on its way: where its batch comes from, and its metrics, on the device."""
        self._window.append((origin, metrics))

    def look(self, write: bool) -> Finding | None:
        """Fetches the metrics of the steps since the last look, judges each, and writes down the
        last one if asked to.

        Returns an anomaly after which the device has made no step: the step that shows it, and
        those after it, are not made.

        Raises:
            DivergedError: too many non-finite steps in a row.
            DataError: a batch without targets, if data.zero_weight is "raise".
            UserError: a process could not read its part of a batch.
        """
        origins, metrics = zip(*self._window) if self._window else ((), ())
        window, self._window = list(zip(origins, jax.device_get(metrics), strict=True)), []
        for (origin, value), repeats in zip(window, self._compare(origins), strict=True):
            if found := self._judge(origin, value, repeats):
                return found
        if write and window:
            self._record(*window[-1])
        return None

    def _judge(self, origin: HostBatch, value: dict[str, Any], repeats: bool) -> Finding | None:
        step, shape = origin.step + 1, self._job.layout(origin.step).shape
        self.skipped_in_row = int(value["skipped_in_row"])
        self.skipped = int(value["skipped"])
        findings, limit = self._anomalies.observe(step, value), self._config.anomaly.max_skipped
        if value["halted"]:
            return next(found for found in findings if found.policy in ("rollback", "stop"))
        for found in findings:
            self._progress.message(f"{found.message} {found.mend}.", style="yellow")
        targets = float(value["targets"])
        is_known = math.isfinite(
            targets
        )  # else the batch itself is damaged, and the step was not made
        self._lap.append((int(targets) if is_known else 0, *shape))
        self._tokens_seen += self._lap[-1][0]
        if math.isfinite(value["loss"]) and is_known:
            self._sums += (float(value["loss"]) * targets, targets)
        if self._config.loss.by_source:
            self._by_source += np.stack([value["source_nll"], value["source_targets"]])
        if origin.step in self.left_out:
            return None
        empty_rows = float(value["empty_rows"])
        verdict = (
            self.guard.observe(step, targets, empty_rows, shape, repeats) if is_known else None
        )
        if verdict is not None and verdict.back:
            mend = "Look for the same text in several sources (prepare --dedupe), or set data.repeated=warn"
            return Finding(
                step,
                "repeated",
                verdict.back,
                f"{verdict.message} {self._data.describe_rows(step - 1)}",
                mend,
            )
        if verdict is not None and verdict.message:
            self._progress.message(verdict.message, style="yellow")
            self.ending = verdict.message if verdict.stop else self.ending
        if value["skipped_in_row"] > limit:
            found = self._anomalies.describe(step, "non_finite", value)
            raise DivergedError(
                f"{found.message}\n  {value['skipped_in_row']} steps in a row were not finite and changed nothing; "
                f"anomaly.max_skipped={limit} allows no more. {found.mend}."
            )
        return None

    def _compare(self, origins: Sequence[HostBatch]) -> list[bool]:
        """Of each batch whether its tokens were read before, elsewhere.

        Raises:
            DataError: the processes do not read the same batches.
            UserError: one can't read its part of them.
        """
        if not origins:
            return []
        last, error = origins[-1], next((origin.error for origin in origins if origin.error), None)
        part = self._job.layout(last.step).identity
        said = gather(
            {"step": last.step + 1, "rows": last.digest, "part": part, "failed": error is not None}
        )
        if any(theirs["failed"] for theirs in said):
            raise_together(error)
        for process, theirs in enumerate(said):
            if (theirs["step"], theirs["rows"]) != (said[0]["step"], said[0]["rows"]):
                where = [f"rows {x['rows']} at step {x['step']}" for x in (theirs, said[0])]
                mend = "Give all processes the same config and data, and go on from the last checkpoint"
                raise DataError(
                    f"process {process} reads {where[0]}, process 0 {where[1]}. {mend}."
                )
        contents = gather_bytes(
            np.array([origin.content for origin in origins], np.uint64).view(np.uint8)
        ).view(np.uint64)
        of_parts = dict(
            zip((theirs["part"] for theirs in said), contents)
        )  # a part may be on several hosts
        whole = np.sum(list(of_parts.values()), axis=0, dtype=np.uint64).tolist()
        return [
            self.guard.repeats(content, origin.place, origin.step)
            for content, origin in zip(whole, origins)
        ]

    def _record(self, origin: HostBatch, value: dict[str, Any]) -> None:
        """Writes one record: the numbers of this step, and the speed since the last record."""
        step, names = origin.step + 1, self._data.plan.names
        seconds, (lap, self._lap) = self._clock.lap(), (self._lap, [])
        waited, self._waited = self._waited, self._clock.seconds().get("data_wait", 0.0)
        (nats, targets), self._by_source = self._by_source, np.zeros_like(self._by_source)
        (sum_nats, sum_targets), self._sums = self._sums, np.zeros_like(self._sums)
        own = {
            "step_loss": value["loss"],
            **{name: value[name] for name in ("objective", "grad_norm")},
        }
        own = {
            name: number.item() if value["targets"] else None for name, number in own.items()
        }  # of nothing: not 0
        # In float32, as every loss: of one step the mean is then the very number that the device
        # computed.
        loss = np.float32(sum_nats / sum_targets).item() if sum_targets else own["step_loss"]
        record = {
            "loss": loss,
            **own,
            **{name: value[name].item() for name in ("learning_rate", "skipped")},
        }
        record |= {
            name: value[name].item()
            for name in ("z", "adversarial", "loss_scale", "weight_norm")
            if name in value
        }
        record |= {
            f"anomalies/{kind}": count.item()
            for kind, count in zip(ANOMALIES, value["anomalies"])
            if count
        }
        count = sum(step >= rollback["left_out"][0] for rollback in self._rollbacks)
        record |= {"rollbacks": count} if count else {}
        record |= {
            f"loss/{name}": nll / count for name, nll, count in zip(names, nats, targets) if count
        }
        record |= {
            "batch": origin.digest,
            **{name: hash_text(words) for name, words in value.items() if name.endswith("_hash")},
            "tokens_seen": self._tokens_seen,
            "fill": lap[-1][0] / math.prod(lap[-1][1:]),
            "tokens_per_second": sum(targets for targets, _, _ in lap) / seconds,
            "positions_per_second": sum(rows * length for _, rows, length in lap) / seconds,
            "step_seconds": seconds / len(lap),
            "data_wait_seconds": (self._waited - waited) / len(lap),
        }
        full = sum(rows * length * self._flops[length].full for _, rows, length in lap)
        causal = sum(rows * length * self._flops[length].causal for _, rows, length in lap)
        record |= {
            "mfu": self._utilization(full, seconds),
            "mfu_causal": self._utilization(causal, seconds),
        }
        record |= {
            f"epochs/{name}": passes for name, passes in self._data.plan.epochs_at(step).items()
        }
        self.write(step, record, "train")
        self._progress.update(step, record)

    def _utilization(self, flops: float, seconds: float) -> float | None:
        """The share of the devices' peak that so many operations in so many seconds are; None if
        that is not known."""
        if self.peak is None:
            return None
        with self._clock.during("compile"):  # what measuring the peak again takes, if it does
            return self.peak.share(flops / seconds / jax.device_count())
