"""The main job: `python -m maxtrain.train config=NAME key=value ...`.

Read `launch` first, then `train`: config -> data and its plan -> devices -> model -> state (new,
imported or restored) -> loop [batch, step, and each hook that is due] -> finish. The same command
continues a stopped run from its newest checkpoint, and gets to the same numbers as if it had never
stopped.
"""

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from data_pipeline.base.errors import (
    ConfigError,
    DamagedError,
    DataError,
    DivergedError,
    LostProcessError,
    StorageError,
    TryAgainError,
    run_command,
)
from data_pipeline.loader.loader import HostBatch
from data_pipeline.tokenizer import BESIDE, TOKENIZER_FOLDER, carry_data
from maxtrain import failpoints
from maxtrain.checkpoint.listing import latest_state, second_of
from maxtrain.checkpoint.local import LocalSteps, StepMismatchError
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.quarantine import put_aside, put_aside_incomplete
from maxtrain.checkpoint.rollback import Rollback, read_rollbacks
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config import RunConfig, plain_leaves, to_yaml
from maxtrain.config.across.rows import rows_of_step
from maxtrain.config.resumed import OF_EACH_FORK, changed_settings
from maxtrain.config.run_path import local_folder, run_path, run_url
from maxtrain.config.sections.mesh import num_stages, slow_axes_of
from maxtrain.config.sections.rules import rule_words
from maxtrain.models.pipeline import form_for
from maxtrain.models.quantized import count_weights
from maxtrain.objectives.objective import POLICY, REFERENCE, Batch
from maxtrain.observe.expert_lines import counting_note, expert_summary, expert_warning
from maxtrain.observe.jsonl_logs import RUN
from maxtrain.observe.launches import (
    append_launch,
    launch_record,
    read_launches,
    revision_around,
)
from maxtrain.observe.lock import RunLock
from maxtrain.observe.mesh_lines import mesh_lines
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.profile import traced_steps
from maxtrain.observe.progress import Progress
from maxtrain.observe.tracker import RunInfo
from maxtrain.observe.tracking import Trackers
from maxtrain.observe.watchdog import Watchdog
from maxtrain.parallel.agreement import (
    Board,
    connect_peers,
    is_loss,
    losing_others,
    raising_together,
    require_agreement,
)
from maxtrain.parallel.distributed import announce_end, leave
from maxtrain.parallel.memory import (
    HOST_MEND,
    ON_HOST,
    STATE_MEND,
    bytes_on_device,
    bytes_on_host,
    is_out_of_memory,
    out_of_memory,
    require_memory,
    require_memory_of_host,
)
from maxtrain.storage.local import why_not
from maxtrain.storage.store import Store, open_store
from maxtrain.train_step.state import (
    changing_part,
    constant_part,
    eval_params,
    policy_params,
    trained_summary,
    zero_summary,
)
from maxtrain.trainer.auto_accumulation import decide
from maxtrain.trainer.data import inputs_on_record, with_recorded_inputs
from maxtrain.trainer.forks import (
    FORKED_FROM,
    Fork,
    find_fork,
    require_no_unsaved_fork,
    require_same_fork,
    take_records,
)
from maxtrain.trainer.hooks import AfterStep, after_each_step
from maxtrain.trainer.job import ACCUMULATION, Job, launch_fields, open_job
from maxtrain.trainer.run import RollbackRequest, Run
from maxtrain.trainer.run_dir import RunFolder, require_no_stray_steps, require_trained
from maxtrain.trainer.signals import StopRequest, StopRequested
from maxtrain.trainer.summary import finish

_MOST_SKIPPED = 0.9  # share of a run's steps that may have changed nothing


