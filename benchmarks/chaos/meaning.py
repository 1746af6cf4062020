"""Faults of meaning: every byte is as it was written, but the content is wrong, belongs to another
run, or is gone.

Between two launches of a run one thing is damaged, and the same command is given again. It must
either end with a documented exit code and a message that names a file or a key, or say what it
found and come to the reference's numbers, bit for bit. After a refusal the fault is undone, or the
advice of the message is followed, and the command must end like the reference. All checkpoints that
were good before must still be there after a refusal.
"""

import argparse
import collections
import contextlib
import json
import math
import random
import re
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import (
    WORDS,
    ForkedProcess,
    RunFiles,
    Scene,
    apart,
    end,
    make_data,
    put_away,
    size_of,
    wait_for,
)
from data_pipeline.base.errors import TryAgainError, UserError
from maxtrain.checkpoint.integrity import encode_commit, hash_files, read_commit
from maxtrain.commands import checkpoint
from maxtrain.commands.compare import compare_records
from maxtrain.observe.metrics import FILE_NAME
from maxtrain.ops.digest import tree_digests

CODES = (0, 64, 65, 70, 74, 75, 78)
# Steps after which a base was killed, with two or three checkpoints.
STRUCK = (24, 37, 41)
# A step whose batch has a NaN, in one kind of fault.
NAN = 50
CHANGES = {
    "steps": 60,
    "checkpoint_interval": 10,
    "eval_interval": 10,
    "schedule": {"name": "constant", "warmup_steps": 5},
    "checkpoint": {"keep": 3},
}
BOOKS = ("clock.jsonl", "launches.jsonl", "attempts.jsonl", "config.yaml")
# A message must name a path, or a dotted key.
NAMES = re.compile(r"[\w.-]+/[\w.-]+|\b[a-z_]+(\.[\w-]+)+\b")


class LaunchFault(NamedTuple):
    """Change to a run between two launches.

    Args:
        what: description.
        overrides: of the launch after it.
        failpoint: of the launch after it.
        names: one of these must be in the output, if anything is different afterwards; empty:
            none need be.
        gap: records before the step that the run goes on from may be missing afterwards, which must
            be said.
        steps: of the launch after it; 0: as many as the reference has.
        evaluations: the series of evaluations may be another one afterwards, which the
            output must report.
        must_say: one of the names must be in the output in any case.
        must_go_on: a refusal would be a failure.
        fix: overrides of the launch after a refusal; None: the fault is undone before it.
        beside: starts what runs beside the launch after it.
        reference: the run that it must end as.
    """

    what: str
    overrides: tuple[str, ...] = ()
    failpoint: str = ""
    names: tuple[str, ...] = ()
    gap: bool = False
    steps: int = 0
    evaluations: bool = False
    must_say: bool = False
    must_go_on: bool = False
    fix: tuple[str, ...] | None = None
    beside: Callable[[Path], ForkedProcess] | None = None
    reference: str = "reference"


Kind = Callable[["MeaningScene", Path, random.Random], LaunchFault]


class MeaningScene(Scene):
    """A scene with runs that were killed at some steps, a run of another seed, and another
    evaluation set."""

    def __init__(self, folder: Path):
        super().__init__(folder, **CHANGES)
        self.other_set = folder / "other" / "data" / "eval"
        if not self.other_set.exists():
            make_data(folder / "other", 0.02, WORDS[:8])
        for step in STRUCK:
            if not (self.runs / f"base-{step}").exists():
                fault = f"after_step:kill:{step + 1}"
                self._make(
                    f"base-{step}", -signal.SIGKILL, "checkpoint.asynchronous=false", fault=fault
                )
        if not (self.runs / "foreign").exists():
            self._make(
                "foreign",
                -signal.SIGKILL,
                "seed=7",
                "checkpoint.asynchronous=false",
                fault="after_step:kill:52",
            )
        if not (self.runs / "nan").exists():
            self._make("nan", 0, fault=f"data:nan:{NAN}")
        self.reference()

    def _make(self, name: str, code: int, *overrides: str, fault: str) -> None:
        found = end(self.start(name, *overrides, fault=fault))
        if found != code:
            raise RuntimeError(f"{name} ended with {found}; see {self.log(name)}")

    @property
    def foreign(self) -> Path:
        """The folder of another run."""
        return self.runs / "foreign"


