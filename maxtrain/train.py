"""The main job: `python -m maxtrain.train config=NAME key=value ...`. Read `run` first, top to
bottom.

config -> data and its plan -> devices -> model -> state (new, imported or restored) -> loop [batch,
step, log, evaluate, save] -> finish. The same command goes on where a stopped run was, to the same
numbers.
"""

import sys

from data_pipeline.errors import end_at_signals
from maxtrain.config import RunConfig, from_command_line, to_yaml
from maxtrain.models.families.directory import model_of

if (
    __name__ == "__main__"
):  # before jax is imported, so that --help, config errors and the end by a signal come at once
    end_at_signals()
    CONFIG = from_command_line(sys.argv[1:], "python -m maxtrain.train", model_of)

import contextlib
import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from flax import nnx

from data_pipeline.errors import (
    ConfigError,
    DamagedError,
    DivergedError,
    LostProcessError,
    StorageError,
    TryAgainError,
    run_command,
)
from maxtrain import failpoints
from maxtrain.checkpoint.listing import latest_record, second_of
from maxtrain.checkpoint.manager import Checkpoints, put_aside
from maxtrain.checkpoint.rollback import Rollback, read_rollbacks, went_with, write_rollbacks
from maxtrain.finish import completions, finish
from maxtrain.job import Job, launch_fields, open_job
from maxtrain.observe.anomaly import Finding
from maxtrain.observe.books import RUN
from maxtrain.observe.launches import append_launch, launch_record
from maxtrain.observe.lock import RunLock
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.progress import Progress
from maxtrain.observe.watchdog import Watchdog
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.agreement import (
    Board,
    connect_peers,
    gather,
    is_loss,
    losing_others,
    raise_together,
    require_agreement,
)
from maxtrain.parallel.distributed import leave
from maxtrain.parallel.hardware import Peak
from maxtrain.parallel.memory import (
    STATE_MEND,
    STEP_MEND,
    bytes_beside_arguments,
    bytes_on_device,
    is_out_of_memory,
    out_of_memory,
    require_memory,
)
from maxtrain.records import Records
from maxtrain.run_folder import RunFolder
from maxtrain.signals import StopRequest
from maxtrain.training.integrity import Integrity
from maxtrain.training.objective import Batch
from maxtrain.training.optimizer import eval_params
from maxtrain.training.state import TrainState, zero_summary
from maxtrain.validation import STOP_PATIENCE, Validation

_MOST_NAMES = 1 << 16  # bytes in which processes tell each other names of evaluation sets
_MOST_SKIPPED = 0.9  # share of a run's steps that may have changed nothing


def run(config: RunConfig, ends_process: bool = False) -> None:
    """A whole run, from its config to its last checkpoint and summary; damaged checkpoints are put
    aside.

    `ends_process`: the process is to end afterwards, and is ended if it takes too long for that
        after a signal.

    Raises:
        UserError: what went wrong, with the exit code that says whether the same command may be
            tried again.
    """
    failpoints.arm()
    with StopRequest(config.checkpoint.grace_seconds, ends_process) as stop, losing_others():
        for attempt in itertools.count():  # each has a checkpoint less
            try:
                return run_from_newest(config, attempt, stop)
            except DamagedError as damage:
                put_aside(damage)