def run_from_config(config: RunConfig, ends_process: bool = False) -> None:
    """Run a whole training, from its config to its last checkpoint and summary.

    A newest checkpoint that turns out to be damaged is moved to quarantine, and the run restarts
    from the one before it.

    `ends_process`: whether the process exits afterwards. If a signal requested that and it takes
        too long, the process is killed.

    Raises:
        UserError: with an exit code that says whether the same command may be tried again.
    """
    failpoints.arm()
    local = local_folder(config)
    with StopRequest(config.checkpoint.grace_seconds, ends_process) as stop, losing_others():
        # Each attempt has one checkpoint less, or knows the checkpoints of other hosts.
        for attempt in itertools.count():
            with open_store(
                run_path(config), run_url(config), local, config.checkpoint.local_keep
            ) as store:
                try:
                    with Trackers() as trackers:
                        return launch(config, attempt, stop, trackers, store)
                except DamagedError as damage:
                    put_aside(damage)
                except StepMismatchError:
                    pass


def launch(
    config: RunConfig, attempt: int, stop: StopRequest, trackers: Trackers, store: Store
) -> None:
    """Make one attempt at a run, from its newest checkpoint if it has one, else from the beginning.

    Args:
        attempt: number of earlier attempts of this process. Each found a damaged checkpoint, or
            that other hosts hold other checkpoints than it assumed.
        trackers: started once the run is open. The caller finishes them.
        store: where the run is kept.

    Raises:
        DamagedError: the newest checkpoint does not hold what was saved. All processes raise it,
            also those whose own part of the checkpoint is intact.
        OtherStep: in all processes: the newest complete checkpoint is not the one that some process
            began with, before it could communicate.
    """
    clock = Stopwatch()
    folder = store.folder
    second = second_of(folder / "checkpoints", config.checkpoint)
    require_no_stray_steps(folder, second)
    run_folder = RunFolder(folder, second)
    rollbacks = [] if run_folder.starts_over else read_rollbacks(folder)
    look_on_disks(store.local, run_folder, rollbacks, attempt)
    newest = functools.partial(newest_state, store, rollbacks, second)
    own = newest()
    saved, fork, rollbacks, launches = find_beginning(config, run_folder, own, rollbacks)
    with clock.during("start"):
        job = open_with_records(config, saved, launches, fork)
    if attempt == 0:
        require_whole(store.local, own, newest)
    config = job.config
    is_primary = jax.process_index() == 0
    rows = job.data.describe_rows
    board = Board("watchdog") if jax.process_count() > 1 else None
    shown = config.observe.progress if is_primary else "off"
    with (
        jax.set_mesh(job.mesh),
        contextlib.ExitStack() as held,
        Watchdog(config.watchdog, folder, clock, rows, jax.process_index(), board) as watchdog,
        Progress(shown, job.data.plan.num_steps, units=job.units) as progress,
    ):
        checkpoints = Checkpoints(
            folder / "checkpoints",
            config.checkpoint,
            second,
            functools.partial(note_checkpoint, run_folder, progress),
            store.checkpoints,
            store.publish,
            store.local,
        )
        describe(progress, job)
        report_passed_over(progress, store.local, own)
        fields = launch_fields(job, saved) | {"rollbacks": str(rollbacks)}
        fields["checkpoint.fork_from"] = str(fork and fork.origin)
        require_agreement(f"launch {attempt}", fields)
        connect_peers(job.mesh)
        # On a CPU, a process keeps the memory of its earlier attempts, which would count as taken.
        if attempt == 0:
            require_room(job)
        decided = decide(job, run_folder.accumulation, progress, clock)
        job = decided.job
        describe_micro_batches(progress, job, decided.line)
        # This creates the folder, so it waits until all processes are known to continue.
        begin_folder(held, store, second, run_folder, progress, job)
        for line in put_aside_incomplete(checkpoints.directory):
            progress.message(line, style="bold red")
        run = Run(
            job,
            checkpoints,
            progress,
            clock,
            stop,
            rollbacks,
            run_folder,
            trackers,
            store.publish,
            decided.programs,
        )
        try:
            run.restore(saved, fork=fork)
            require_unfinished(run, fork)
            report_changed_settings(run, saved, launches, fork)
            checkpoints.copy_newest()  # a killed launch may have left this undone
            begin_books(run, watchdog, saved is None, fork)
            begin_trackers(run, trackers)
            train_until_done(run, is_new_fork=fork is not None)
            run.settle()
        except (jax.errors.JaxRuntimeError, ValueError, MemoryError) as error:
            if is_loss(error):
                checkpoints.abandon()
            if is_out_of_memory(error):
                where = f"at step {run.step:,}, in: {clock.doing()[0]}"
                raise out_of_memory(error, where) from error
            raise
        finally:
            run.close()
    stop.save_first(None)
    conclude(run)


