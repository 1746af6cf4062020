"""`maxtrain replay RUN --steps A:B`: repeat steps of a run, and compare them with its records, bit
for bit.

`--step N` repeats step N alone, like `--steps N-1:N`.

It starts at the newest checkpoint of step A or before, or at the initial state, and goes to step B.
It compares every number that the run's records have for these steps, with the hashes of batch and
parameters, and every array of the checkpoints on the way. It writes nothing into the run's folder.

Steps of a run that learns from its own completions read the rollouts that are stored with it; with
--rollouts again these are made again as well, from the weights that had made them, and compared.
"""

import argparse
import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from data_pipeline.base.errors import DataError, DifferentError, UsageError, run_command
from data_pipeline.loader.loader import HostBatch
from maxtrain.checkpoint.listing import array_digests, saved_steps
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.rollback import left_out, read_rollbacks
from maxtrain.checkpoint.run_state import RunState
from maxtrain.config import to_yaml
from maxtrain.config.rollouts import rollout_settings
from maxtrain.objectives.objective import Batch
from maxtrain.observe.launches import (
    launch_differences,
    launch_of,
    launch_record,
    read_launches,
)
from maxtrain.observe.metrics import Stopwatch, read_metrics, same
from maxtrain.observe.progress import Progress
from maxtrain.ops.digest import digests, hash_text, tree_digests
from maxtrain.rl.replayed import ReplayedRollouts
from maxtrain.rl.rollouts import RolloutParts
from maxtrain.rl.store import RolloutStore
from maxtrain.storage.reading import readable
from maxtrain.train_step.state import TrainState, policy_variables, saved_part
from maxtrain.trainer.job import Job, open_job
from maxtrain.trainer.reference_logprobs import with_reference
from maxtrain.trainer.reference_model import (
    frozen_digests,
    require_same_frozen_model,
    require_same_stored_teacher,
)
from maxtrain.trainer.run_dir import launched_config, require_run

# What gives the batches of some steps: from and up to a step, by the state before each, and without
# the data of those that are left out.
type Batches = Callable[
    [int, int, Callable[[], TrainState], frozenset[int]], Iterator[tuple[Batch, HostBatch]]
]
# Arrays of a rollout that rewards decide about.
OF_REWARDS = {"rewards", "advantages"}


@dataclasses.dataclass
class Findings:
    """Counts and differences of a comparison; steps as in records, counted from 1."""

    # Counts of what was compared.
    numbers: int = 0
    arrays: int = 0
    # The last step of which anything was compared; 0: only the state to begin with was.
    last: int = 0
    # Numbers that differ, by step and name: recorded and now.
    fields: dict[int, dict[str, tuple[Any, Any]]] = dataclasses.field(default_factory=dict)
    # Arrays that are not as they were when that step was saved.
    leaves: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    # Whether batches are made of stored rollouts.
    reads_rollouts: bool = False
    # Arrays of a rollout that are not what is stored, by the first step that reads it.
    rollouts: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    # First steps of rollouts that could not be made again.
    not_made: list[int] = dataclasses.field(default_factory=list)
    # Arrays that are not what the checkpoint says it holds.
    damaged: dict[int, list[str]] = dataclasses.field(default_factory=dict)

    def compare(self, step: int, recorded: dict[str, Any], now: dict[str, Any]) -> None:
        """The numbers that a record and a step have in common."""
        common = [name for name in now if recorded.get(name) is not None]
        self.numbers += len(common)
        different = {}
        for name in common:
            if not same(recorded[name], now[name]):
                different[name] = (recorded[name], now[name])
        if different:
            self.fields[step] = different

    def first(self) -> int:
        """The first step at which anything differs; 0: none does."""
        return min((*self.fields, *self.leaves, *self.rollouts), default=0)