def run_from_newest(config: RunConfig, attempt: int, stop: StopRequest) -> None:
    """A run from its newest checkpoint on, if it has one; DamagedError, in all processes: that is
    not what was saved.

    `attempt`: how often this process has tried with a newer one.
    """
    clock = Stopwatch()
    folder = Path(config.output_dir, config.run_name)
    second = second_of(folder / "checkpoints", config.checkpoint)
    run_folder = RunFolder(folder, second)
    rollbacks = [] if run_folder.starts_over else read_rollbacks(folder)
    saved = latest_record(
        folder / "checkpoints", lambda record: went_with(record, rollbacks), second
    )
    run_folder.require_checkpoints(config.checkpoint.start_over)
    rollbacks = (saved or {}).get("rollbacks", []) if rollbacks is None else rollbacks
    with clock.during("start"):
        job = open_job(config, saved)
    config, num_steps, chief = job.config, job.data.plan.num_steps, jax.process_index() == 0
    checkpoints = Checkpoints(
        folder / "checkpoints", config.checkpoint, second, run_folder.note_saved
    )
    rows, board = job.data.describe_rows, Board("watchdog") if jax.process_count() > 1 else None
    with (
        jax.set_mesh(job.mesh),
        contextlib.ExitStack() as held,
        Watchdog(config.watchdog, folder, clock, rows, jax.process_index(), board) as watchdog,
        Progress(config.observe.progress if chief else "off", num_steps) as progress,
    ):
        describe(progress, job)
        require_agreement(
            f"launch {attempt}", launch_fields(job, saved) | {"rollbacks": str(rollbacks)}
        )
        connect_peers(job.mesh)
        refused = None
        try:
            if (
                attempt == 0
            ):  # later on, this process keeps on a CPU what it has had before, and would count it as taken
                state = "the training state (weights, moments of the optimizer)"
                require_memory(bytes_on_device(job.abstract), state, STATE_MEND)
            if chief:  # not before it is known that all go on: this makes the folder
                take_locks(held, folder, second)
                run_folder.begin(lambda text: progress.message(text, style="bold red"))
        except (ConfigError, StorageError, OSError) as error:
            refused = error
        raise_together(refused)
        for line in checkpoints.put_aside_incomplete():
            progress.message(line, style="bold red")
        loop = Loop(job, checkpoints, progress, clock, stop, rollbacks, run_folder)
        records = loop.records
        try:
            state = loop.restore(saved)
            checkpoints.copy_newest()  # a launch that was killed may have left that to do
            begin_books(loop, watchdog, saved is None)
            if not loop.done():
                if warning := checkpoints.require_space(job.abstract):
                    progress.message(warning, style="yellow")
                while not loop.done():
                    state = loop.train(state)  # once, and once more for every rollback
            else:
                progress.message(
                    f"Nothing to do: {folder} {loop.why_done()}",
                    style="yellow" if records.ending else "green",
                )
            loop.settle()  # for all processes; `close` asks nobody, since it may come after an error of one
        except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as error:
            if is_loss(error):
                checkpoints.abandon()
            if is_out_of_memory(error):
                raise out_of_memory(
                    error, f"at step {loop.step:,}, in: {clock.doing()[0]}"
                ) from error
            raise
        finally:
            loop.close()
    stop.save_first(None)
    conclude(loop, state)


def conclude(loop: "Loop", state: TrainState) -> None:
    """What a run that has come to its end says. DivergedError: it has hardly trained."""
    job, records = loop.job, loop.records
    problem = lack_of_progress(loop.step, records.skipped)
    if jax.process_index() == 0:
        whole = jax.process_count() == 1  # else this process does not hold all of the model
        model = nnx.merge(job.graphdef, eval_params(state)) if whole else None
        found, ending = records.guard.found, records.ending
        finish(
            job.config,
            job.data,
            job.sets,
            loop.step,
            loop.clock,
            ending,
            found,
            model,
            loop.rollbacks,
            problem,
            loop.validation.read,
        )
    if problem:
        raise DivergedError(problem)


def take_locks(held: contextlib.ExitStack, folder: Path, second: Path | None) -> None:
    """Nobody else writes to the run's folder, nor to that of its copies, until `held` ends."""
    held.enter_context(RunLock(folder))
    if second and second.parents[1].is_dir():  # else there is a warning, and nothing is copied
        held.enter_context(RunLock(second.parent, needed=False))


def begin_books(loop: "Loop", watchdog: Watchdog, is_new: bool) -> None:
    """Opens what this launch writes into the run's folder; `is_new`: it begins at step 1."""
    records = loop.records
    if not loop.done():  # else no time is spent on the run
        watchdog.begin(lambda: loop.step, loop.run_folder.id)
    records.open_logs(loop.step, loop.again, loop.run_folder.id)
    if is_new and records.made_before:
        rule = f"There is no checkpoint, so steps 1 to {records.made_before:,}, which are on record, are made again"
        loop.progress.message(f"{rule}.", style="yellow")
    if jax.process_index() == 0 and not loop.done():
        note_launch(loop.job, loop.run_folder, loop.step)


def note_launch(job: Job, run_folder: RunFolder, step: int) -> None:
    """Writes down what is launched after `step` finished steps: as it was asked for, which fits
    other machines, too."""
    run_folder.write_config(to_yaml(job.asked))
    data = job.data.fingerprint_at(job.data.plan.num_steps)
    record = launch_record(job.asked, job.mesh, data, step)
    append_launch(run_folder.path, record | {RUN: run_folder.id})