def newest_state(
    store: Store, rollbacks: list[Rollback] | None, second: Path | None
) -> RunState | None:
    """Read the run at its newest checkpoint that its rollbacks allow; None: there is none."""
    also = None
    if store.local is not None:
        also = store.local.whole
    return latest_state(
        store.folder / "checkpoints", lambda found: found.went_with(rollbacks), second, also
    )


class LaunchStart(NamedTuple):
    """The point that a launch begins from.

    Attributes:
        saved: the run at the checkpoint to resume from; None: the run starts anew.
        fork: the checkpoint of another run that `saved` comes from; None: it is one of this run.
        rollbacks: all rollbacks of the run up to now.
        launches: the launches that made the steps up to now.
    """

    saved: RunState | None
    fork: Fork | None
    rollbacks: list[Rollback]
    launches: list[dict[str, Any]]


def find_beginning(
    config: RunConfig,
    run_folder: RunFolder,
    own: RunState | None,
    rollbacks: list[Rollback] | None,
) -> LaunchStart:
    """Find where a launch begins: at the run's own newest checkpoint, at the checkpoint of another
    run that checkpoint.fork_from names, or at the start.

    Args:
        own: the run at its own newest checkpoint; None: it has none.
        rollbacks: the recorded ones; None: there is no record.

    Raises:
        ConfigError: no run can resume from the checkpoint, or the run was begun in another way.
        StorageError: checkpoints are missing, damaged, or cannot be read.
    """
    require_trained(run_folder.path, own)
    run_folder.require_checkpoints(config.checkpoint.start_over)
    launches = read_launches(run_folder.path)
    if own is not None:
        require_same_fork(config, run_folder.path, own)
        if rollbacks is None:
            rollbacks = list(own.rollbacks)
        return LaunchStart(own, None, rollbacks, launches)
    fork_from = config.checkpoint.fork_from
    if fork_from is None:
        if not run_folder.starts_over:
            require_no_unsaved_fork(run_folder.path, launches)
        return LaunchStart(None, None, rollbacks or [], launches)
    fork = find_fork(fork_from, launches, run_folder.starts_over)
    return LaunchStart(fork.state, fork, list(fork.rollbacks), list(fork.launches))


def require_unfinished(run: Run, fork: Fork | None) -> None:
    """Raise a ConfigError, in all processes, if a run forks at a step where the other run ended
    before its plan did, and would end there again: there would be nothing to save.
    """
    ending = run.health.ending
    if fork is None or not ending:
        return
    origin = fork.origin
    raise ConfigError(
        f"{fork.key}: {origin.place} ended early at step {origin.step:,}, and a fork would end "
        f"there again: {ending.rstrip('.')}. Or fork at an earlier step."
    )


def step_of(saved: RunState | None) -> int:
    """Return the step that a launch begins at."""
    if saved is None:
        return 0
    return saved.step


def look_on_disks(
    local: LocalSteps | None,
    run_folder: RunFolder,
    rollbacks: list[Rollback] | None,
    attempt: int,
) -> None:
    """Find the run's steps that are only on the disks of its hosts; `attempt`: as for `launch`.

    In the first attempt, processes cannot communicate yet, and each goes by the parts on its own
    disk.
    """
    if local is None:
        return
    run_id = run_folder.id
    if run_folder.starts_over:
        run_id = ""
    local.look(lambda record: why_not(record, run_folder.path, run_id, rollbacks))
    if attempt > 0:
        local.agree(f"steps of hosts, attempt {attempt}")


def require_whole(
    local: LocalSteps | None, saved: RunState | None, newest: Callable[[], RunState | None]
) -> None:
    """Check that the newest step, on the disks of all hosts together or at the URL, is the one that
    each process began with. Devices must have been started. Raises OtherStep in all processes if it
    is not."""
    if local is None:
        return
    local.agree("steps of hosts")
    local.require_same("steps of hosts", step_of(newest()) == step_of(saved))