def replay(
    folder: Path,
    first: int,
    end: int,
    overrides: Sequence[str] = (),
    makes_rollouts: bool = False,
) -> str:
    """Replays the steps after `first` up to `end`; a line about what is the same.

    `makes_rollouts`: of a run that learns from rollouts, they are made again and compared.

    Raises:
        DifferentError: something differs; says what, where first, and what the likely cause is.
        DataError: nothing could be compared.
        UsageError: the run does not have these steps.
    """
    records = {}
    for record in read_metrics(folder):
        if record["kind"] == "train":
            records[record["step"]] = record
    if not 0 <= first < end <= max(records, default=0):
        known = "none"
        if records:
            known = f"0 to {max(records):,}"
        fix = "Use A:B with 0 <= A < B, both among these"
        raise UsageError(f"--steps={first}:{end}: {folder} has steps {known}. {fix}.")
    steps = saved_steps(folder / "checkpoints")
    begin = max((step for step in steps if step <= first), default=0)
    steps = {step: both for step, both in steps.items() if begin <= step <= end}
    saved = {step: array_digests(commit) for step, (commit, _) in steps.items()}
    launches = read_launches(folder)
    launch = _one_launch(launches, begin, end)
    config = launched_config(folder, launch, overrides)
    if makes_rollouts and rollout_settings(config) is None:
        raise UsageError(
            f"--rollouts again: {folder} has objective={config.objective}, whose batches are no "
            "rollouts. Leave it out."
        )
    # Other data is replayed as well, so that the first batch that differs can be named.
    accepting = dataclasses.replace(
        config, data=dataclasses.replace(config.data, accept_changes=True)
    )
    begun_at = None
    frozen_models = {}
    if begin in steps:
        _, record = steps[begin]
        begun_at = RunState.from_record(record)
        frozen_models = begun_at.frozen_models
    job = open_job(accepting, begun_at, as_launched=True)
    findings = Findings()
    with jax.set_mesh(job.mesh):
        state, found = with_reference(
            job,
            folder,
            lambda: _start(job, folder, begin, saved, findings),
            Progress("off", job.num_steps),
            Stopwatch(),
            writes=False,
        )
        found |= frozen_digests(job.frozen_model, state)
        require_same_frozen_model(job.other_model, found, frozen_models)
        require_same_stored_teacher(job.data.teacher, frozen_models)
        fingerprint = job.data.fingerprint_at(job.data.plan.num_steps)
        now = launch_record(to_yaml(config), job.attention, job.mesh, fingerprint, begin)
        without = left_out(read_rollbacks(folder) or [])
        with _batches(job, folder, makes_rollouts, findings) as batches:
            _go(job, state, batches, begin, end, without, records, saved, findings)
    differences = {}
    if launch:
        differences = launch_differences(launch, now)
    if findings.first() or findings.damaged:
        raise DifferentError(_verdict(folder, begin, findings, differences))
    if not findings.last:
        fix = "Replay up to a step that has a record: multiples of its log_interval"
        rule = f"has no record of a step after {begin:,} up to {end:,}"
        raise DataError(f"--steps={first}:{end}: {folder} {rule}. {fix}.")
    lines = [f"although {line}" for line in _lines(differences)]
    if findings.not_made:
        steps = ", ".join(f"{step:,}" for step in findings.not_made)
        lines.insert(0, f"not made again: rollouts from step {steps} on, of weights before")
    if findings.last < end:
        lines.insert(0, f"nothing was recorded after step {findings.last:,} up to {end:,}")
    what = f"{findings.numbers:,} numbers"
    if findings.arrays:
        what += f" and {findings.arrays:,} arrays"
    others = "".join(f"\n  {line}" for line in lines)
    steps_again = f"steps {begin + 1:,} to {findings.last:,} again"
    return f"{folder}: {steps_again}: {what} compared, all the same bit for bit.{others}"


def _one_launch(launches: list[dict[str, Any]], begin: int, end: int) -> dict[str, Any] | None:
    """The launch that made all these steps, or one like it.

    UsageError: launches with different settings made them.
    """
    made = [launch_of(launches, step) for step in range(begin + 1, end + 1)]
    first = made[0]
    for step, launch in enumerate(made, begin + 1):
        if not first or not launch or launch is first:
            continue
        changed = launch_differences(first, launch)
        settings = [name.removeprefix("config.") for name in changed if name.startswith("config.")]
        if settings:
            rule = f"from step {step:,} on the run had another {', '.join(settings)}"
            fix = f"Replay up to step {step - 1:,}, and then from a checkpoint on"
            raise UsageError(f"--steps up to {end}: {rule}. {fix}.")
    return first


