"""The main job: `python -m maxtrain.train config=NAME key=value ...`. Read `run` first, top to bottom.

config -> data and its plan -> devices -> model -> state (new, imported or restored) -> loop [batch, step, log, evaluate,
save] -> finish. The same command goes on where a stopped run was, to the same numbers.
"""

import sys

from maxtrain.config import RunConfig, fit_to_devices, from_command_line, leaves, to_yaml

if __name__ == "__main__":  # before jax is imported, so that --help and config errors come at once
    CONFIG = from_command_line(sys.argv[1:], "python -m maxtrain.train")

import dataclasses
import importlib.metadata
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from data_pipeline.errors import ConfigError, DataError, DivergedError, TryAgainError, run_command
from data_pipeline.guard import BatchGuard
from data_pipeline.loader import Batch as HostBatch
from data_pipeline.loader import EvaluationData, TrainingData, open_evaluation, require_one_tokenizer, resume_training
from data_pipeline.shards import write_atomic
from maxtrain.checkpoint.manager import Checkpoints, latest_record
from maxtrain.finish import finish
from maxtrain.models.cost import token_flops
from maxtrain.observe.metrics import MetricsLog, Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.trackers import TensorBoard
from maxtrain.parallel import distributed
from maxtrain.parallel.agreement import gather, require_agreement
from maxtrain.parallel.batches import BatchLayout, prefetch
from maxtrain.parallel.hardware import peak_flops
from maxtrain.parallel.mesh import make_mesh
from maxtrain.signals import StopRequest
from maxtrain.training.evaluate import evaluate, make_eval_step
from maxtrain.training.objective import Batch, next_token
from maxtrain.training.optimizer import make_optimizer, make_schedule
from maxtrain.training.state import TrainState, abstract_model, abstract_state, create_state, state_from_params
from maxtrain.training.step import Metrics, make_train_step
from maxtrain.weights.hf import load_weights


def run(config: RunConfig) -> None:
    """A whole run, from its config to its last checkpoint and summary.

    Raises:
        UserError: what went wrong, with the exit code that says whether the same command may be tried again.
    """
    clock = Stopwatch()
    folder = Path(config.output_dir, config.run_name)
    saved = latest_record(folder / "checkpoints")
    data, sets = open_data(config, saved)
    config = asked = with_vocabulary(config, data.vocab_size)
    distributed.start(config.mesh, config.observe.compilation_cache)
    config = fit_to_devices(config, jax.device_count())  # what was asked for is saved: it fits other machines too
    mesh = make_mesh(config.mesh)
    chief = jax.process_index() == 0
    checkpoints = Checkpoints(folder / "checkpoints", config.checkpoint)
    num_steps = data.plan.num_steps
    with (
        jax.set_mesh(mesh),
        StopRequest() as stop,
        Progress(config.observe.progress if chief else "off", num_steps) as progress,
    ):
        progress.message(data.describe())
        graphdef, params = abstract_model(config.model, config.precision, mesh)
        optimizer = make_optimizer(config.optimizer, num_steps)
        abstract = abstract_state(params, optimizer, mesh)
        describe(progress, config, params, mesh)
        require_agreement("launch", launch_fields(asked, data, sets, saved))
        loop = Loop(config, data, sets, checkpoints, progress, clock, stop, graphdef, abstract, mesh)
        state = loop.restore(optimizer, saved)
        progress.update(loop.step)
        if chief:
            loop.logs.append(MetricsLog(folder, loop.step))  # makes the folder
            if config.observe.tensorboard:
                loop.logs.append(TensorBoard(folder, loop.step))
            if loop.step < num_steps:
                write_atomic(folder / "config.yaml", to_yaml(asked).encode())
        try:
            if loop.step < num_steps:
                schedule = make_schedule(config.optimizer, num_steps)
                step = make_train_step(abstract, graphdef, next_token, optimizer, schedule, config.optimizer.accumulation)
                state = loop.train(step, state)
                checkpoints.wait()  # for all processes; `close` asks nobody, since it may come after an error of one
            else:
                progress.message(f"Nothing to do: {folder} has all {num_steps:,} steps.", style="green")
        finally:
            loop.close()
    if chief:
        whole = jax.process_count() == 1  # else this process does not hold all of the model
        finish(config, data, sets, loop.step, clock, loop.ending, nnx.merge(graphdef, state.params) if whole else None)