def report_passed_over(
    progress: Progress, local: LocalSteps | None, saved: RunState | None
) -> None:
    """Log each step on the disks of hosts that the run cannot resume from."""
    if local is None:
        return
    for line in local.told(step_of(saved)):
        progress.message(line, style="yellow")


def require_room(job: Job) -> None:
    """Raise a ConfigError, in all processes, if a device or a host has no room for the training
    state."""
    state = "the training state (weights, moments of the optimizer)"
    of_device = bytes_on_device(job.abstract)
    of_host = bytes_on_host(job.abstract)
    if jax.devices()[0].platform == "cpu":
        # On a CPU, device and host share one memory.
        of_device += of_host
    with raising_together(ConfigError):
        require_memory(of_device, state, STATE_MEND)
        require_memory_of_host(jax.local_device_count() * of_host, ON_HOST, HOST_MEND)


def train_until_done(run: Run, is_new_fork: bool) -> None:
    """Train until the run is done. After a rollback the loop restarts from there.

    A new fork first saves its own checkpoint of the step that it begins with: from then on the
    other run is not needed.

    Raises:
        TryAgainError: a stop was requested and everything is saved; or a memory fault damaged the
            weights.
        StopRequested: a stop was requested before there was anything to save.
        DivergedError, DataError: as for `Run.check_steps`, `Run.evaluate` and `Run.require_saved`.
    """
    if run.done():
        style = "yellow" if run.health.ending else "green"
        name = run_url(run.config) or run.folder.path
        run.progress.message(f"Nothing to do: {name} {run.why_done()}", style=style)
        run.upload_newest()
        return
    warning = run.checkpoints.require_space(
        changing_part(run.job.abstract), constant_part(run.job.abstract)
    )
    if warning:
        run.progress.message(warning, style="yellow")
    run.prepare()
    if is_new_fork:
        run.save(uploaded=True)
    while not run.done():
        begun_at = run.step
        going_back = None
        try:
            train(run)
        except RollbackRequest as rollback:
            going_back = rollback.found
        except StopRequested:
            if run.step == begun_at:
                raise
            run.stop_and_save()
        if going_back:
            run.roll_back(going_back)


def train(run: Run) -> None:
    """Make steps until the plan's end, or until something ends the run before it.

    Raises:
        StopRequested: a stop was requested.
        RollBack: an anomaly requires a rollback.
    """
    run.evaluate()
    run.write_ending()
    if run.done():
        return
    # Due before the first step, or left undone by a launch that was stopped.
    if run.sample_interval and run.step % run.sample_interval == 0:
        run.sample_prompts()
    hooks = after_each_step(run)
    with contextlib.closing(read_batches(run)) as batches, tracing(run):
        for batch, origin in batches:
            is_last = run.step + 1 == run.num_steps
            is_logged = is_last or (run.step + 1) % run.config.log_interval == 0
            run.make_step(batch, origin, is_logged)
            run.progress.update(run.step)
            run.stop.save_first(lambda: run.clock.doing()[0])
            with run.clock.waiting():
                stop, save = run.stop.agreed(save=run.checkpoints.due())
            after = AfterStep(
                step=run.step,
                is_last=is_last,
                is_logged=is_logged,
                save_by_clock=save and not is_last,
                stop=stop and not is_last,
            )
            for hook in hooks:
                if hook.due(after):
                    hook(after)
            if run.health.ending:
                break
    run.require_saved()


@contextlib.contextmanager
def tracing(run: Run) -> Iterator[None]:
    """Start the trace of observe.profile if the loop's first step is traced. A trace that is still
    open when the loop ends is written then."""
    if run.trace.due(run.step):
        run.trace.turn(run.step, run.state)
    try:
        yield
    finally:
        run.trace.close(run.step)


def read_batches(run: Run) -> Generator[tuple[Batch, HostBatch]]:
    """Iterate over the batches of the remaining steps, on the devices, each with its host batch.

    Raises StopRequested if a stop was requested while the next batch was read. The steps before it
    have been checked by then.
    """
    begun_at = run.step
    batches = run.batches()
    while run.step < run.num_steps:
        try:
            with run.clock.during("data_wait"), run.stop.interrupting():
                batch, origin = next(batches)
                batch = failpoints.hit("data", run.step + 1, batch)
        except StopRequested:
            if run.step > begun_at:
                run.check_steps(write=False)
                run.write_ending()
            raise
        yield batch, origin