def describe(progress: Progress, job: Job) -> None:
    """What is about to train, on which data and devices."""
    progress.message(job.data.describe())
    for note in job.notes:
        progress.message(note, style="yellow")
    config, devices = job.config, jax.devices()
    millions = sum(x.size for x in jax.tree.leaves(job.abstract.params)) / 1e6
    axes = ", ".join(f"{axis} {size}" for axis, size in job.mesh.shape.items() if size > 1)
    where = f"{len(devices)} x {devices[0].device_kind}" + (f" ({axes})" if axes else "")
    progress.message(
        f"model: {config.model.family}, {millions:,.2f} M parameters, {config.precision.compute} on "
        f"{config.precision.params} weights; devices: {where}"
    )
    if config.init.mup_base_width:
        chosen = f"chosen at a width of {config.init.mup_base_width} (init.mup_base_width)"
        progress.message(
            f"muP: initial weights and learning rates for a width of {config.model.embed_dim} as {chosen}"
        )
    if config.observe.sample_interval and jax.process_count() > 1:
        rule = "no process holds all of the model, so the prompts are not completed while it trains"
        progress.message(
            f"observe.sample_interval={config.observe.sample_interval}: {rule}.", style="yellow"
        )
    if config.optimizer.zero:
        progress.message(zero_summary(job.abstract, config.optimizer.zero))