def steps_of(run: Path) -> list[Path]:
    """The directories of its checkpoints."""
    return sorted(path for path in (run / "checkpoints").glob("*") if path.name.isdecimal())


def nan_in_training(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """Put a NaN into the weights, or into a batch, of a step to come."""
    place = rng.choice(["before_step", "after_step", "data"])
    if place == "data":
        return LaunchFault(
            f"a NaN in the batch of step {NAN}",
            failpoint=f"data:nan:{NAN}",
            names=("non_finite",),
            must_say=True,
            reference="nan",
        )
    newest = int(steps_of(run)[-1].name)
    step = rng.randrange(newest + 1, stage.steps)
    return LaunchFault(
        f"a NaN in the weights {place.replace('_', ' ')} {step}",
        failpoint=f"{place}:nan:{step}",
        must_say=True,
    )


def worthless_weights(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """NaN or infinity in an array of the newest checkpoint, and all hashes and digests as if it had
    been saved so."""
    step = steps_of(run)[-1]
    commit = read_commit(step)
    names = []
    for name, array in commit["arrays"].items():
        is_weight = name.startswith(("params.", "opt_state."))
        if is_weight and array["dtype"] == "float32" and array["shape"]:
            names.append(name)
    name = rng.choice(names)
    value = rng.choice([math.nan, math.inf, -math.inf])
    (file,) = [
        file
        for file in commit["files"]
        if re.fullmatch(re.escape(f"arrays/{name}/") + r"[\d.]+", file)
    ]
    numbers = np.fromfile(step / file, np.float32)
    numbers[rng.randrange(numbers.size)] = value
    numbers.tofile(step / file)
    array = numbers.reshape(commit["arrays"][name]["shape"])

    def digested() -> Iterator[dict[str, Any]]:
        jax.config.update("jax_platforms", "cpu")
        yield tree_digests({name: jnp.asarray(array)})

    commit["arrays"][name]["digest"] = next(iter(apart(digested)))[name]
    commit["files"] |= hash_files(step, [file])
    (step / "commit.json").write_bytes(encode_commit(commit))
    return LaunchFault(
        f"{value} in {name} of the newest checkpoint", names=(name,), must_say=True, must_go_on=True
    )


def wrong_types(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """A commit record, or what is saved beside the arrays, is JSON with values of other types, and
    hashed as such."""
    step = steps_of(run)[-1]
    commit = read_commit(step)
    values = [None, [], {}, "twelve", -1, 1.5, True]
    if rng.random() < 0.5:
        record = json.loads((step / "record.json").read_bytes())
        name = rng.choice(sorted(record))
        value = rng.choice(values)
        if record[name] == value or type(record[name]) is type(value):
            value = {"of": "another type"}
            if isinstance(record[name], dict):
                value = 7
        record[name] = value
        (step / "record.json").write_text(json.dumps(record))
        commit["files"] |= hash_files(step, ["record.json"])
        where = f"record.json: {name}={value}"
        # A value that the run does not use may be of any type.
        must_say = False
    else:
        name = rng.choice(["step", "files", "arrays", "format"])
        value = rng.choice(["twelve", None, [1], 1.5])
        commit[name] = value
        where = f"commit.json: {name}={value}"
        must_say = True
    (step / "commit.json").write_bytes(encode_commit(commit))
    return LaunchFault(where, names=(step.name, "record.json", "commit.json"), must_say=must_say)


def foreign_checkpoint(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """A checkpoint of another run, as a newer step than the run has, or in the place of one of its
    own."""
    theirs = steps_of(stage.foreign)
    newest = int(steps_of(run)[-1].name)
    later = [path for path in theirs if int(path.name) > newest]
    same = [path for path in theirs if (run / "checkpoints" / path.name).exists()]
    source = rng.choice(later + same)
    target = run / "checkpoints" / source.name
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target)
    return LaunchFault(
        f"checkpoint {source.name} is of another run", names=(source.name,), must_say=True
    )


def foreign_file(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """A file of another run."""
    books = [name for name in BOOKS if (stage.foreign / name).exists()]
    name = rng.choice([FILE_NAME, *books, "rollbacks.json"])
    if (stage.foreign / name).exists():
        shutil.copy(stage.foreign / name, run / name)
    else:
        rollback = {"step": 12, "kind": "loss_spike", "left_out": [11, 12]}
        (run / name).write_text(json.dumps([rollback]))
    return LaunchFault(f"{name} of another run", names=(name,), must_say=name != "config.yaml")


def torn_file(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """A file that is cut off, overwritten with noise, empty, or JSON of other types."""
    name = rng.choice([FILE_NAME, "rollbacks.json", *BOOKS])
    path = run / name
    content = b'{"start": 1.0, "end": 2.0, "code": 75}\n' * 3
    if path.exists():
        content = path.read_bytes()
    kind = rng.choice(["cut off", "noise", "noise within", "empty", "other types"])
    if kind == "cut off":
        content = content[: rng.randrange(1, len(content))]
    elif kind == "noise":
        content = rng.randbytes(rng.randrange(1, 2000))
    elif kind == "noise within":
        at = rng.randrange(len(content))
        content = content[:at] + rng.randbytes(8) + content[at + 8 :]
    elif kind == "empty":
        content = b""
    else:
        content = rng.choice(
            [
                b"[]\n",
                b"{}\n",
                b"null\n",
                b'"text"\n',
                b'{"step": "twelve", "kind": []}\n',
                b"[[1, 2]]\n",
            ]
        )
    path.write_bytes(content)
    return LaunchFault(f"{name}: {kind}", names=(f"{name}:",), gap=name == FILE_NAME)


def metrics_cut(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """metrics.jsonl ends before the step that the run goes on from, or is gone."""
    path = run / FILE_NAME
    newest = int(steps_of(run)[-1].name)
    lines = path.read_bytes().splitlines(keepends=True)
    if rng.random() < 0.4:
        path.unlink()
        return LaunchFault(
            "metrics.jsonl is gone", names=(f"{FILE_NAME}:",), gap=True, must_say=True
        )
    count = rng.randrange(1, max(2, newest - 1))
    path.write_bytes(b"".join(lines[:count]))
    return LaunchFault(
        f"metrics.jsonl ends after {count} lines", names=(f"{FILE_NAME}:",), gap=True, must_say=True
    )


def no_checkpoints(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """The folder of checkpoints is gone, or empty."""
    folder = run / "checkpoints"
    shutil.rmtree(folder)
    if rng.random() < 0.5:
        folder.mkdir()
    fix = None
    if rng.random() < 0.5:
        fix = ("checkpoint.start_over=true",)
    return LaunchFault(
        "no checkpoint is left", names=("has no checkpoint",), must_say=True, fix=fix
    )


def another_set(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """The evaluation set is another one from here on."""
    words = (f"eval.sets.heldout.path={stage.other_set}",)
    return LaunchFault(
        "another evaluation set",
        words,
        names=("eval.sets.heldout was",),
        evaluations=True,
        must_say=True,
    )


def pruned(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """`maxtrain checkpoint prune --apply` while the run goes on."""

    def prune(run: Path) -> ForkedProcess:
        words = ["prune", str(run), "--keep", "1", "--apply"]
        return ForkedProcess(lambda: checkpoint.main(words), stage.log(f"{run.name}-prune"), {})

    return LaunchFault(
        "pruned beside a training", failpoint="after_step:delay=0.02", beside=prune, must_go_on=True
    )


def fewer_steps(stage: MeaningScene, run: Path, rng: random.Random) -> LaunchFault:
    """The run is given fewer steps than it has, or was planned for, and then as many as before."""
    steps = rng.choice([10, 20, 30, 40, 50])
    return LaunchFault(f"{steps} steps", (f"steps={steps}",), steps=steps)


KINDS: dict[str, Kind] = {
    "NaN in training": nan_in_training,
    "worthless weights, all hashes right": worthless_weights,
    "a checkpoint's records of wrong types": wrong_types,
    "a checkpoint of another run": foreign_checkpoint,
    "a file of another run": foreign_file,
    "a torn file": torn_file,
    "metrics.jsonl cut or removed": metrics_cut,
    "checkpoints removed": no_checkpoints,
    "another evaluation set": another_set,
    "pruned beside a training": pruned,
    "fewer steps, then as many": fewer_steps,
}


class FaultTrial:
    """One fault, and the launches after it."""

    def __init__(self, stage: MeaningScene, name: str, rng: random.Random, commands: float):
        self.stage = stage
        self.name = name
        self.rng = rng
        self.commands = commands
        self.run = stage.runs / name
        self.base = stage.runs / f"base-{rng.choice(STRUCK)}"
        self.problems: list[str] = []

    def make(self, kind: Kind) -> tuple[str, str, list[str]]:
        """Damages the run and launches it: what was done, how that ended, and what is wrong."""
        shutil.copytree(self.base, self.run)
        fault = kind(self.stage, self.run, self.rng)
        commits = {}
        for path in steps_of(self.run):
            if is_sound(path, self.base):
                commits[path.name] = read_commit(path)["crc32"]
        code, said = self._launch(fault.overrides, fault)
        self.problems += judge_words(fault, code, said)
        if code == 0:
            self._judge_end(fault, said)
            ended = "went on"
        else:
            self._judge_steps(commits)
            ended = f"refused with {code}"
        if not self.problems and (code != 0 or fault.steps):
            self._go_on(fault, code)
        return fault.what, ended, self.problems

    def _launch(
        self, overrides: tuple[str, ...], fault: LaunchFault | None
    ) -> tuple[int | str, str]:
        log = self.stage.log(self.name)
        begin = size_of(log)
        is_command = self.rng.random() < self.commands
        failpoint = ""
        if fault:
            failpoint = fault.failpoint
        process = self.stage.start(self.name, *overrides, fault=failpoint, command=is_command)
        if fault and fault.beside:
            before = size_of(log)
            wait_for(lambda: log.exists() and b"after_step" in log.read_bytes()[before:], process)
            code = end(fault.beside(self.run))
            if code not in (0, 74):
                self.problems.append(f"prune ended with {code}")
        code = end(process)
        said = log.read_bytes()[begin:].decode(errors="replace")
        return code, said

    def _judge_end(self, fault: LaunchFault, said: str) -> None:
        """Judge a launch that ended with 0: numbers, records and the last checkpoint are the
        reference's, or its output reports what is missing.
        """
        reference = RunFiles(self.stage.runs / fault.reference)
        try:
            left = RunFiles(self.run)
        except UserError as error:
            self.problems.append(f"SILENT: what it has left can't be read: {error}")
            return
        last_step = self.stage.steps
        if fault.steps:
            last_step = max(fault.steps, int(steps_of(self.base)[-1].name))
        self._judge_numbers(fault, left, reference)
        steps = set(left.steps)
        missing = sorted(set(range(1, last_step + 1)) - steps)
        is_reported = any(name in said for name in fault.names)
        if missing and not (fault.gap and is_reported):
            self.problems.append(
                f"SILENT: there are no records of steps {missing[0]} to {missing[-1]}"
            )
        if len(left.steps) != len(steps) or left.steps != sorted(left.steps):
            self.problems.append("records are there twice, or not in order")
        if last_step == self.stage.steps:
            wanted = keys(reference)
            found = keys(left)
            if not (fault.gap or fault.evaluations) and wanted != found:
                self.problems.append(
                    f"SILENT: records are missing, or are too many: {sorted(wanted ^ found)[:3]}"
                )
            theirs = read_commit(reference.run / "checkpoints" / f"{last_step:08d}")
            ours = self.run / "checkpoints" / f"{last_step:08d}"
            if not (ours / "commit.json").exists():
                self.problems.append("there is no checkpoint of the last step")
            elif digests(read_commit(ours)) != digests(theirs):
                self.problems.append("SILENT: the weights of the end are not the reference's")

    def _judge_numbers(self, fault: LaunchFault, left: RunFiles, reference: RunFiles) -> None:
        """Every number on record is the reference's."""
        ours = left.records
        theirs = reference.records
        if fault.evaluations:
            ours = [record for record in ours if record["kind"] == "train"]
        for field in compare_records(ours, theirs):
            if field.different and not field.name.startswith("best"):
                self.problems.append(f"SILENT: {field.name} differs at {field.first}")

    def _judge_steps(self, commits: dict[str, str]) -> None:
        """Judge a launch that was refused: checkpoints that were good are all there."""
        there = collections.defaultdict[str, set[str]](set)
        for path in self.run.rglob("commit.json"):
            with contextlib.suppress(ValueError, KeyError):
                there[path.parent.name[:8]].add(read_commit(path.parent)["crc32"])
        keep = CHANGES["checkpoint"]["keep"]
        newest = [path.name for path in steps_of(self.run)][-keep:]
        # Checkpoints before this one were removed because there are enough newer ones.
        oldest_kept = ""
        if len(newest) == keep:
            oldest_kept = newest[0]
        lost = []
        for name, crc in commits.items():
            if crc not in there[name] and name >= oldest_kept:
                lost.append(name)
        if lost:
            self.problems.append(f"LOST: checkpoints {lost}")

    def _go_on(self, fault: LaunchFault, code: int | str) -> None:
        """Undoes the fault, or follows the advice of the message: the same command must end like
        the reference."""
        overrides = fault.fix or ()
        spoilt_on_disk = code != 75 and not fault.failpoint and not fault.overrides
        if spoilt_on_disk and fault.fix is None:
            shutil.rmtree(self.run)
            shutil.copytree(self.base, self.run)
        code, said = self._launch(overrides, None)
        if code == 75 and fault.failpoint:
            code, said = self._launch(overrides, None)
        after = LaunchFault(f"after {fault.what}")
        self.problems += judge_words(after, code, said)
        if code != 0:
            self.problems.append(f"with the fault undone it ended with {code}")
        else:
            self._judge_end(after, said)


def judge_words(fault: LaunchFault, code: int | str, said: str) -> list[str]:
    """Return the problems of an exit code and of the output beside it: no message, a traceback, or
    no name of the fault.
    """
    problems = []
    if code not in CODES:
        problems.append(f"ended with {code}")
    if "Traceback" in said:
        problems.append("there is a traceback")
    messages = re.findall(r"^error: (.*(?:\n .*)*)", said, re.MULTILINE)
    if code == TryAgainError.exit_code:
        # It is no error of the user's, so its message has no prefix and comes last.
        messages = said.strip().splitlines()[-1:]
    if code != 0 and not any(NAMES.search(message) for message in messages):
        problems.append(f"exit code {code} and no message that names a file or a key: {messages}")
    if code != 0 and fault.must_go_on:
        problems.append(f"ended with {code}, where it could have gone on")
    if code == 0 and fault.must_say and not any(name in said for name in fault.names):
        problems.append(f"SILENT: it says nothing of {' or '.join(fault.names)}")
    return problems


def keys(left: RunFiles) -> set[tuple[str, str, int]]:
    """Return which records there are."""
    return {(record["kind"], record.get("set", ""), record["step"]) for record in left.records}


def is_sound(step: Path, base: Path) -> bool:
    """Return whether a checkpoint of a spoilt run is still that of the run that it was copied
    from.
    """
    original = base / "checkpoints" / step.name / "commit.json"
    try:
        return original.exists() and original.read_bytes() == (step / "commit.json").read_bytes()
    except OSError:
        return False


def digests(commit: dict[str, Any]) -> dict[str, str]:
    """Return the digests of all arrays, by name."""
    return {name: array["digest"] for name, array in commit["arrays"].items()}


def meaning(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Try faults of each kind in turn."""
    stage = MeaningScene(folder / "meaning")
    rng = random.Random(args.seed)
    counts = collections.Counter[str]()
    failed = collections.Counter[str]()
    ends = collections.defaultdict[str, collections.Counter[str]](collections.Counter)
    while not tally.done():
        kind = list(KINDS)[(tally.trials + args.seed) % len(KINDS)]
        name = f"{tally.name}-{tally.trials}"
        trial = FaultTrial(stage, name, rng, args.commands)
        what, ended, problems = trial.make(KINDS[kind])
        counts[kind] += 1
        failed[kind] += bool(problems)
        ends[kind][ended] += 1
        tally.count(failure(f"{name}, {kind}, {what}", problems), f"{what}: {ended}")
        if problems:
            tally.tell(f"kept in {put_away(stage, name)}")
        shutil.rmtree(trial.run, ignore_errors=True)
        for log in (stage.log(name), stage.log(f"{name}-prune")):
            log.unlink(missing_ok=True)
    tally.rows = [(kind, count, failed[kind]) for kind, count in counts.items()]
    for kind, found in ends.items():
        ended = ", ".join(f"{ended} {count}" for ended, count in found.most_common())
        tally.notes.append(f"{kind}: {ended}.")