def _start(
    job: Job, folder: Path, begin: int, saved: dict[int, dict[str, str]], findings: Findings
) -> TrainState:
    """The state to begin with.

    On the way to it, every checkpoint of the window is held against its own digests.
    """
    checkpoints = Checkpoints(folder / "checkpoints", job.config.checkpoint)
    abstract = saved_part(job.abstract)
    state = abstract
    for step, then in sorted(saved.items(), reverse=True):
        # One at a time in memory.
        del state
        state, _ = checkpoints.restore(abstract, step, check=False)
        found = tree_digests(state)
        wrong = [name for name, digest in then.items() if found.get(name) != digest]
        if wrong:
            findings.damaged[step] = wrong
    checkpoints.close()
    if begin in saved:
        return job.with_frozen_model(state)
    return job.initial_state()


@contextlib.contextmanager
def _batches(job: Job, folder: Path, makes_rollouts: bool, findings: Findings) -> Iterator[Batches]:
    """Return what gives the batches of steps, as of `ReplayedRollouts.batches`."""
    if rollout_settings(job.config) is None:

        def of_data(
            start: int, stop: int, state: Callable[[], TrainState], left_out: frozenset[int]
        ) -> Iterator[tuple[Batch, HostBatch]]:
            del state
            return job.batches(start, stop, left_out=left_out)

        yield of_data
        return
    progress = Progress("off", job.num_steps)
    clock = Stopwatch()
    parts = RolloutParts(job.config, job.data, job.mesh, job.graphdefs, clock, progress)
    rollouts = ReplayedRollouts(parts, RolloutStore(folder), makes_rollouts)
    findings.reads_rollouts = True
    with contextlib.closing(rollouts):
        yield rollouts.batches
    findings.rollouts = rollouts.different
    findings.not_made = rollouts.not_made
    findings.arrays += rollouts.num_compared


def _go(
    job: Job,
    state: TrainState,
    batches: Batches,
    begin: int,
    end: int,
    without: frozenset[int],
    records: dict[int, dict[str, Any]],
    saved: dict[int, dict[str, str]],
    findings: Findings,
) -> None:
    """The steps themselves; those `without` the data that a rollback left out."""
    if "params_hash" in records.get(begin, {}):
        findings.compare(
            begin, records[begin], {"params_hash": hash_text(digests(policy_variables(state)))}
        )
    step = job.make_step()

    def newest() -> TrainState:
        return state

    for batch, origin in batches(begin, end, newest, without):
        state, metrics = step(state, batch)
        done = origin.step + 1
        if done in records:
            values = jax.device_get(metrics | job.hashes(state, batch))
            values.pop("norms", None)
            now = {name: value.item() for name, value in values.items() if value.ndim == 0}
            now["batch"] = origin.digest
            # Else the record's loss is that of the step.
            if "step_loss" in records[done]:
                now["step_loss"] = now.pop("loss")
            for name, words in values.items():
                if name.endswith("_hash"):
                    now[name] = hash_text(words)
            findings.compare(done, records[done], now)
            findings.last = done
        then = saved.get(done)
        if then:
            found = tree_digests(saved_part(state))
            findings.arrays += len(then)
            findings.last = done
            wrong = [name for name in then | found if then.get(name) != found.get(name)]
            if wrong:
                findings.leaves[done] = wrong


def _verdict(
    folder: Path, begin: int, findings: Findings, differences: dict[str, tuple[str, str]]
) -> str:
    """Return what differs, where first, and why that may be."""
    lines = []
    first = findings.first()
    for step, names in sorted(findings.damaged.items()):
        lines.append(
            f"the checkpoint of step {step:,} does not hold what was saved: {_names(names)}"
        )
    if first:
        lines.append(f"step {first:,} is the first that differs, of {len(findings.fields):,}")
        for name, (then, now) in findings.fields.get(first, {}).items():
            lines.append(f"  {name}: {_exact(then)} then, {_exact(now)} now")
    for step, names in sorted(findings.rollouts.items())[:1]:
        lines.append(
            f"the rollout that step {step:,} reads first is not as stored: {_names(names)}"
        )
    for step, names in sorted(findings.leaves.items())[:1]:
        lines.append(f"arrays that are not those saved at step {step:,}: {_names(names)}")
    lines += [f"the launch had {line}" for line in _lines(differences)]
    text = "".join(f"\n  {line}" for line in lines)
    cause, fix = _likely_cause(folder, begin, findings, differences)
    message = f"{folder}, from step {begin:,}: not the same as it was.{text}"
    return f"{message}\n  likely cause: {cause}. {fix}."


