"""A run while it trains: its parts, its state, and the operations that the loop and its hooks call.

The loop itself is in `loop.py`, and what follows each step in `hooks.py`. Here a run is restored
from a checkpoint, makes a step, rolls back, saves and stops.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn

import jax
import numpy as np
from flax import nnx

from data_pipeline.base.errors import (
    ConfigError,
    DamagedError,
    DivergedError,
    StorageError,
    TryAgainError,
)
from data_pipeline.loader.loader import HostBatch
from data_pipeline.shards import TokenShards
from maxtrain import failpoints
from maxtrain.checkpoint.at_url import drop_arrays
from maxtrain.checkpoint.listing import latest_state
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.rollback import Rollback, write_rollbacks
from maxtrain.checkpoint.run_state import Origin, RunState
from maxtrain.config import to_yaml
from maxtrain.config.resumed import changed_state_settings
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.schema import CheckpointConfig
from maxtrain.config.sections.grpo import FROM_REWARDS
from maxtrain.config.words import show
from maxtrain.models.cost import product_weights, token_flops
from maxtrain.objectives.objective import POLICY, Batch
from maxtrain.observe.anomaly import Finding
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.profile import StepTrace, traced_steps
from maxtrain.observe.progress import Progress
from maxtrain.observe.speed import SpeedMeter
from maxtrain.observe.tracking import Trackers
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.agreement import gather, raise_together
from maxtrain.parallel.distributed import report_step
from maxtrain.parallel.hardware import Peak
from maxtrain.rl.evaluation import RewardedPromptEvaluator
from maxtrain.rl.rollouts import Rollouts
from maxtrain.rl.unrewarded_evaluation import PromptEvaluator
from maxtrain.train_step.evaluate import not_finite
from maxtrain.train_step.integrity import Integrity
from maxtrain.train_step.norms import norm_names
from maxtrain.train_step.state import (
    TrainState,
    changing_part,
    constant_part,
    eval_params,
    params_of_models,
    policy_params,
    saved_part,
    with_watch,
)
from maxtrain.train_step.step import Metrics
from maxtrain.trainer.agree_batches import compare_batches
from maxtrain.trainer.compile_step import Programs
from maxtrain.trainer.forks import Fork
from maxtrain.trainer.health import Health
from maxtrain.trainer.job import Job
from maxtrain.trainer.recorder import Recorder
from maxtrain.trainer.reference_logprobs import with_reference
from maxtrain.trainer.reference_model import (
    frozen_digests,
    require_same_frozen_model,
    require_same_stored_teacher,
)
from maxtrain.trainer.run_dir import RunFolder
from maxtrain.trainer.signals import StopRequest, StopRequested
from maxtrain.trainer.validation import STOP_PATIENCE, Validation

_MOST_NAMES = 1 << 16  # bytes of the message with names of evaluation sets
_LONGEST_COPY = 120.0  # longest wait for the copy of the last checkpoint, in seconds


class RollbackRequest(Exception):
    """Exception that leaves the loop because an anomaly requires the checkpoint before its step.
    The devices have made no further step since."""

    def __init__(self, found: Finding):
        super().__init__(found.message)
        self.found = found


class Run:
    """A run, from the checkpoint that it was restored from.

    Attributes:
        step: the number of finished optimizer steps.
        state: parameters, optimizer and counters after that step, on the devices.
        rollbacks: all rollbacks of the run, oldest first.
        unevaluated: evaluation sets that are due after this step and have not been read yet.
        evaluated_again: the sets in `unevaluated` that an earlier launch may have read before it
            died without saving.
        save_is_postponed: a save was due when steps were not finite; the next good step is saved.
        rollouts: the source of batches in on-policy training; else None.
        sample_interval: steps between completions of the prompts; 0: no completions, also if no
            process holds the whole model.
    """

    state: TrainState

    def __init__(
        self,
        job: Job,
        checkpoints: Checkpoints,
        progress: Progress,
        clock: Stopwatch,
        stop: StopRequest,
        rollbacks: list[Rollback],
        folder: RunFolder,
        trackers: Trackers,
        publish: Callable[[], object],
        programs: Programs,
    ):
        self.job = job
        self.config = job.config
        self.data = job.data
        self.checkpoints = checkpoints
        self.progress = progress
        self.clock = clock
        self.stop = stop
        self.rollbacks = rollbacks
        self._publish = publish  # uploads new files to where the run is kept
        self.folder = folder  # only process 0 reads and writes it fully
        config = job.config
        frozen = product_weights(job.abstract.frozen[POLICY], config.model)
        flops = {length: token_flops(config.model, length, frozen) for _, length in job.layouts}
        self.speed = SpeedMeter(clock, flops, jax.device_count())
        self.recorder = Recorder(
            folder.path,
            job.data.plan,
            [quantity.name for quantity in job.recorded],
            trackers,
            self.speed,
            progress,
            config.log_interval,
            config.observe.layer_norms_interval,
            config.observe.slow_host_factor,
            norm_names(job.abstract.trainable, policy_params(job.abstract)),
            keeps_samples=rollout_settings(config) is not None,
        )
        moments = [f"opt_state.{name}" for name in leaf_names(job.abstract.opt_state)]
        buffers = [f"buffers.{name}" for name in leaf_names(job.abstract.buffers)]
        leaves = [*leaf_names(job.abstract.trainable), *moments, *buffers]
        self.health = Health(config, job.data, leaves, progress)
        self.step = 0
        self.unevaluated: list[str] = []
        self.evaluated_again: list[str] = []
        self.save_is_postponed = False
        # Digests of frozen models beside the policy, by their roles, including earlier launches.
        self._frozen_models: dict[str, str] = {}
        # Digests of a stored reference by role; None: its numbers are not attached to the batches
        # yet.
        self._stored_reference: dict[str, str] | None = None
        self._forked_from: Sequence[Origin] = ()
        self.sample_interval = 0
        if jax.process_count() == 1:
            self.sample_interval = job.config.observe.sample_interval
        self.rollouts: Rollouts | None = None
        self._evaluator: RewardedPromptEvaluator | PromptEvaluator | None = None
        settings = rollout_settings(config)
        if settings is not None:
            self.rollouts = Rollouts(
                config,
                job.data,
                job.mesh,
                job.graphdefs,
                folder.path,
                clock,
                progress,
                checkpoints.steps,
            )
            # The same number of slots as rollouts have, so that their compiled programs are reused.
            slots = config.data.batch_size * settings.num_iterations
            slots = min(slots * settings.num_generations, settings.slots)
            if config.objective in FROM_REWARDS:
                rewards = self.rollouts.rewards
                self._evaluator = RewardedPromptEvaluator(
                    config.grpo, job.data.tokenizer, slots, rewards
                )
            else:
                self._evaluator = PromptEvaluator(settings, job.data.tokenizer, slots)
        self.validation = Validation(job, clock, progress, stop, self._evaluator)
        self._integrity = Integrity(job.config.integrity, job.mesh)
        self._repeated: np.ndarray | None = None  # digests of the last step, made a second time
        self._programs = programs
        traced = None
        if config.observe.profile:
            traced = traced_steps(config.observe.profile)
        self.trace = StepTrace(folder.path, traced, clock, progress.message)
        # Steps that have not been checked yet, with their metrics on the devices.
        self._unseen: list[tuple[HostBatch, Metrics]] = []

    @property
    def num_steps(self) -> int:
        """Return the number of steps of the plan."""
        return self.data.plan.num_steps

    # The beginning

    def restore(
        self,
        saved: RunState | None,
        frozen: nnx.State | None = None,
        fork: Fork | None = None,
    ) -> None:
        """Restore the run from a checkpoint.

        Args:
            saved: the state in the checkpoint; None: there is no checkpoint, and the run begins
                with imported or random weights.
            frozen: parameters of the frozen model, if they are in memory already.
            fork: the checkpoint of another run that `saved` comes from; None: it is one of this
                run.
        """
        self._unseen = []
        before = saved or RunState()
        self._forked_from = before.forked_from
        has_other_data = False
        if saved is not None and self.data.start is not None:
            has_other_data = self.data.start == saved.data.cursor
        self.recorder.restore(before.recorder, self.rollbacks)
        self.health.restore(before.health, self.rollbacks, has_other_data)
        self.validation.restore(before.validation, has_other_data)
        self.health.go_on_unless(self.validation.why_stop(), STOP_PATIENCE)
        self.step = before.step
        self.unevaluated = self._sets_to_read(saved)
        self.evaluated_again = [
            name for name in self.unevaluated if saved is None or name in saved.unevaluated
        ]
        if self.rollbacks:
            if jax.process_index() == 0:
                self.folder.note_discarded_after(self.step)
            self.checkpoints.discard_after(saved.step if saved else -1)

        def start() -> TrainState:
            if saved is None:
                return self._initial_state(frozen)
            return self._restored_arrays(saved, frozen, has_other_data, fork)

        if self._stored_reference is None:
            self.state, self._stored_reference = with_reference(
                self.job, self.folder.path, start, self.progress, self.clock
            )
        else:
            self.state = start()
        found = frozen_digests(self.job.frozen_model, self.state) | self._stored_reference
        require_same_frozen_model(self.job.other_model, found, before.frozen_models)
        found |= require_same_stored_teacher(self.data.teacher, before.frozen_models)
        # Digests of earlier models are kept, because a run may return to one of them.
        self._frozen_models = {**before.frozen_models, **found}

    def _initial_state(self, frozen: nnx.State | None) -> TrainState:
        """Create the state before the first step, while showing progress."""
        weights = self.config.checkpoint.init_from
        doing = f"reading weights from {weights}" if weights else "making the initial weights"
        self.progress.phase(doing)
        with self.clock.during("compile"):
            return self.job.initial_state(self.progress.message, frozen)

    def _restored_arrays(
        self,
        saved: RunState,
        frozen: nnx.State | None,
        has_other_data: bool,
        fork: Fork | None,
    ) -> TrainState:
        """Read the arrays of a checkpoint, and log what has changed since it."""
        step = self.step
        with self.clock.during("restore"), self._reading(fork) as checkpoints:
            self.progress.phase(f"restoring step {step:,}")
            failpoints.hit("restore", step)
            self._require_same_frozen(checkpoints, saved)
            with self._naming_settings_of_state(saved, fork):
                state, _ = checkpoints.restore(saved_part(self.job.abstract), step)
            state = self.job.with_frozen_model(state, frozen)
            place = checkpoints.place(step)
        if fork is None:
            self.progress.message(f"Goes on from step {step:,} in {place}.")
        else:
            self.progress.message(
                f"A fork of {fork.origin.place}: continues from its step {step:,}."
            )
        if has_other_data:
            self.progress.message(
                f"What was read before step {step:,} is not what this config says: accepted, by "
                f"data.accept_changes. The plan begins there.",
                style="yellow",
            )
        planned = saved.num_steps
        if planned != self.num_steps and step < self.num_steps:
            planned_for = f"The run was planned for {planned:,} steps and has"
            if fork is not None:
                planned_for = f"{saved.owner} was planned for {planned:,} steps, and this run has"
            self.progress.message(
                f"{planned_for} {self.num_steps:,} now: "
                f"the learning rate follows the new plan from here on.",
                style="yellow",
            )
        return state

    @contextlib.contextmanager
    def _reading(self, fork: Fork | None) -> Iterator[Checkpoints]:
        """Open the checkpoints to restore from: those of another run for a fork, else those of this
        run.

        Raises a StorageError in all processes if the checkpoint of the other run is damaged.
        """
        if fork is None:
            yield self.checkpoints
            return
        checkpoints = Checkpoints(fork.path.parent, CheckpointConfig())
        try:
            yield checkpoints
        except DamagedError as damage:
            raise fork.damaged(damage) from damage
        finally:
            checkpoints.close()
            drop_arrays(fork.path)

    @contextlib.contextmanager
    def _naming_settings_of_state(self, saved: RunState, fork: Fork | None) -> Iterator[None]:
        """Add the settings that cause it to a ConfigError about a checkpoint with other arrays than
        this config needs."""
        try:
            yield
        except ConfigError as error:
            changed = changed_state_settings(saved.config, self.config)
            if not changed:
                raise
            begin_anew = f"set run_name=NAME and checkpoint.init_from={self.folder.path}"
            if fork is not None:
                begin_anew = f"replace checkpoint.fork_from by checkpoint.init_from={saved.owner}"
            problems = [
                f"{key}={show(now)} was {show(before)} until step {saved.step:,} of {saved.owner}, "
                "whose checkpoint holds other arrays than this needs. "
                f"Set {key}={show(before)} to go on. Or begin a new run with its weights: "
                f"{begin_anew}."
                for key, before, now in changed
            ]
            raise ConfigError([*problems, *error.problems]) from error

    def _require_same_frozen(self, checkpoints: Checkpoints, saved: RunState) -> None:
        """Raise a ConfigError if the checkpoint is of a run that trained other parameters."""
        ours = set(leaf_names(constant_part(self.job.abstract)))
        theirs = checkpoints.frozen_names(saved.step)
        if ours == theirs:
            return
        lines = []
        if ours - theirs:
            lines.append(f"they did train {', '.join(sorted(ours - theirs))}")
        if theirs - ours:
            lines.append(f"they did not train {', '.join(sorted(theirs - ours))}")
        train = self.config.train
        raise ConfigError(
            f"train.only={list(train.only)} and train.freeze={list(train.freeze)} choose other "
            f"parameters than the steps of {saved.owner} until now: {', and '.join(lines)}. "
            "Set both back, or begin another run with checkpoint.init_from."
        )

    def _sets_to_read(self, saved: RunState | None) -> list[str]:
        """Return the evaluation sets to read before anything else; `saved` is None at the first
        step."""
        if saved is None:
            if not self.config.eval_at_start:
                return []
            return self.validation.due(0, last=True)
        left_before = list(saved.unevaluated)
        if self.step < self.num_steps and not self.health.ending:
            return left_before
        # No later step will read a set that is new or has new text.
        left = []
        if jax.process_index() == 0:
            left = self._sets_never_read(saved)
        left = gather({"left": left}, _MOST_NAMES)[0]["left"]
        new = [name for name in left if name not in left_before]
        if new:
            self.progress.message(
                f"Evaluates {', '.join(new)}, which step {self.step:,}, the run's last, "
                f"was not evaluated on."
            )
        return left

    def _sets_never_read(self, saved: RunState) -> list[str]:
        """Return the sets whose present text was not evaluated at this step, by its checkpoint and
        metrics.jsonl."""
        read_before = dict(saved.validation.read)
        for name in saved.unevaluated:
            read_before.pop(name, None)
        on_record = self.recorder.evaluated(self.step)
        left = []
        for name in self.validation.due(self.step, last=True):
            now = self.validation.read[name]
            is_read = read_before.get(name) == now
            is_on_record = bool(on_record.get(name, set()) & {now, None})
            if not is_read and not is_on_record:
                left.append(name)
        return left

    # The end

    def done(self) -> bool:
        """Return whether nothing of the run is left to do."""
        if self.unevaluated:
            return False
        return self.step >= self.num_steps or bool(self.health.ending)

    def why_done(self) -> str:
        """Return why the run has nothing left to do."""
        if self.health.ending:
            return f"ended early, and would again: {self.health.ending}"
        if self.step > self.num_steps:
            return (
                f"has {self.step:,} steps, more than the {self.num_steps:,} of the plan. "
                f"All its steps are kept."
            )
        return f"has all {self.num_steps:,} steps."

    def upload_newest(self) -> None:
        """Save the run's step where the run is kept, if only the disks of hosts have it. Call this
        when nothing is left to do."""
        is_uploaded = self.step in self.checkpoints.steps()
        if self.step in self.checkpoints.on_hosts() and not is_uploaded:
            self.save(uploaded=True)

    def require_saved(self) -> None:
        """Raise a DivergedError if the run ended with non-finite steps, so that its last step is
        not saved."""
        if self.save_is_postponed:
            count = self.health.skipped_in_row
            raise DivergedError(
                f"the last {count:,} steps were not finite and changed nothing, so the run ends "
                f"without a checkpoint of its last step, {self.step:,}. {self.newest()} "
                f"Lower optimizer.learning_rate, or look at the data of these steps."
            )

    def settle(self) -> None:
        """Wait for the last save, and for a limited time for its copy. All processes call this."""
        longest = self.config.watchdog.save_seconds / 2 or _LONGEST_COPY
        with self.clock.during("save"):
            self.checkpoints.wait()
            if self.done():
                self.checkpoints.drop_local()
            warning = self.checkpoints.settle(min(_LONGEST_COPY, longest))
            if warning:
                self.progress.message(warning, style="yellow")

    def close(self) -> None:
        """Wait for the last save, and close the logs. No other process is involved, since one may
        have failed."""
        try:
            if self.rollouts is not None:
                self.rollouts.close()
            with self.clock.during("save"):
                self.checkpoints.close()
        finally:
            self.recorder.close_logs()

    # A step

    def batches(self) -> Iterator[tuple[Batch, HostBatch]]:
        """Iterate over the batches of the remaining steps, on the devices, each with its host
        batch."""
        if self.rollouts is None:
            return self.job.batches(self.step, left_out=self.health.left_out)
        return self.rollouts.batches(self.step, lambda: self.state, self.health.left_out)

    def make_step(self, batch: Batch, origin: HostBatch, is_logged: bool) -> None:
        """Start the next step on the devices, and return without waiting for it.

        Args:
            batch: on the devices.
            origin: the host batch it was made of.
            is_logged: whether a training record is due after this step. With determinism the record
                has digests of the weights and of the batch.
        """
        step = self.step + 1
        program = self._program(batch)
        self.state = failpoints.hit("before_step", step, self.state)
        with self.clock.waiting():
            self._repeated = self._integrity.repeat(step, program, self.state, batch)
        with self.clock.waiting(computes=True):
            self.state, metrics = program(self.state, batch)
        self.step = step
        self.state = failpoints.hit("after_step", step, self.state)
        if is_logged and self.config.determinism != "off":
            metrics = metrics | self.job.hashes(self.state, batch)
        self._unseen.append((origin, metrics))

    def prepare(self) -> None:
        """Compile the steps of the largest remaining batches, so that a step that does not fit is
        refused before the first step.

        Raises a ConfigError in all processes if a step does not fit.
        """
        for shape in self.job.largest_shapes(self.step):
            batch = self.job.abstract_batch(shape)
            self._programs.prepare(self.state, batch, self.config.data.prefetch)

    def _program(self, batch: Batch) -> jax.stages.Compiled:
        """Return the compiled step for a batch, and measure the device's peak FLOP/s the first
        time."""
        program = self._programs.of(self.state, batch)
        if self.speed.peak is None:
            with self.clock.during("compile"):
                tflops = self.config.observe.peak_tflops
                dtype = self.config.precision.compute
                self.speed.peak = Peak(tflops, jax.local_devices()[0], dtype)
        return program

    def check_steps(self, write: bool) -> None:
        """Check the steps that have not been checked yet, and write a training record of the last
        one if `write`.

        Raises:
            RollBack: an anomaly requires the checkpoint before its step.
            TryAgainError: the weights are damaged: steps are not finite although every update was.
            DivergedError, DataError, UserError: as for `look`; or an anomaly ends the run.
        """
        try:
            found = self.look(write)
        except DivergedError:
            self._require_finite()
            raise
        if self.health.skipped_in_row:
            self._require_finite()
        else:
            self.checkpoints.confirm(self.step - 1)
        if found is None:
            return
        if found.policy not in ("skip", "rollback"):
            self._end_before(found)
        if len(self.rollbacks) >= self.config.anomaly.max_rollbacks:
            self._end_after_rollbacks(found)
        raise RollbackRequest(found)

    def look(self, write: bool) -> Finding | None:
        """Fetch the metrics of the steps since the last call, check and count each, and write a
        training record of the last one if `write`.

        Metrics are fetched together, so that the devices do not wait for the host after every step.

        Returns:
            The anomaly that invalidates a step and those after it; None: all steps count.

        Raises:
            DivergedError, DataError: as for `Health.check_step`.
            DataError, UserError: as for `compare_batches`.
        """
        if not self._unseen:
            return None
        origins = [origin for origin, _ in self._unseen]
        with self.clock.waiting():
            values = jax.device_get([metrics for _, metrics in self._unseen])
        self._unseen = []
        part = self.job.layout(origins[-1].step).identity
        own = self.speed.own()
        with self.clock.waiting():
            compared = compare_batches(origins, part, own)
        repeats = self.health.repeats(origins, compared.contents)
        for origin, value, is_repeated in zip(origins, values, repeats, strict=True):
            found = self.health.check_step(origin, value, is_repeated)
            if found:
                return found
            shape = self.data.shape_at(origin.step)
            if origin.made is not None:
                shape = origin.made.shape
            self.recorder.add(origin, value, shape)
        if write:
            self.recorder.record(origins[-1], values[-1], compared.hosts)
            if jax.process_index() == 0:
                report_step(origins[-1].step + 1)
        return None

    def check_integrity(self) -> None:
        """Compare the replicas of arrays, and the repeated step with the first, when that is due.
        Raise a TryAgainError if they differ."""
        with self.clock.waiting():
            self._integrity.check(self.step, self.state, self._repeated)

    def evaluate(self) -> None:
        """Evaluate the sets in `unevaluated`, one by one, and remove them from the list.

        Raises:
            StopRequested: a stop was requested; the set that was being read is still in the list.
            DivergedError: the loss on a set is not finite. This step is not saved.
            TryAgainError: the loss on a set is not finite because a memory fault damaged the
                weights.
        """
        had_sets = bool(self.unevaluated)
        while self.unevaluated:
            name = self.unevaluated[0]
            result = self.validation.evaluate(name, self.step, params_of_models(self.state))
            if result is None:
                raise StopRequested
            self.recorder.write(self.step, result.record, "eval")
            self.recorder.write_samples(self.step, result.samples)
            bad = not_finite(result.record)
            if bad is not None:
                self._require_finite()
                raise DivergedError(
                    f"step {self.step:,}: {bad.name} on eval.sets.{name} is {bad.value}, so this "
                    f"step is not saved. {self.newest()} Lower optimizer.learning_rate, or go on "
                    f"from an earlier step with other settings."
                )
            self.unevaluated = self.unevaluated[1:]
        if had_sets and not self.health.ending and self.step < self.num_steps:
            self.health.ending = self.validation.why_stop()

    def sample_prompts(self) -> None:
        """Complete the first prompts of an evaluation set, or of the training data, greedily,
        unless this step has samples already."""
        count = self.config.observe.num_samples
        if self._evaluator is None or not count:
            return
        name, shards = self._prompts_to_sample()
        if self.recorder.has_samples(self.step, name):
            return
        self.progress.phase("completing the prompts")
        with self.clock.during("eval"):
            model = nnx.merge(self.job.policy_graphdef, eval_params(self.state))
            answers = self._evaluator(model, shards, min(count, shards.num_documents))
        self.recorder.write_samples(self.step, answers.samples(name, count))
        self.progress.phase("")

    def _prompts_to_sample(self) -> tuple[str, TokenShards]:
        """Return the fixed prompts for samples, and their name."""
        for name, eval_set in self.job.sets.items():
            if eval_set.shards.has_columns:
                return name, eval_set.shards
        return f"data.sources.{self.data.plan.names[0]}", self.data.shards[0]

    def write_ending(self) -> None:
        """Record, once only, why the run ends before its plan does."""
        ending = self.health.ending
        if ending and self.recorder.end_at != self.step:
            values = {"ending": ending, "planned_steps": self.num_steps}
            self.recorder.write(self.step, values, "end")

    def _require_finite(self) -> None:
        """Raise a TryAgainError if weights or moments are not finite. The step never applies such
        updates (train_step/step.py)."""
        arrays = {
            "params": policy_params(self.state),
            "opt_state": self.state.opt_state,
            "buffers": self.state.buffers,
        }
        bad = non_finite_names(arrays)
        if not bad:
            return
        which = f"{bad[0]} is"
        if len(bad) > 1:
            which = f"{bad[0]} and {len(bad) - 1:,} more arrays are"
        raise TryAgainError(
            f"{which} not finite, although every update was: that is a fault of memory or of a "
            f"device. Nothing of it is saved. Run the same command again: it goes on from the last "
            f"checkpoint. If it comes again, test this machine."
        )

    # Anomalies

    def _end_before(self, found: Finding, used: str = "") -> NoReturn:
        """End the run at the step before an anomaly, where the devices have halted. Always raises a
        DivergedError.

        The state before the anomaly is saved, unless the anomaly was at the first step.
        """
        self.step = found.step - 1
        is_saved = False
        if self.step:
            watch = self.state.control.watch
            going_on = jax.device_put(np.zeros((), bool), watch.halted.sharding)
            self.state = with_watch(self.state, watch._replace(halted=going_on))
            is_saved = self.save(uploaded=True)
            self.checkpoints.wait()
        saved = "nothing was saved"
        if is_saved:
            saved = f"saved as it was before, at step {self.step:,}"
        raise DivergedError(f"{found.message}\n  The run stops{used}, {saved}. {found.fix}.")

    def _end_after_rollbacks(self, found: Finding) -> NoReturn:
        """End the run with a DivergedError because anomaly.max_rollbacks allows no further
        rollback."""
        count = len(self.rollbacks)
        if found.kind == "repeated":  # the device cannot see this anomaly and has continued
            raise DivergedError(
                f"{found.message}\n  The run stops after {count} rollbacks, and "
                f"anomaly.max_rollbacks allows no more; nothing was saved. {found.fix}."
            )
        used = ""
        if found.policy == "rollback":
            used = f" after {count} rollbacks; anomaly.max_rollbacks allows no more"
        self._end_before(found, used)

    def roll_back(self, found: Finding) -> None:
        """Go back to the newest checkpoint before the anomaly, and repeat the steps without those
        that the rollback leaves out.

        Raises:
            DivergedError: that checkpoint is older than an accepted change of data, or the run was
                forked and has no checkpoint to go back to.
            StorageError: the processes see different checkpoints.
        """
        num_left_out = 1
        if found.policy != "skip":
            num_left_out = self.config.anomaly.leave_out
        first = max(1, found.step + 1 - num_left_out)
        rollback = {"step": found.step, "kind": found.kind, "left_out": [first, found.step]}
        rollbacks = [*self.rollbacks, rollback]
        saved = self._newest_state(rollbacks)
        back = saved.step if saved else 0
        # All processes compare before any of them raises, so that all raise the same error.
        seen = [report["back"] for report in gather({"back": back})]
        if len(set(seen)) > 1:
            raise StorageError(
                f"{found.message}\n  The run can't go back: the newest checkpoint before it is, "
                f"process by process, that of step {seen}. Give all hosts the same view of "
                f"{self.checkpoints.directory}."
            )
        if back < self.data.plan.spans[0].step:
            raise DivergedError(
                f"{found.message}\n  The run can't go back to step {back:,}, where the data was "
                f"another (data.accept_changes). Set anomaly.{found.kind}=skip, or lower "
                f"anomaly.leave_out."
            )
        # Without a checkpoint the run would restart with random weights at the first step.
        if saved is None and self._forked_from:
            forked_at = self._forked_from[-1].step
            raise DivergedError(
                f"{found.message}\n  The run has no checkpoint from before step {first:,}, which "
                f"would be left out, and cannot go back before step {forked_at:,}, where it "
                f"was forked. Set anomaly.{found.kind}=skip, or lower anomaly.leave_out."
            )
        self._write_rollbacks(rollbacks)
        failpoints.hit("rollback", found.step)
        self.rollbacks = rollbacks
        self.progress.message(
            f"{found.message}\n  The run goes back to step {back:,}; steps {first:,} to "
            f"{found.step:,} are left out (rollback {len(rollbacks)} of at most "
            f"{self.config.anomaly.max_rollbacks}).",
            style="yellow",
        )
        # The frozen model stays in memory, because its run may have deleted that checkpoint by now.
        frozen = None
        if self.job.frozen_model is not None:
            frozen = self.state.frozen[self.job.frozen_model.role]
        # Device memory may have no room for two states.
        jax.tree.map(lambda x: x.delete(), saved_part(self.state))
        self.restore(saved, frozen)
        self.clock.lap()
        self.recorder.open_logs(self.step, self.evaluated_again, self.folder.id)

    def _write_rollbacks(self, rollbacks: list[Rollback]) -> None:
        """Write rollbacks.json on process 0, before anything else changes. Raise a StorageError, in
        all processes, if that fails."""
        error = None
        if jax.process_index() == 0:
            try:
                write_rollbacks(self.folder.path, rollbacks, self.folder.id)
                self._publish()
            except StorageError as problem:
                error = problem
        raise_together(error)

    def _newest_state(self, rollbacks: list[Rollback]) -> RunState | None:
        """Read the run at its newest checkpoint that these rollbacks allow."""
        self.checkpoints.wait()
        self.checkpoints.refresh()
        return latest_state(
            self.checkpoints.directory,
            lambda saved: saved.went_with(rollbacks),
            self.checkpoints.second,
            self.checkpoints.on_hosts(),
        )

    # Saving and stopping

    def save(self, uploaded: bool = False) -> bool:
        """Save a checkpoint of this step, in the background if the config says so.

        Args:
            uploaded: whether the checkpoint must go to where the run is kept; otherwise the config
                decides whether it may stay on the disks of the hosts.

        Returns:
            False if the last steps were not finite, so that nothing was saved. The weights may be
            the cause even if they are finite, and saving them would displace good ones. The next
            good step is saved instead.
        """
        count = self.health.skipped_in_row
        if count:
            if not self.save_is_postponed:
                self.progress.message(
                    f"checkpoint: step {self.step:,} is not saved, since the last {count:,} steps "
                    f"were not finite; the next good step is.",
                    style="yellow",
                )
            self.save_is_postponed = True
            return False
        self.save_is_postponed = False
        with self.clock.waiting():
            self._integrity.check(self.step, self.state, save=True)
        self.checkpoints.confirm(self.step - 1)
        with self.clock.during("save"):
            changing = changing_part(self.state)
            constant = constant_part(self.state)
            record = self.remembered().to_record()
            uploaded = uploaded or self.checkpoints.uploads(self.step, record)
            is_new = self.checkpoints.save(self.step, changing, record, constant, uploaded)
            if is_new and jax.process_index() == 0:
                report_step(self.step)
            if self.checkpoints.slow_upload:
                self.progress.message(self.checkpoints.slow_upload, style="yellow")
        return True

    def remembered(self) -> RunState:
        """Return what a checkpoint holds beside the arrays."""
        return RunState(
            run=self.folder.id,
            step=self.step,
            num_steps=self.num_steps,
            recorder=self.recorder.state(),
            health=self.health.state(),
            data=self.data.read_until(self.step),
            validation=self.validation.state(),
            unevaluated=self.unevaluated,
            rollbacks=self.rollbacks,
            seed=self.config.seed,
            kept=self.job.kept,
            config=to_yaml(self.config),
            frozen_models=self._frozen_models,
            tokenizer=self.data.shards[0].manifest.tokenizer["sha256"],
            forked_from=self._forked_from,
        )

    def newest(self) -> str:
        """Return a sentence that names the newest checkpoint, for messages."""
        self.checkpoints.wait()
        step = self.checkpoints.latest()
        if step is None:
            return "There is no checkpoint."
        return f"The newest checkpoint is that of step {step:,}."

    def stop_and_save(self) -> NoReturn:
        """Save, and end the launch because a stop was requested. Always raises a TryAgainError."""
        is_saved = self.save(uploaded=True)
        self.settle()
        reason = self.stop.name or "a signal to another process"
        done = f"stopped and saved at step {self.step:,} of {self.num_steps:,}"
        if not is_saved:
            done = (
                f"stopped at step {self.step:,}, which is not saved: steps before it were not "
                f"finite. {self.newest()}"
            )
        if self.unevaluated:
            done += f", before the evaluation of {', '.join(self.unevaluated)}"
        raise TryAgainError(f"{reason}: {done}. Run the same command again to go on.")