def conclude(run: Run) -> None:
    """Write the summary of a finished run. Raise a DivergedError if almost none of its steps
    changed anything."""
    job = run.job
    health = run.health
    problem = lack_of_progress(run.step, health.skipped)
    if jax.process_index() == 0:
        model = None
        if jax.process_count() == 1:  # otherwise this process does not hold all of the model
            model = nnx.merge(job.policy_graphdef, eval_params(run.state))
        finish(
            job.config,
            job.data,
            job.sets,
            run.step,
            run.clock,
            health.ending,
            health.guard.found,
            model,
            run.rollbacks,
            problem,
            run.validation.read,
            job.units,
            job.objective.loss,
        )
    if problem:
        raise DivergedError(problem)


def begin_folder(
    held: contextlib.ExitStack,
    store: Store,
    second: Path | None,
    run_folder: RunFolder,
    progress: Progress,
    job: Job,
) -> None:
    """Let process 0 lock the run until `held` is closed, take over the folder, and put the
    tokenizer of the data into it.

    Raises:
        ConfigError, DataError, StorageError, TryAgainError: process 0 failed; raised in all
            processes.
    """
    with raising_together(ConfigError, DataError, StorageError, TryAgainError, OSError):
        if jax.process_index() == 0:
            log = functools.partial(progress.message, style="bold red")
            take_locks(held, store, second, log)
            held.callback(run_folder.withdraw)
            run_folder.begin(log, job.kept.get(ACCUMULATION))
            carried = carry_data(
                run_folder.path / TOKENIZER_FOLDER,
                {name: source.path for name, source in job.config.data.sources.items()},
                BESIDE,
            )
            if carried:
                log(carried)


def take_locks(
    held: contextlib.ExitStack, store: Store, second: Path | None, tell: Callable[[str], object]
) -> None:
    """Lock the run and the folder of its copies, until `held` or the store is closed.

    `tell` is called with a line about what takes long or looks wrong.
    """
    store.hold(held, tell)
    if second and second.parents[1].is_dir():  # otherwise there is a warning, and nothing is copied
        held.enter_context(RunLock(second.parent, needed=False))


def open_with_records(
    config: RunConfig,
    saved: RunState | None,
    launches: Sequence[Mapping[str, Any]],
    fork: Fork | None,
) -> Job:
    """Open the job of a run, with data and models from where its earlier launches had them.

    Raises the errors of `open_job`, and a ConfigError if the plan of a fork ends at the checkpoint
    that it begins from.
    """
    config, notes = with_recorded_inputs(config, launches)
    job = open_job(config, saved)
    if fork is not None:
        fork.require_steps_left(job.data.plan.num_steps)
    return dataclasses.replace(job, notes=(*notes, *job.notes))


def report_changed_settings(
    run: Run, saved: RunState | None, launches: Sequence[Mapping[str, Any]], fork: Fork | None
) -> None:
    """Log each setting that differs from the last launch, if the run resumes from a checkpoint. For
    a fork, the launches are those of the other run."""
    if saved is None or not launches:
        return
    changes = changed_settings(str(launches[-1]["config"]), run.job.requested)
    before = "the last launch"
    if fork is not None:
        before = fork.origin.place
        changes = [change for change in changes if change.key not in OF_EACH_FORK]
    if not run.done():
        for change in changes:
            line = f"changed since {before}: {change.describe(run.step, run.num_steps)}"
            run.progress.message(line, style="yellow")
        return
    words = "; ".join(change.words() for change in changes if change.has_effect())
    if not words:
        return
    fix = "Set run_name to another name to begin a run with them"
    if not run.health.ending:
        more = f"Set steps to more than {run.step:,} to go on with them"
        fix = f"{more}, or run_name=NAME for a new run"
    run.progress.message(
        f"changed since the last launch, and without effect, because the run has nothing left to "
        f"do: {words}. {fix}.",
        style="yellow",
    )