def open_data(config: RunConfig, saved: dict[str, Any] | None) -> tuple[TrainingData, dict[str, EvaluationData]]:
    """Training data with its plan solved, and the evaluation sets; all of one tokenizer.

    `saved` is the record of the checkpoint to go on from: what was read before it must be what this config says, unless the
    config accepts that it was not.
    """
    data = resume_training(config.data, config.seed, config.steps, saved)
    rows = config.eval.batch_size or config.data.batch_size
    sets = {name: open_evaluation(s.path, config.data, s.batch_size or rows) for name, s in config.eval.sets.items()}
    first = next(iter(config.data.sources))
    manifests = {f"data.sources.{first}": data.shards[data.plan.names.index(first)].manifest}
    for name, eval_set in sets.items():
        held_out = {shard.sha256 for shard in eval_set.manifest.shards}
        for source, shards in zip(data.plan.names, data.shards):
            if seen := [shard.path for shard in shards.manifest.shards if shard.sha256 in held_out]:
                rule = f"holds {len(seen):,} shards that data.sources.{source} trains on, such as {seen[0]}"
                mend = "Hold out text with `prepare --holdout`, or leave one of the two out"
                raise ConfigError(f"eval.sets.{name}={eval_set.shards.path} {rule}: its loss would say nothing. {mend}.")
    require_one_tokenizer(manifests | {f"eval.sets.{name}": eval_set.manifest for name, eval_set in sets.items()})
    return data, sets


def launch_fields(
    config: RunConfig, data: TrainingData, sets: dict[str, EvaluationData], saved: dict[str, Any] | None
) -> dict[str, str]:
    """What all processes must have in common before the first step; where a host keeps the data is its own affair."""
    own = re.compile(r"observe\..*|mesh\.(coordinator|num_processes|process_id)|.*\.path")
    fields = {key: value for key, value in leaves(config).items() if not own.fullmatch(key)}
    fields |= {f"eval.sets.{name}": eval_set.manifest.uid for name, eval_set in sets.items()}
    versions = {name: importlib.metadata.version(name) for name in ("maxtrain", "jax", "jaxlib", "numpy", "grain")}
    step = f"step {saved['step']}" if saved else "none"
    return fields | versions | {"data": data.fingerprint_at(data.plan.num_steps), "checkpoint": step}


def with_vocabulary(config: RunConfig, vocab_size: int) -> RunConfig:
    """The config with model.vocab_size filled in from the data; raises ConfigError if it is too small for the data."""
    asked = config.model.vocab_size
    if asked is not None and asked < vocab_size:
        raise ConfigError(
            f"model.vocab_size={asked} is smaller than the data's tokenizer, which has {vocab_size} entries. "
            f"Set model.vocab_size to {vocab_size} or more, or to null."
        )
    return dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=asked or vocab_size))


def describe(progress: Progress, config: RunConfig, params: nnx.State, mesh: jax.sharding.Mesh) -> None:
    """What is about to train, and on what."""
    devices, millions = jax.devices(), sum(x.size for x in jax.tree.leaves(params)) / 1e6
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1)
    where = f"{len(devices)} x {devices[0].device_kind}" + (f" ({axes})" if axes else "")
    progress.message(
        f"model: {config.model.family}, {millions:,.2f} M parameters, {config.precision.compute} on "
        f"{config.precision.params} weights; devices: {where}"
    )


