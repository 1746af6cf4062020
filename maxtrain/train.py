"""The main job: `python -m maxtrain.train config=NAME key=value ...`. Read `run` first, top to bottom.

config -> data and its plan -> devices -> model -> state (new, imported or restored) -> loop [batch, step, log, evaluate,
save] -> finish. The same command goes on where a stopped run was, to the same numbers.
"""

import sys

from maxtrain.config import RunConfig, from_command_line, to_yaml

if __name__ == "__main__":  # before jax is imported, so that --help and config errors come at once
    CONFIG = from_command_line(sys.argv[1:], "python -m maxtrain.train")

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.tree_util import keystr, tree_leaves_with_path

from data_pipeline.errors import DamagedError, DataError, DivergedError, TryAgainError, run_command
from data_pipeline.guard import BatchGuard
from data_pipeline.loader import Batch as HostBatch
from data_pipeline.loader import carry_errors
from data_pipeline.shards import write_atomic
from maxtrain import failpoints
from maxtrain.checkpoint.manager import Checkpoints, latest_record, put_aside
from maxtrain.checkpoint.rollback import Rollback, left_out, read_rollbacks, went_with, write_rollbacks
from maxtrain.config.schema import ANOMALIES
from maxtrain.finish import finish
from maxtrain.job import Job, launch_fields, open_job
from maxtrain.models.cost import token_flops
from maxtrain.observe.anomaly import Anomalies, Finding
from maxtrain.observe.launches import append_launch, launch_record
from maxtrain.observe.lock import RunLock
from maxtrain.observe.metrics import MetricsLog, Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.trackers import TensorBoard
from maxtrain.observe.watchdog import Watchdog
from maxtrain.ops.digest import hash_text, tree_digests
from maxtrain.parallel.agreement import Board, gather, gather_bytes, losing_others, raise_together, require_agreement
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.hardware import peak_flops
from maxtrain.signals import StopRequest
from maxtrain.training.evaluate import evaluate, make_eval_step
from maxtrain.training.objective import Batch
from maxtrain.training.optimizer import eval_params
from maxtrain.training.state import TrainState, zero_summary
from maxtrain.training.step import Metrics


def run(config: RunConfig) -> None:
    """A whole run, from its config to its last checkpoint and summary; damaged checkpoints are put aside.

    Raises:
        UserError: what went wrong, with the exit code that says whether the same command may be tried again.
    """
    failpoints.arm()
    for attempt in itertools.count():  # each has a checkpoint less
        try:
            return run_from_newest(config, f"launch {attempt}")
        except DamagedError as damage:
            put_aside(damage)


def run_from_newest(config: RunConfig, launch: str) -> None:
    """A run from its newest checkpoint on, if it has one; DamagedError, in all processes: that is not what was saved."""
    clock = Stopwatch()
    folder = Path(config.output_dir, config.run_name)
    rollbacks = read_rollbacks(folder)
    saved = latest_record(folder / "checkpoints", lambda record: went_with(record, rollbacks))
    rollbacks = (saved or {}).get("rollbacks", []) if rollbacks is None else rollbacks
    with clock.during("start"):
        job = open_job(config, saved)
    config, num_steps, chief = job.config, job.data.plan.num_steps, jax.process_index() == 0
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    rows, board = job.data.describe_rows, Board("watchdog") if jax.process_count() > 1 else None
    with (
        jax.set_mesh(job.mesh),
        losing_others(),
        contextlib.ExitStack() as held,
        Watchdog(config.watchdog, folder, clock, rows, jax.process_index(), board) as watchdog,
        StopRequest() as stop,
        Progress(config.observe.progress if chief else "off", num_steps) as progress,
    ):
        progress.message(job.data.describe())
        describe(progress, job)
        require_agreement(launch, launch_fields(job, saved) | {"rollbacks": str(rollbacks)})
        if chief:  # not before it is known that all go on: this makes the folder
            held.enter_context(RunLock(folder))
        for line in checkpoints.put_aside_incomplete():
            progress.message(line, style="bold red")
        loop = Loop(job, checkpoints, progress, clock, stop, rollbacks)
        try:
            state = loop.restore(saved)
            watchdog.begin(lambda: loop.step)
            loop.open_logs()
            if chief and loop.step < num_steps:  # what was asked for is saved: it fits other machines too
                write_atomic(folder / "config.yaml", to_yaml(job.asked).encode())
                append_launch(folder, launch_record(job.asked, job.mesh, job.data.fingerprint_at(num_steps), loop.step))
            if loop.step < num_steps and not loop.ending:
                if warning := checkpoints.require_space(job.abstract):
                    progress.message(warning, style="yellow")
                while loop.step < num_steps and not loop.ending:
                    state = loop.train(state)  # once, and once more for every rollback
                with clock.during("save"):
                    checkpoints.wait()  # for all processes; `close` asks nobody, since it may come after an error of one
            else:
                done = f"ended early, and would again. {loop.ending}" if loop.ending else f"has all {num_steps:,} steps."
                progress.message(f"Nothing to do: {folder} {done}", style="yellow" if loop.ending else "green")
        finally:
            loop.close()
    if chief:
        whole = jax.process_count() == 1  # else this process does not hold all of the model
        model = nnx.merge(job.graphdef, eval_params(state)) if whole else None
        finish(config, job.data, job.sets, loop.step, clock, loop.ending, loop.guard.found, model, loop.rollbacks)