def note_checkpoint(
    run_folder: RunFolder, progress: Progress, step: int, is_uploaded: bool
) -> None:
    """Record and print that a checkpoint of this step is complete, on process 0.

    Args:
        is_uploaded: whether it is where the run is kept, and not only on the disks of the hosts.
    """
    where = ", on the disks of the hosts"
    if is_uploaded:
        run_folder.note_saved(step)
        where = ""
    progress.message(f"checkpoint: step {step:,}{where}", style="dim")


def begin_books(run: Run, watchdog: Watchdog, is_new: bool, fork: Fork | None) -> None:
    """Open the logs that this launch writes in the run's folder.

    Args:
        is_new: whether there was no checkpoint.
        fork: the checkpoint of another run whose records this run takes over first; None: this is
            no new fork.

    Raises:
        StorageError: these records cannot be read or written; raised in all processes.
    """
    recorder = run.recorder
    if fork is not None:
        with raising_together(StorageError, OSError):
            if jax.process_index() == 0:
                for problem in take_records(fork, run.folder.path, run.folder.id):
                    run.progress.message(f"{problem} It is left out.", style="yellow")
    if not run.done():  # otherwise no time is spent on the run
        watchdog.begin(lambda: run.step, run.folder.id)
    recorder.open_logs(run.step, run.evaluated_again, run.folder.id)
    if is_new and recorder.made_before:
        run.progress.message(
            f"There is no checkpoint, so steps 1 to {recorder.made_before:,}, which are on record, "
            f"are made again.",
            style="yellow",
        )
    if jax.process_index() == 0 and not run.done():
        note_launch(run.job, run.folder, run.step, fork)


def begin_trackers(run: Run, trackers: Trackers) -> None:
    """Start the trackers on process 0, unless the run has nothing left to do."""
    if jax.process_index() != 0 or run.done():
        return
    revision, is_dirty = revision_around(Path.cwd())
    info = RunInfo(
        folder=run.folder.path,
        name=run.config.run_name,
        id=run.folder.id,
        step=run.step,
        hyperparameters=plain_leaves(run.job.requested),
        revision=revision,
        is_dirty=is_dirty,
    )

    def tell(text: str) -> None:
        run.progress.message(text, style="yellow")

    trackers.begin(run.config.observe, info, tell)


def note_launch(job: Job, run_folder: RunFolder, step: int, fork: Fork | None) -> None:
    """Record a launch that begins after `step` finished steps, and the checkpoint it was forked
    from, if any.

    The config is recorded as the user requested it, not as fitted to this machine, so that it also
    works on other machines.
    """
    run_folder.write_config(to_yaml(job.requested))
    data = job.data.fingerprint_at(job.data.plan.num_steps)
    record = launch_record(to_yaml(job.requested), job.attention, job.mesh, data, step)
    held = job.device_bytes()
    record["device_bytes"] = {name.replace(" ", "_"): count for name, count in held.items()}
    if job.units:
        record["units"] = job.units
    record["folder"] = os.getcwd()
    if fork is not None:
        record[FORKED_FROM] = fork.origin._asdict()
    record |= inputs_on_record(job.data, job.sets)
    append_launch(run_folder.path, record | {RUN: run_folder.id})


def describe_stages(config: RunConfig) -> str:
    """Describe the pipeline: stages, micro-batches, rounds, and the share of waiting (the
    bubble)."""
    rows = rows_of_step(config) // config.optimizer.micro_batches
    form = form_for(rows, config.model.pipeline)
    words = f"{form.stages} stages, {form.micro_batches} micro-batches"
    if form.rounds > 1:
        words += f", {form.rounds} rounds"
    if config.model.pipeline.schedule == "1f1b":
        words += ", 1f1b"
    return f"pipeline: {words}; {form.waiting():.0%} of the time in layers is waiting"


def describe_micro_batches(progress: Progress, job: Job, chosen: str) -> None:
    """Log the number of micro-batches, if it was `chosen` automatically, and their cost."""
    config = job.config
    lines = [chosen, counting_note(config.model, config.optimizer.micro_batches)]
    if num_stages(config.mesh) > 1:
        lines.append(describe_stages(config))
    for line in lines:
        if line:
            progress.message(line)