class Loop:
    """The loop and the way back. `step` is the number of finished optimizer steps."""

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        progress: Progress,
        clock: Stopwatch,
        stop: StopRequest,
        rollbacks: list[Rollback],
        run_folder: RunFolder,
    ):
        self.job, self.config, self.data = job, job.config, job.data
        self.checkpoints, self.progress, self.clock, self.stop = checkpoints, progress, clock, stop
        self.rollbacks = rollbacks  # of the run, in their order
        self.run_folder = (
            run_folder  # known as a whole to process 0, which writes all that it tells of
        )
        self.records, self.validation = (
            Records(job, clock, progress),
            Validation(job, clock, progress, stop),
        )
        self.integrity = Integrity(job.config.integrity, job.mesh)
        # Where one process holds all of the model; `describe` tells the others.
        self.samples = job.config.observe.sample_interval if jax.process_count() == 1 else 0
        self.step = 0
        self.unevaluated: list[
            str
        ] = []  # evaluation sets that are to be read after this step, and are not yet
        self.again: list[
            str
        ] = []  # those of them that may have been read by a launch that died before it could save
        self.postponed = (
            False  # a save was due when steps were not finite: it is made after the next good one
        )
        self.compiled: dict[
            tuple[int, int], jax.stages.Compiled
        ] = {}  # the step, by shape of batch

    def restore(self, record: dict[str, Any] | None) -> TrainState:
        """The checkpoint of this record if there is one, else imported weights, else random ones;
        with what goes with it."""
        self.records.restore(record, self.rollbacks)
        self.validation.restore(record)
        self.records.go_on_unless(self.validation.why_stop(), STOP_PATIENCE)
        self.step = record["step"] if record else 0
        self.unevaluated = self.sets_to_read(record)
        self.again = [
            name
            for name in self.unevaluated
            if record is None or name in record.get("unevaluated", [])
        ]
        if self.rollbacks:
            if jax.process_index() == 0:
                self.run_folder.note_discarded_after(self.step)
            self.checkpoints.discard_after(record["step"] if record else -1)
        if record is None:
            weights = self.config.checkpoint.init_from
            self.progress.phase(
                f"reading weights from {weights}" if weights else "making the initial weights"
            )
            with self.clock.during("compile"):
                return self.job.initial_state(self.progress.message)
        with self.clock.during("restore"):
            self.progress.phase(f"restoring step {self.step:,}")
            failpoints.hit("restore", self.step)
            state, _ = self.checkpoints.restore(self.job.abstract, self.step)
        self.progress.message(
            f"Goes on from step {self.step:,} in {self.checkpoints.place(self.step)}."
        )
        if self.data.start == record["cursor"]:
            changed = (
                f"What was read before step {self.step:,} is not what this config says: accepted"
            )
            self.progress.message(
                f"{changed}, by data.accept_changes. The plan begins there.", style="yellow"
            )
        if record["num_steps"] != self.data.plan.num_steps and self.step < self.data.plan.num_steps:
            planned = f"The run was planned for {record['num_steps']:,} steps and has {self.data.plan.num_steps:,} now"
            self.progress.message(
                f"{planned}: the learning rate follows the new plan from here on.", style="yellow"
            )
        return state

    def sets_to_read(self, record: dict[str, Any] | None) -> list[str]:
        """Evaluation sets to read before anything else, at the first step or at a checkpoint with
        this record."""
        if record is None:
            return self.validation.due(0, last=True) if self.config.eval_at_start else []
        if self.step < self.data.plan.num_steps and not self.records.ending:
            return record.get("unevaluated", [])
        # No later step will read a set that is new, or another text than it was.
        left = []
        if jax.process_index() == 0:
            known = self.records.evaluated(self.step)
            due = self.validation.due(self.step, last=True)
            before = {
                name: text
                for name, text in record.get("read", {}).items()
                if name not in record.get("unevaluated", [])
            }
            due = [name for name in due if before.get(name) != self.validation.read[name]]
            left = [
                name
                for name in due
                if not known.get(name, set()) & {self.validation.read[name], None}
            ]
        left = gather({"left": left}, _MOST_NAMES)[0]["left"]
        if new := [name for name in left if name not in record.get("unevaluated", [])]:
            self.progress.message(
                f"Evaluates {', '.join(new)}, which step {self.step:,}, the run's last, was not evaluated on."
            )
        return left

    def done(self) -> bool:
        """Whether nothing of the run is left to do."""
        return not self.unevaluated and (
            self.step >= self.data.plan.num_steps or bool(self.records.ending)
        )

    def why_done(self) -> str:
        """What to say of a run that has nothing left to do."""
        asked = self.data.plan.num_steps
        if self.records.ending:
            return f"ended early, and would again: {self.records.ending}"
        if self.step > asked:
            return f"has {self.step:,} steps, more than the {asked:,} that are asked for. Nothing of it is dropped."
        return f"has all {asked:,} steps."

    def train(self, state: TrainState) -> TrainState:
        """Steps until the plan's end, until somebody asks to stop, or until an anomaly takes the
        run back.

        Raises:
            TryAgainError: asked to stop, everything is saved; or weights that memory has damaged.
            DivergedError: see `Records.look`, `evaluate` and `halt`; or the last steps were not
                finite.
            DataError: see `Records.look`.
        """
        config, total, records = self.config, self.data.plan.num_steps, self.records
        if self.unevaluated and not self.evaluate(self.unevaluated, state):
            raise KeyboardInterrupt
        if self.done():
            return state
        first, step, batches = (
            self.step,
            self.job.make_step(),
            self.job.batches(self.step, left_out=records.left_out),
        )
        while self.step < total and not records.ending:
            try:
                with self.clock.during("data_wait"), self.stop.interrupting():
                    batch, origin = next(batches)
                    batch = failpoints.hit("data", self.step + 1, batch)
            except KeyboardInterrupt:
                if self.step == first:
                    raise
                return self.leave_between_steps(state)
            program = self.program(step, state, batch)
            state = failpoints.hit("before_step", self.step + 1, state)
            repeated = self.integrity.repeat(self.step + 1, program, state, batch)
            state, metrics = program(state, batch)
            self.step += 1
            state = failpoints.hit("after_step", self.step, state)
            last = self.step == total
            log_due = last or self.step % config.log_interval == 0
            if log_due and config.determinism != "off":
                metrics = metrics | self.job.hashes(state, batch)
            records.add(origin, metrics)
            eval_due = self.validation.due(self.step, last)
            save_due = last or self.data.plan.falls_on(config.checkpoint_interval, self.step)
            self.stop.save_first(lambda: self.clock.doing()[0])
            stop, by_clock = (
                asked and not last for asked in self.stop.agreed(save=self.checkpoints.due())
            )
            save_due = save_due or by_clock or self.postponed
            self.progress.update(self.step)
            sample_due = self.samples and not last and self.step % self.samples == 0
            if log_due or eval_due or save_due or sample_due or stop:
                found = self.look(state, write=log_due)
                if found:
                    del batches  # ends reading ahead
                    return self.halt(found, state)
            self.integrity.check(self.step, state, repeated)
            self.unevaluated = eval_due
            if (stop and eval_due) or not self.evaluate(eval_due, state):
                return self.leave(state)
            if sample_due and not stop:
                self.sample(state)
            if save_due or records.ending:  # after which nothing is written of this step any more
                self.save(state)
                if eval_due:
                    self.checkpoints.confirm(
                        self.step
                    )  # an evaluation judges a step as the next step would
            if stop:
                return self.leave(state)
        self.require_saved()
        return state

    def require_saved(self) -> None:
        """DivergedError: the run has come to its end, and its last steps were not finite, so that
        nothing is saved of it."""
        if self.postponed:
            rule = f"the last {self.records.skipped_in_row:,} steps were not finite and changed nothing"
            raise DivergedError(
                f"{rule}, so the run ends without a checkpoint of its last step, {self.step:,}. "
                f"{self.newest()} Lower optimizer.learning_rate, or look at the data of these steps."
            )

    def look(self, state: TrainState, *, write: bool) -> Finding | None:
        """What `Records.look` finds.

        Raises:
            TryAgainError: steps are not finite because the weights are not, and no update has made
                them so.
            DivergedError, DataError, UserError: as `Records.look`.
        """
        try:
            found = self.records.look(write)
        except DivergedError:
            require_finite(state)
            raise
        if self.records.skipped_in_row:
            require_finite(state)
        else:
            self.checkpoints.confirm(self.step - 1)
        return found

    def newest(self) -> str:
        """A sentence about the newest checkpoint."""
        self.checkpoints.wait()
        step = self.checkpoints.latest()
        return (
            "There is no checkpoint."
            if step is None
            else f"The newest checkpoint is that of step {step:,}."
        )

    def evaluate(self, names: Sequence[str], state: TrainState) -> bool:
        """Reads these sets, and writes down what ends here; False if somebody asks to stop: what is
        left is `unevaluated`.

        Raises:
            DivergedError: the loss of one is not finite. Nothing is saved of this step.
            TryAgainError: likewise, because memory has damaged the weights.
        """
        for done, name in enumerate(names):
            self.unevaluated = list(names[done:])
            if (result := self.validation.evaluate(name, self.step, eval_params(state))) is None:
                return False
            self.records.write(self.step, result, "eval")
            if not math.isfinite(result["nll"]):
                require_finite(state)
                rule = f"step {self.step:,}: the loss on eval.sets.{name} is {result['nll']}, so this step is not saved"
                raise DivergedError(
                    f"{rule}. {self.newest()} Lower optimizer.learning_rate, or go on from an earlier step with other settings."
                )
        self.unevaluated = []
        if names and not self.records.ending and self.step < self.data.plan.num_steps:
            self.records.ending = self.validation.why_stop()
        if self.records.ending and self.records.end_at != self.step:
            planned = self.data.plan.num_steps
            self.records.write(
                self.step, {"ending": self.records.ending, "planned_steps": planned}, "end"
            )
        return True

    def sample(self, state: TrainState) -> None:
        """Shows what the model makes of the prompts by now."""
        self.progress.phase("completing the prompts")
        with self.clock.during("eval"):
            model = nnx.merge(self.job.graphdef, eval_params(state))
            texts = completions(self.config, self.data.tokenizer, model)
        for prompt, text in zip(self.config.observe.prompts, texts):
            self.progress.sample(self.step, prompt, text)
        self.progress.phase("")

    def leave_between_steps(self, state: TrainState) -> TrainState:
        """As `leave`, while the next batch is awaited, and nobody has looked at the last steps
        yet."""
        found = self.look(state, write=False)
        if found:
            return self.halt(found, state)
        self.evaluate((), state)  # reads no set, but writes down what ends here
        return self.leave(state)

    def leave(self, state: TrainState) -> NoReturn:
        """Saves, since somebody asks to stop. TryAgainError: always."""
        saved = self.save(state)
        self.settle()
        asked, left = self.stop.name or "a signal to another process", ", ".join(self.unevaluated)
        done = f"stopped and saved at step {self.step:,} of {self.data.plan.num_steps:,}"
        if not saved:
            done = f"stopped at step {self.step:,}, which is not saved: steps before it were not finite. {self.newest()}"
        done += f", before the evaluation of {left}" if left else ""
        raise TryAgainError(f"{asked}: {done}. Run the same command again to go on.")

    def program(
        self, step: jax.stages.Wrapped, state: TrainState, batch: Batch
    ) -> jax.stages.Compiled:
        """The step for batches of this shape, compiled at the first of them."""
        shape = self.job.layout(self.step).shape
        if shape not in self.compiled:
            self.compiled[shape] = self.compile(step, state, batch)
        return self.compiled[shape]

    def compile(
        self, step: jax.stages.Wrapped, state: TrainState, batch: Batch
    ) -> jax.stages.Compiled:
        """The compiled step; and the peak that its speed is compared with.

        Raises:
            ConfigError: in all processes: on a device of one there is not enough memory for it.
        """
        self.progress.phase("compiling the step")
        shape = batch["targets"].shape
        what = f"a step of {shape[0]:,} rows x {shape[1]:,} tokens"
        with self.clock.during("compile"):
            refused = None
            try:
                compiled = step.lower(state, batch).compile()
                if (
                    not self.compiled or jax.default_backend() != "cpu"
                ):  # on a CPU the process keeps what earlier steps needed
                    require_memory(
                        bytes_beside_arguments(compiled),
                        f"{what}, beside the training state,",
                        STEP_MEND,
                    )
            except ConfigError as error:
                refused = error
            except jax.errors.JaxRuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                refused = ConfigError(
                    f"{what} does not fit: {str(error).splitlines()[0][:300]}. {STEP_MEND}."
                )
            raise_together(refused)
            if self.records.peak is None:
                tflops, dtype = self.config.observe.peak_tflops, self.config.precision.compute
                self.records.peak = Peak(tflops, jax.local_devices()[0], dtype)
        self.progress.phase("")
        return compiled

    def halt(self, found: Finding, state: TrainState) -> TrainState:
        """What an anomaly asks for: goes back, or ends the run as before that step, which the
        device has halted at.

        Raises:
            DivergedError: the run ends. What it was before the step is saved, unless that is found
                too late for it.
        """
        config, count = self.config.anomaly, len(self.rollbacks)
        if found.policy in ("skip", "rollback"):
            if count < config.max_rollbacks:
                return self.roll_back(found, state)
            if found.kind == "repeated":  # the device knows nothing of it and has gone on
                used = f"{count} rollbacks, and anomaly.max_rollbacks allows no more"
                raise DivergedError(
                    f"{found.message}\n  The run stops after {used}; nothing was saved. {found.mend}."
                )
        self.step = found.step - 1
        is_saved = False
        if self.step:
            halted = state.watch.halted
            watch = state.watch._replace(halted=jax.device_put(np.zeros((), bool), halted.sharding))
            is_saved = self.save(state._replace(watch=watch))
            self.checkpoints.wait()
        used = (
            f" after {count} rollbacks; anomaly.max_rollbacks allows no more"
            if found.policy == "rollback"
            else ""
        )
        saved = (
            f"saved as it was before, at step {self.step:,}" if is_saved else "nothing was saved"
        )
        raise DivergedError(f"{found.message}\n  The run stops{used}, {saved}. {found.mend}.")

    def roll_back(self, found: Finding, state: TrainState) -> TrainState:
        """The newest checkpoint before the steps that are left out from now on, up to the one that
        was found.

        Raises:
            DivergedError: it is of before a change of data that was accepted.
        """
        first = max(
            1, found.step + 1 - (1 if found.policy == "skip" else self.config.anomaly.leave_out)
        )
        rollbacks = [
            *self.rollbacks,
            {"step": found.step, "kind": found.kind, "left_out": [first, found.step]},
        ]
        self.checkpoints.wait()
        record = latest_record(
            self.checkpoints.directory,
            lambda record: went_with(record, rollbacks),
            self.checkpoints.second,
        )
        back = record["step"] if record else 0
        if back < self.data.plan.spans[0].step:
            mend = f"Set anomaly.{found.kind}=skip, or lower anomaly.leave_out"
            rule = (
                f"can't go back to step {back:,}, where the data was another (data.accept_changes)"
            )
            raise DivergedError(f"{found.message}\n  The run {rule}. {mend}.")
        seen = [said["back"] for said in gather({"back": back})]
        if len({*seen}) > 1:
            rule = f"can't go back: the newest checkpoint before it is, process by process, that of step {seen}"
            raise StorageError(
                f"{found.message}\n  The run {rule}. Give all hosts the same view of {self.checkpoints.directory}."
            )
        if jax.process_index() == 0:
            write_rollbacks(self.checkpoints.directory.parent, rollbacks, self.run_folder.id)
        failpoints.hit("rollback", found.step)
        self.rollbacks = rollbacks
        done = f"back to step {back:,}; steps {first:,} to {found.step:,} are left out"
        count = f"rollback {len(rollbacks)} of at most {self.config.anomaly.max_rollbacks}"
        self.progress.message(f"{found.message}\n  The run goes {done} ({count}).", style="yellow")
        jax.tree.map(lambda x: x.delete(), state)  # there may be no room for two
        state = self.restore(record)
        self.clock.lap()
        self.records.open_logs(self.step, self.again, self.run_folder.id)
        return state

    def save(self, state: TrainState) -> bool:
        """A checkpoint of this step, in the background if the config says so.

        False: the last steps were not finite, which weights may be the cause of that are finite and
            yet worthless. They
        would take the place of good ones, so the save is postponed to the next good step.
        """
        if count := self.records.skipped_in_row:
            if not self.postponed:
                rule = f"step {self.step:,} is not saved, since the last {count:,} steps were not finite"
                self.progress.message(f"checkpoint: {rule}; the next good step is.", style="yellow")
            self.postponed = True
            return False
        self.postponed = False
        self.integrity.check(self.step, state, save=True)
        self.checkpoints.confirm(self.step - 1)
        record = {
            "run": self.run_folder.id,
            "step": self.step,
            "num_steps": self.data.plan.num_steps,
            **self.records.state(),
            "data": self.data.fingerprint_at(self.step),
            "cursor": self.data.cursor_at(self.step),
            "start": self.data.start,
            "best": self.validation.best,
            "stale": self.validation.stale,
            "read": self.validation.read,
            "unevaluated": self.unevaluated,
            "rollbacks": self.rollbacks,
            "seed": self.config.seed,
            "kept": self.job.kept,
            "config": to_yaml(self.config),
        }
        with self.clock.during("save"):
            if self.checkpoints.save(self.step, state, record):
                self.progress.message(f"checkpoint: step {self.step:,}", style="dim")
        return True

    def settle(self) -> None:
        """Waits for the last save, and a while for the copy of it."""
        with self.clock.during("save"):
            self.checkpoints.wait()
            if warning := self.checkpoints.settle(
                min(120.0, self.config.watchdog.save_seconds / 2 or 120.0)
            ):
                self.progress.message(warning, style="yellow")

    def close(self) -> None:
        """Waits for the last save, closes the logs."""
        try:
            with self.clock.during("save"):
                self.checkpoints.close()
        finally:
            self.records.close_logs()