def _likely_cause(
    folder: Path, begin: int, findings: Findings, differences: dict[str, tuple[str, str]]
) -> tuple[str, str]:
    """Why a replay differs, and what to do about it."""
    first = findings.first()
    different = findings.fields.get(first, {})
    if findings.damaged:
        path = folder / "checkpoints" / f"{min(findings.damaged):08d}"
        return "a damaged file or memory", f"Remove {path}, so that nothing goes on from it"
    if first == begin and begin:
        cause = "the checkpoint is not of this run, or its record is"
        return cause, "Replay from another checkpoint"
    if "batch" in different and findings.reads_rollouts:
        cause = "the stored rollout is not the one that the run has read"
        return cause, "Replay from a step behind those that read it"
    if "batch" in different or "data" in differences:
        cause = "other data: another manifest, or other settings of it"
        return cause, "Bring back the data that the run has read"
    if "batch_hash" in different:
        return "the same rows hold other tokens", "Run `prepare verify` on the sources"
    rollout = findings.rollouts.get(first, [])
    if rollout and OF_REWARDS.issuperset(rollout):
        cause = "a reward that does not repeat, such as one with a limit of time"
        return cause, "Look at reward_outcomes in metrics.jsonl"
    if differences:
        return "what is listed here is not as it was", "Replay with what the run had"
    cause = (
        "nothing that is on record has changed, so a program that does not repeat, "
        "or a device that computes wrongly"
    )
    fix = "Replay again: another result each time is the former; train with determinism=full"
    return cause, fix


def _lines(differences: dict[str, tuple[str, str]]) -> list[str]:
    return [f"{name} {then}, and now it is {now}" for name, (then, now) in differences.items()]


def _names(names: Sequence[str], most: int = 8) -> str:
    names = sorted(names, key=lambda name: (not name.startswith("params."), name))
    listed = ", ".join(names[:most])
    if len(names) > most:
        listed += f" and {len(names) - most:,} more"
    return listed


def _exact(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value!r} ({value.hex()})"
    return str(value)


def _step_number(text: str) -> int:
    """UsageError: it is not the number of a step."""
    if not re.fullmatch(r"[1-9]\d{0,17}", text):
        rule = "must be the number of a step, counted from 1"
        raise UsageError(f"--step={text} {rule}. Use for example --step 100.")
    return int(text)


def main(argv: Sequence[str], prog: str = "maxtrain replay") -> int:
    """Runs the command; the exit code: 0 for the same, 70 for different."""
    parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", help="folder of a run, such as runs/quickstart, or its URL")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--steps", metavar="A:B", help="repeat the steps after A, up to step B")
    which.add_argument("--step", metavar="N", help="repeat step N alone, like --steps N-1:N")
    parser.add_argument(
        "--rollouts",
        choices=("stored", "again"),
        default="stored",
        help="where a run learns from its own completions: read the stored ones, or also make them "
        "again and compare",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="settings of this machine, such as data.workers=0",
    )

    def job() -> None:
        arguments = parser.parse_intermixed_args(argv)
        if arguments.step is not None:
            last = _step_number(arguments.step)
            first = last - 1
        else:
            window = re.fullmatch(r"(\d+):(\d+)", arguments.steps)
            if not window:
                rule = f"--steps={arguments.steps} must be two whole numbers"
                raise UsageError(f"{rule}. Use for example --steps 100:200.")
            first = int(window[1])
            last = int(window[2])
        again = arguments.rollouts == "again"
        run = readable(arguments.run)
        require_run(run, arguments.run)
        print(replay(run, first, last, arguments.overrides, again))

    return run_command(job, resumes=False)