@dataclasses.dataclass
class Loop:
    """The loop's parts and its counters. `step` is the number of finished optimizer steps."""

    config: RunConfig
    data: TrainingData
    sets: dict[str, EvaluationData]
    checkpoints: Checkpoints
    progress: Progress
    clock: Stopwatch
    stop: StopRequest
    graphdef: nnx.GraphDef
    abstract: TrainState
    mesh: jax.sharding.Mesh
    step: int = 0
    tokens_seen: int = 0
    best: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)  # step and nll of each set's best evaluation
    ending: str = ""  # why the run ends before its plan does
    peak: float = 0.0  # FLOP/s of one device
    window: list[tuple[HostBatch, Metrics]] = dataclasses.field(default_factory=list)  # since the last flush, on the device
    lap: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)  # targets, rows and length since the last record
    logs: list[Any] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        shapes = {(span.batch_size, span.seq_length) for span in self.data.plan.spans}
        self.layouts = {shape: BatchLayout(self.mesh, *shape) for shape in shapes}
        self.flops = {length: token_flops(self.config.model, length) for _, length in shapes}
        length = self.config.data.seq_length
        self.eval_layouts = {name: BatchLayout(self.mesh, s.batch_size, length) for name, s in self.sets.items()}
        self.eval_step = make_eval_step(self.graphdef, next_token)
        data = self.config.data
        self.guard = BatchGuard(data.zero_weight, data.min_fill, data.max_empty_rows, data.fill_patience)

    def restore(self, optimizer: optax.GradientTransformation, record: dict[str, Any] | None) -> TrainState:
        """The checkpoint of this record if there is one, else imported weights, else random ones."""
        config = self.config
        if record is not None:
            step = record["step"]
            with self.clock.during("restore"):
                self.progress.phase(f"restoring step {step:,}")
                state, _ = self.checkpoints.restore(self.abstract, step)
            self.progress.message(f"Goes on from step {step:,} in {self.checkpoints.directory}.")
            if self.data.start == record["cursor"]:
                changed = f"What was read before step {step:,} is not what this config says: accepted"
                self.progress.message(f"{changed}, by data.accept_changes. The plan begins there.", style="yellow")
            if record["num_steps"] != self.data.plan.num_steps:
                planned = f"The run was planned for {record['num_steps']:,} steps and has {self.data.plan.num_steps:,} now"
                self.progress.message(f"{planned}: the learning rate follows the new plan from here on.", style="yellow")
            self.step, self.tokens_seen, self.best = record["step"], record["tokens_seen"], record.get("best", {})
            return state
        if config.checkpoint.init_from is not None:
            self.progress.phase(f"reading weights from {config.checkpoint.init_from}")
            params = load_weights(self.abstract.params, config.checkpoint.init_from, config.model)
            return state_from_params(self.abstract, params, optimizer)
        self.progress.phase("making the initial weights")
        with self.clock.during("compile"):
            return create_state(self.abstract, config.model, config.precision, optimizer, config.seed)

    def train(self, step: jax.stages.Wrapped, state: TrainState) -> TrainState:
        """Steps until the plan's end, or until somebody asks to stop.

        Raises:
            TryAgainError: asked to stop; everything is saved.
            DivergedError, DataError: see `flush`.
        """
        config, total, compiled = self.config, self.data.plan.num_steps, {}
        host = self.data.iterate(self.step, {rows: layout.rows for (rows, _), layout in self.layouts.items()})
        placed = ((self.layout(batch.step).to_global(batch.arrays), batch._replace(arrays={})) for batch in host)
        batches = prefetch(placed, config.data.prefetch)
        while self.step < total and not self.ending:
            with self.clock.during("data_wait"):
                batch, origin = next(batches)
            shape = self.layout(self.step).shape
            if shape not in compiled:
                compiled[shape] = self.compile(step, state, batch)
            state, metrics = compiled[shape](state, batch)
            self.step += 1
            self.window.append((origin, metrics))
            last = self.step == total
            log_due = last or self.step % config.log_interval == 0
            eval_due = [name for name in self.sets if last or self.due(name)]
            save_due = last or (config.checkpoint_interval and self.step % config.checkpoint_interval == 0)
            stop = self.stop.agreed(log_due) and not last
            self.progress.update(self.step)
            if log_due or eval_due or save_due or stop:
                self.flush(log_due)
            for name in eval_due:
                self.evaluate(name, state)
            if save_due or stop or self.ending:
                self.save(state)
            if stop:
                self.checkpoints.wait()
                raise TryAgainError(
                    f"{self.stop.name or 'a signal to another process'}: stopped and saved at step {self.step:,} of {total:,}. "
                    "Run the same command again to go on."
                )
        return state

    def layout(self, step: int) -> BatchLayout:
        """How the batch of a step lies on the mesh."""
        return self.layouts[self.data.plan.span(step)[3:]]

    def compile(self, step: jax.stages.Wrapped, state: TrainState, batch: Batch) -> jax.stages.Compiled:
        """The compiled step; and the peak that its speed is compared with."""
        self.progress.phase("compiling the step")
        with self.clock.during("compile"):
            compiled = step.lower(state, batch).compile()
            tflops, device = self.config.observe.peak_tflops, jax.local_devices()[0]
            self.peak = tflops * 1e12 if tflops else peak_flops(device, self.config.precision.compute)
        self.progress.phase("")
        return compiled

    def flush(self, log: bool) -> None:
        """Fetches the metrics of the steps since the last flush, judges each, and writes down the last one if it is due.

        Raises:
            DivergedError: too many non-finite steps in a row.
            DataError: a batch without targets, if data.zero_weight is "raise".
        """
        origins, metrics = zip(*self.window) if self.window else ((), ())
        window, self.window = list(zip(origins, jax.device_get(metrics), strict=True)), []
        repeated = self.compare(origins)
        limit = self.config.optimizer.max_skipped
        for origin, value in window:
            step, shape = origin.step + 1, self.layout(origin.step).shape
            self.lap.append((int(value["targets"]), *shape))
            self.tokens_seen += self.lap[-1][0]
            verdict = self.guard.observe(step, float(value["targets"]), float(value["empty_rows"]), shape, step == repeated)
            if verdict is not None:
                self.progress.message(verdict.message, style="yellow")
                self.ending = verdict.message if verdict.stop else self.ending
            if value["skipped_in_row"] > limit:
                raise DivergedError(
                    f"step {step:,}: loss {value['loss']:.4g}, gradient norm {value['grad_norm']:.4g}: "
                    f"{value['skipped_in_row']} steps in a row were not finite and changed nothing; "
                    f"optimizer.max_skipped={limit} allows no more. Lower optimizer.learning_rate, or look at the data there."
                )
        if log and window:
            self.record(*window[-1])

    def compare(self, origins: Sequence[HostBatch]) -> int:
        """A step whose tokens some process has read before, or 0. DataError: the processes do not read the same batches."""
        repeated = [origin.step + 1 for origin in origins if self.repeats(origin)]
        last = origins[-1] if origins else None
        said = gather({"step": last and last.step + 1, "rows": last and last.digest, "repeated": max(repeated, default=0)})
        for process, theirs in enumerate(said):
            if (theirs["step"], theirs["rows"]) != (said[0]["step"], said[0]["rows"]):
                where = [f"rows {x['rows']} at step {x['step']}" for x in (theirs, said[0])]
                mend = "Give all processes the same config and data, and go on from the last checkpoint"
                raise DataError(f"process {process} reads {where[0]}, process 0 {where[1]}. {mend}.")
        return max(theirs["repeated"] for theirs in said)

    def repeats(self, origin: HostBatch) -> bool:
        """Whether this host's tokens of a step are those of an earlier step, from another place; read again to be sure."""
        earlier = self.guard.repeats(origin.content, origin.place, origin.step)
        if earlier is None:
            return False
        first, second = (self.data.batch(step, self.layout(step).rows).arrays["targets"] for step in (earlier, origin.step))
        return np.array_equal(first, second)

    def record(self, origin: HostBatch, value: dict[str, Any]) -> None:
        """Writes one record: the numbers of this step, and the speed since the last record."""
        step = origin.step + 1
        seconds, (lap, self.lap) = self.clock.lap(), (self.lap, [])
        peak_seconds = self.peak * jax.device_count() * seconds
        record = {name: value[name].item() for name in ("loss", "grad_norm", "learning_rate", "skipped")}
        record |= {
            "batch": origin.digest,
            "tokens_seen": self.tokens_seen,
            "fill": lap[-1][0] / math.prod(lap[-1][1:]),
            "tokens_per_second": sum(targets for targets, _, _ in lap) / seconds,
            "positions_per_second": sum(rows * length for _, rows, length in lap) / seconds,
            "step_seconds": seconds / len(lap),
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
        batches = (layout.to_global(batch.arrays) for batch in eval_set.iterate(layout.rows, num_batches))
        with self.clock.during("eval"):
            result = evaluate(self.eval_step, state.params, batches, num_tokens, eval_set.text_bytes)
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
            "seed": self.config.seed,
            "config": to_yaml(self.config),
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