def require_finite(state: TrainState) -> None:
    """TryAgainError: weights or moments are not finite. Updates that would make them so are never
    made (training/step.py)."""
    if bad := non_finite_names({"params": state.params, "opt_state": state.opt_state}):
        more = f" and {len(bad) - 1:,} more arrays are" if len(bad) > 1 else " is"
        rule = f"{bad[0]}{more} not finite, although every update was: that is a fault of memory or of a device"
        mend = "Run the same command again: it goes on from the last checkpoint. If it comes again, test this machine"
        raise TryAgainError(f"{rule}. Nothing of it is saved. {mend}.")


def lack_of_progress(steps: int, skipped: int) -> str:
    """What is wrong with a run most of whose steps changed nothing; empty if nothing is."""
    if steps == 0 or skipped <= _MOST_SKIPPED * steps:
        return ""
    rule = f"{skipped:,} of the run's {steps:,} steps changed nothing, so it has hardly trained"
    mend = "Look at the warnings above and at anomalies/* in metrics.jsonl, lower optimizer.learning_rate, or use other data"
    return f"{rule}. {mend}."


def main(config: RunConfig, ends_process: bool = False) -> int:
    """Runs, and turns what the user can mend into a message and an exit code; see `run`."""
    lost = False

    def job() -> None:
        nonlocal lost
        try:
            run(config, ends_process)
        except LostProcessError:
            lost = True
            raise

    if code := run_command(job):
        leave(code, lost)
    return code


if __name__ == "__main__":
    sys.exit(main(CONFIG, ends_process=True))