def describe(progress: Progress, job: Job) -> None:
    """What is about to train, and on what."""
    config, devices = job.config, jax.devices()
    millions = sum(x.size for x in jax.tree.leaves(job.abstract.params)) / 1e6
    axes = ", ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items() if size > 1)
    where = f"{len(devices)} x {devices[0].device_kind}" + (f" ({axes})" if axes else "")
    progress.message(
        f"model: {config.model.family}, {millions:,.2f} M parameters, {config.precision.compute} on "
        f"{config.precision.params} weights; devices: {where}"
    )
    if config.optimizer.zero:
        progress.message(zero_summary(job.abstract, config.optimizer.zero))


@dataclasses.dataclass
class Loop:
    """The loop's parts and its counters. `step` is the number of finished optimizer steps."""

    job: Job
    checkpoints: Checkpoints
    progress: Progress
    clock: Stopwatch
    stop: StopRequest
    rollbacks: list[Rollback]  # of the run, in their order
    step: int = 0
    tokens_seen: int = 0
    best: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # step and nll of each set's best evaluation
    ending: str = ""  # why the run ends before its plan does
    peak: float = 0.0  # FLOP/s of one device
    waited: float = 0.0  # seconds that steps had waited for their batches at the last record
    window: list[tuple[HostBatch, Metrics]] = dataclasses.field(default_factory=list)  # since the last flush, on the device
    lap: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # targets, rows and length since the last record
    logs: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        job = self.job
        self.config, self.data, self.sets = job.config, job.data, job.sets
        self.flops = {length: token_flops(self.config.model, length) for _, length in job.layouts}
        self.eval_layouts = {n: BatchLayout(job.mesh, s.batch_size, s.config.seq_length) for n, s in self.sets.items()}
        self.eval_step = make_eval_step(job.graphdef, job.objective)
        self.by_source = np.zeros((2, len(self.data.plan.names)))  # since the last record: nats, and targets, of each source
        names = [keystr(path, simple=True, separator=".") for path, _ in tree_leaves_with_path(job.abstract.params)]
        self.leaves = [name.removesuffix(".value") for name in names]
        self.compiled: dict[tuple[int, int], jax.stages.Compiled] = {}  # the step, by shape of batch

    def open_logs(self) -> None:
        """Logs that go on from the present step; what they said of later ones is dropped."""
        for log in self.logs:
            log.close()
        folder, self.logs = Path(self.config.output_dir, self.config.run_name), []
        if jax.process_index() == 0:
            self.logs.append(MetricsLog(folder, self.step))  # makes the folder
            if self.config.observe.tensorboard:
                self.logs.append(TensorBoard(folder, self.step))
        self.progress.update(self.step)

    def restore(self, record: dict[str, Any] | None) -> TrainState:
        """The checkpoint of this record if there is one, else imported weights, else random ones; with what goes with it."""
        data = self.config.data
        self.guard = BatchGuard(data.zero_weight, data.min_fill, data.max_empty_rows, data.fill_patience, data.repeated)
        self.anomalies = Anomalies(self.config.anomaly, self.leaves, self.data.describe_rows)
        self.left_out = left_out(self.rollbacks)
        self.step, self.tokens_seen, self.best, self.ending = 0, 0, {}, ""
        self.window, self.lap = [], []
        self.by_source[:] = 0
        if self.rollbacks:
            self.checkpoints.discard_after(record["step"] if record else -1)
        if record is not None:
            step = record["step"]
            with self.clock.during("restore"):
                self.progress.phase(f"restoring step {step:,}")
                failpoints.hit("restore", step)
                state, _ = self.checkpoints.restore(self.job.abstract, step)
            self.progress.message(f"Goes on from step {step:,} in {self.checkpoints.directory}.")
            if self.data.start == record["cursor"]:
                changed = f"What was read before step {step:,} is not what this config says: accepted"
                self.progress.message(f"{changed}, by data.accept_changes. The plan begins there.", style="yellow")
            if record["num_steps"] != self.data.plan.num_steps:
                planned = f"The run was planned for {record['num_steps']:,} steps and has {self.data.plan.num_steps:,} now"
                self.progress.message(f"{planned}: the learning rate follows the new plan from here on.", style="yellow")
            self.step, self.tokens_seen, self.best = record["step"], record["tokens_seen"], record.get("best", {})
            if "guard" in record:
                self.guard.restore(record["guard"])
            ending = record.get("ending", "")
            policy = data.repeated if "(data.repeated)" in ending else data.zero_weight  # it names what ended the run
            self.ending = ending if policy == "stop" and self.data.start != record["cursor"] else ""
            return state
        weights = self.config.checkpoint.init_from
        self.progress.phase(f"reading weights from {weights}" if weights else "making the initial weights")
        with self.clock.during("compile"):
            return self.job.initial_state()

    def train(self, state: TrainState) -> TrainState:
        """Steps until the plan's end, until somebody asks to stop, or until an anomaly takes the run back.

        Raises:
            TryAgainError: asked to stop; everything is saved.
            DivergedError, DataError: see `flush` and `halt`.
        """
        config, total, compiled = self.config, self.data.plan.num_steps, self.compiled
        step, batches = self.job.make_step(), self.job.batches(self.step, left_out=self.left_out)
        while self.step < total and not self.ending:
            with self.clock.during("data_wait"):
                batch, origin = next(batches)
                batch = failpoints.hit("data", self.step + 1, batch)
            shape = self.job.layout(self.step).shape
            if shape not in compiled:
                compiled[shape] = self.compile(step, state, batch)
            state = failpoints.hit("before_step", self.step + 1, state)
            state, metrics = compiled[shape](state, batch)
            self.step += 1
            state = failpoints.hit("after_step", self.step, state)
            last = self.step == total
            log_due = last or self.step % config.log_interval == 0
            if log_due and config.determinism != "off":
                metrics = metrics | self.job.hashes(state, batch)
            self.window.append((origin, metrics))
            eval_due = [name for name in self.sets if last or self.due(name)]
            save_due = last or (config.checkpoint_interval and self.step % config.checkpoint_interval == 0)
            if log_due:
                jax.block_until_ready(metrics)  # two programs at a time could read each other's messages
            stop = self.stop.agreed(log_due) and not last
            self.progress.update(self.step)
            if (log_due or eval_due or save_due or stop) and (found := self.flush(log_due)):
                del batches  # ends reading ahead
                return self.halt(found, state)
            for name in eval_due:
                self.evaluate(name, state)
            for log in self.logs if self.ending else ():  # before the checkpoint, after which nothing is written any more
                log.append(self.step, {"ending": self.ending, "planned_steps": total}, kind="end")
            if save_due or stop or self.ending:
                self.save(state)
            if stop:
                with self.clock.during("save"):
                    self.checkpoints.wait()
                raise TryAgainError(
                    f"{self.stop.name or 'a signal to another process'}: stopped and saved at step {self.step:,} of {total:,}. "
                    "Run the same command again to go on."
                )
        return state

    def compile(self, step: jax.stages.Wrapped, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """The compiled step; and the peak that its speed is compared with."""
        self.progress.phase("compiling the step")
        with self.clock.during("compile"):
            compiled = step.lower(state, batch).compile()
            tflops, device = self.config.observe.peak_tflops, jax.local_devices()[0]
            self.peak = tflops * 1e12 if tflops else peak_flops(device, self.config.precision.compute)
        self.progress.phase("")
        return compiled

    def flush(self, log: bool) -> Finding | None:
        """Fetches the metrics of the steps since the last flush, judges each, and writes down the last one if it is due.

        Returns an anomaly after which the device has made no step: the step that shows it, and those after it, are not made.

        Raises:
            DivergedError: too many non-finite steps in a row.
            DataError: a batch without targets, if data.zero_weight is "raise".
            UserError: a process could not read its part of a batch.
        """
        origins, metrics = zip(*self.window) if self.window else ((), ())
        window, self.window = list(zip(origins, jax.device_get(jax.block_until_ready(metrics)), strict=True)), []
        repeated = self.compare(origins)
        limit = self.config.anomaly.max_skipped
        for (origin, value), repeats in zip(window, repeated, strict=True):
            step, shape = origin.step + 1, self.job.layout(origin.step).shape
            findings = self.anomalies.observe(step, value)
            if value["halted"]:
                return next(found for found in findings if found.policy in ("rollback", "stop"))
            for found in findings:
                self.progress.message(f"{found.message} {found.mend}.", style="yellow")
            self.lap.append((int(value["targets"]), *shape))
            self.tokens_seen += self.lap[-1][0]
            if self.config.loss.by_source:
                self.by_source += np.stack([value["source_nll"], value["source_targets"]])
            if origin.step in self.left_out:
                continue
            verdict = self.guard.observe(step, float(value["targets"]), float(value["empty_rows"]), shape, repeats)
            if verdict is not None and verdict.back:
                mend = "Look for the same text in several sources (prepare --dedupe), or set data.repeated=warn"
                return Finding(step, "repeated", verdict.back, f"{verdict.message} {self.data.describe_rows(step - 1)}", mend)
            if verdict is not None and verdict.message:
                self.progress.message(verdict.message, style="yellow")
                self.ending = verdict.message if verdict.stop else self.ending
            if value["skipped_in_row"] > limit:
                found = self.anomalies.describe(step, "non_finite", value)
                raise DivergedError(
                    f"{found.message}\n  {value['skipped_in_row']} steps in a row were not finite and changed nothing; "
                    f"anomaly.max_skipped={limit} allows no more. {found.mend}."
                )
        if log and window:
            self.record(*window[-1])
        return None

    def halt(self, found: Finding, state: TrainState) -> TrainState:
        """What an anomaly asks for: goes back, or ends the run as before that step, which the device has halted at.

        Raises:
            DivergedError: the run ends. What it was before the step is saved, unless that is found too late for it.
        """
        config, count = self.config.anomaly, len(self.rollbacks)
        if found.policy in ("skip", "rollback"):
            if count < config.max_rollbacks:
                return self.roll_back(found, state)
            if found.kind == "repeated":  # the device knows nothing of it and has gone on
                used = f"{count} rollbacks, and anomaly.max_rollbacks allows no more"
                raise DivergedError(f"{found.message}\n  The run stops after {used}; nothing was saved. {found.mend}.")
        self.step = found.step - 1
        if self.step:
            halted = state.watch.halted
            watch = state.watch._replace(halted=jax.device_put(np.zeros((), bool), halted.sharding))
            self.save(state._replace(watch=watch))
            self.checkpoints.wait()
        used = f" after {count} rollbacks; anomaly.max_rollbacks allows no more" if found.policy == "rollback" else ""
        saved = f"saved as it was before, at step {self.step:,}" if self.step else "nothing was saved"
        raise DivergedError(f"{found.message}\n  The run stops{used}, {saved}. {found.mend}.")

    def roll_back(self, found: Finding, state: TrainState) -> TrainState:
        """The newest checkpoint before the steps that are left out from now on, up to the one that was found.

        Raises:
            DivergedError: it is of before a change of data that was accepted.
        """
        first = max(1, found.step + 1 - (1 if found.policy == "skip" else self.config.anomaly.leave_out))
        rollbacks = [*self.rollbacks, {"step": found.step, "kind": found.kind, "left_out": [first, found.step]}]
        self.checkpoints.wait()
        record = latest_record(self.checkpoints.directory, lambda record: went_with(record, rollbacks))
        back = record["step"] if record else 0
        if back < self.data.plan.spans[0].step:
            mend = f"Set anomaly.{found.kind}=skip, or lower anomaly.leave_out"
            rule = f"can't go back to step {back:,}, where the data was another (data.accept_changes)"
            raise DivergedError(f"{found.message}\n  The run {rule}. {mend}.")
        assert len({said["back"] for said in gather({"back": back})}) == 1, "processes see different checkpoints"
        if jax.process_index() == 0:
            write_rollbacks(self.checkpoints.directory.parent, rollbacks)
        self.rollbacks = rollbacks
        done = f"back to step {back:,}; steps {first:,} to {found.step:,} are left out"
        count = f"rollback {len(rollbacks)} of at most {self.config.anomaly.max_rollbacks}"
        self.progress.message(f"{found.message}\n  The run goes {done} ({count}).", style="yellow")
        jax.tree.map(lambda x: x.delete(), state)  # there may be no room for two
        state = self.restore(record)
        self.clock.lap()
        self.open_logs()
        return state

    def compare(self, origins: Sequence[HostBatch]) -> list[bool]:
        """Of each batch whether its tokens were read before, elsewhere.

        Raises:
            DataError: the processes do not read the same batches.
            UserError: one can't read its part of them.
        """
        last, error = origins[-1], next((origin.error for origin in origins if origin.error), None)
        part = self.job.layout(last.step).identity
        said = gather({"step": last.step + 1, "rows": last.digest, "part": part, "failed": error is not None})
        if any(theirs["failed"] for theirs in said):
            raise_together(error)
        for process, theirs in enumerate(said):
            if (theirs["step"], theirs["rows"]) != (said[0]["step"], said[0]["rows"]):
                where = [f"rows {x['rows']} at step {x['step']}" for x in (theirs, said[0])]
                mend = "Give all processes the same config and data, and go on from the last checkpoint"
                raise DataError(f"process {process} reads {where[0]}, process 0 {where[1]}. {mend}.")
        contents = gather_bytes(np.array([origin.content for origin in origins], np.uint64).view(np.uint8)).view(np.uint64)
        of_parts = dict(zip((theirs["part"] for theirs in said), contents))  # a part may be on several hosts
        whole = np.sum(list(of_parts.values()), axis=0, dtype=np.uint64).tolist()
        return [self.guard.repeats(content, origin.place, origin.step) for content, origin in zip(whole, origins)]

    def record(self, origin: HostBatch, value: dict[str, Any]) -> None:
        """Writes one record: the numbers of this step, and the speed since the last record."""
        step = origin.step + 1
        seconds, (lap, self.lap) = self.clock.lap(), (self.lap, [])
        waited, self.waited = self.waited, self.clock.seconds().get("data_wait", 0.0)
        peak_seconds = self.peak * jax.device_count() * seconds
        record = {name: value[name].item() for name in ("loss", "objective", "grad_norm", "learning_rate", "skipped")}
        record |= {} if value["targets"] else dict.fromkeys(("loss", "objective", "grad_norm"))  # of nothing: not 0
        record |= {name: value[name].item() for name in ("z", "adversarial", "loss_scale", "weight_norm") if name in value}
        record |= {f"anomalies/{kind}": count.item() for kind, count in zip(ANOMALIES, value["anomalies"]) if count}
        count = sum(step >= rollback["left_out"][0] for rollback in self.rollbacks)
        record |= {"rollbacks": count} if count else {}
        record |= {f"loss/{name}": nll / count for name, nll, count in zip(self.data.plan.names, *self.by_source) if count}
        self.by_source[:] = 0
        record |= {
            "batch": origin.digest,
            **{name: hash_text(words) for name, words in value.items() if name.endswith("_hash")},
            "tokens_seen": self.tokens_seen,
            "fill": lap[-1][0] / math.prod(lap[-1][1:]),
            "tokens_per_second": sum(targets for targets, _, _ in lap) / seconds,
            "positions_per_second": sum(rows * length for _, rows, length in lap) / seconds,
            "step_seconds": seconds / len(lap),
            "data_wait_seconds": (self.waited - waited) / len(lap),
            "mfu": sum(rows * length * self.flops[length].full for _, rows, length in lap) / peak_seconds,
            "mfu_causal": sum(rows * length * self.flops[length].causal for _, rows, length in lap) / peak_seconds,
        }
        record |= {f"epochs/{name}": passes for name, passes in self.data.plan.epochs_at(step).items()}
        for log in self.logs:
            log.append(step, record)
        self.progress.update(step, record)

    def due(self, name: str) -> bool:
        """Whether an evaluation set is to be read after this step."""
        interval = self.config.eval.sets[name].interval
        interval = self.config.eval_interval if interval is None else interval
        return interval > 0 and self.step % interval == 0

    def evaluate(self, name: str, state: TrainState) -> None:
        """One evaluation set, whole unless its steps say otherwise."""
        eval_set, layout, asked = self.sets[name], self.eval_layouts[name], self.config.eval.sets[name].steps
        asked = self.config.eval_steps if asked is None else asked
        if not asked:
            return
        self.progress.phase(f"evaluating {name}")
        num_batches, num_tokens = (None, eval_set.num_tokens) if asked < 0 else (asked, None)
        host = eval_set.iterate(layout.part, num_batches)
        if jax.process_count() > 1:
            host = carry_errors(
                host, range(min(num_batches or eval_set.num_batches, eval_set.num_batches)), lambda _: layout.part
            )
        errors: list[Exception] = []
        sums: list[Any] = []

        def placed() -> Iterator[Batch]:
            for batch in host:
                errors.extend([batch.error] if batch.error else [])
                yield layout.to_global(batch.arrays)
            jax.block_until_ready(sums)  # as in `train`
            raise_together(errors[0] if errors else None)

        with self.clock.during("eval"):
            failpoints.hit("eval", self.step)
            step = lambda *given: sums.append(self.eval_step(*given)) or sums[-1]  # noqa: E731
            result = evaluate(step, eval_params(state), placed(), num_tokens, eval_set.text_bytes)
        if math.isfinite(result["nll"]) and result["nll"] < self.best.get(name, {"nll": math.inf})["nll"]:
            self.best[name] = {"step": self.step, "nll": result["nll"]}
        for log in self.logs:
            log.append(self.step, {"set": name, **result, "best_step": self.best.get(name, {}).get("step")}, kind="eval")
        self.progress.evaluated(self.step, name, result)
        self.progress.phase("")

    def save(self, state: TrainState) -> None:
        """A checkpoint of this step; in the background if the config says so."""
        record = {
            "step": self.step,
            "num_steps": self.data.plan.num_steps,
            "tokens_seen": self.tokens_seen,
            "data": self.data.fingerprint_at(self.step),
            "cursor": self.data.cursor_at(self.step),
            "start": self.data.start,
            "best": self.best,
            "guard": self.guard.state(),
            "ending": self.ending,
            "rollbacks": self.rollbacks,
            "seed": self.config.seed,
            "config": to_yaml(self.config),
            "digests": tree_digests(state),
        }
        with self.clock.during("save"):
            if self.checkpoints.save(self.step, state, record):
                self.progress.message(f"checkpoint: step {self.step:,}", style="dim")

    def close(self) -> None:
        """Waits for the last save, closes the logs."""
        with self.clock.during("save"):
            self.checkpoints.close()
        for log in self.logs:
            log.close()


def main(config: RunConfig) -> int:
    """Runs, and turns what the user can mend into a message and an exit code."""
    return run_command(lambda: run(config))


if __name__ == "__main__":
    sys.exit(main(CONFIG))