def describe(progress: Progress, job: Job) -> None:
    """Log the model, the data and the devices of a run."""
    progress.message(job.data.describe())
    for note in job.notes:
        progress.message(note, style="yellow")
    config = job.config
    devices = jax.devices()
    millions = count_weights(policy_params(job.abstract)) / 1e6
    where = f"{len(devices)} x {devices[0].device_kind}"
    weights = f"{config.precision.params} weights"
    if config.model.lora.rank is not None and config.model.lora.base != "full":
        weights += f", {config.model.lora.base} where adapters are"
    progress.message(
        f"model: {config.model.family}, {millions:,.2f} M parameters, "
        f"{config.precision.compute} on {weights}; devices: {where}"
    )
    progress.message(job.attention.line)
    slow = slow_axes_of(config.mesh)
    by_axis = {key.removeprefix("mesh.dcn_"): count for key, count in slow.items()}
    rules = rule_words(config.mesh.rules)
    for line in mesh_lines(job.mesh.shape, by_axis, job.device_bytes(), rules):
        progress.message(line)
    describe_experts(progress, config, devices[0].platform)
    if job.abstract.frozen[POLICY]:
        progress.message(trained_summary(job.abstract))
    frozen = job.frozen_model
    if frozen is not None:
        size = count_weights(job.abstract.frozen[frozen.role]) / 1e6
        progress.message(
            f"{frozen.role}: {frozen.model.family}, {size:,.2f} M parameters, "
            f"{frozen.precision.compute} on {frozen.precision.params} weights; "
            f"of {frozen.describe()}; attention: {frozen.model.attention}"
        )
    elif job.stored_reference is not None:
        stored = job.stored_reference
        progress.message(f"{REFERENCE}: log-probabilities stored of {stored.describe()}")
    elif REFERENCE in job.objective.models or job.reads_reference:
        progress.message(f"{REFERENCE}: the model without its adapters")
    if config.init.mup_base_width:
        progress.message(
            f"muP: initial weights and learning rates for a width of {config.model.embed_dim} as "
            f"chosen at a width of {config.init.mup_base_width} (init.mup_base_width)"
        )
    if config.observe.profile:
        first, _ = traced_steps(config.observe.profile)
        num_steps = job.data.plan.num_steps
        if first > num_steps:
            progress.message(
                f"observe.profile={config.observe.profile}: the run has {num_steps:,} steps, so "
                f"none of them is traced.",
                style="yellow",
            )
    if config.observe.sample_interval and jax.process_count() > 1:
        progress.message(
            f"observe.sample_interval={config.observe.sample_interval}: no process holds all of "
            f"the model, so the prompts are not completed while it trains.",
            style="yellow",
        )
    if config.optimizer.zero:
        progress.message(zero_summary(job.abstract, config.optimizer.zero))


def describe_experts(progress: Progress, config: RunConfig, platform: str) -> None:
    """Log the experts, if any, and what they cost more than necessary."""
    line = expert_summary(config.model)
    if line:
        progress.message(line)
    warning = expert_warning(config.model, platform)
    if warning:
        progress.message(warning, style="yellow")


def lack_of_progress(steps: int, skipped: int) -> str:
    """Return a warning if most steps of a run changed nothing; empty for any other run."""
    if steps == 0 or skipped <= _MOST_SKIPPED * steps:
        return ""
    return (
        f"{skipped:,} of the run's {steps:,} steps changed nothing, so it has hardly trained. "
        f"Look at the warnings above and at anomalies/* in metrics.jsonl, lower "
        f"optimizer.learning_rate, or use other data."
    )


def main(config: RunConfig, ends_process: bool = False) -> int:
    """Run `run_from_config`. Errors that the user can fix become a message and an exit code."""
    lost = False

    def job() -> None:
        nonlocal lost
        try:
            run_from_config(config, ends_process)
        except LostProcessError:
            lost = True
            raise

    if code := run_command(job):
        announce_end(code)
        leave(code, lost)
    return code
