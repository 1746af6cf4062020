"""Damage to checkpoints and data shards: it must be noticed before it is used, and there must be no
false alarm.

Each trial damages one file of a copy: a bit is flipped, or the file is truncated or removed; or the
whole directory of a step is emptied. A checkpoint is then opened as a run opens it: damaged ones
are put aside until a whole one is found, which must be the step before, with the arrays that were
saved. Data is read to its end, and each batch must be that of the undamaged data. In every eleventh
trial there is no damage. Some trials of both kinds are whole runs, which must end with the
reference's numbers, or with exit 65 and the name of the file.
"""

import argparse
import collections
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import RunFiles, Scene, apart, end, ended_with, put_away
from data_pipeline.base.errors import DamagedError, DataError, StorageError, UserError
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import open_training
from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import latest_record, read_record
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.checkpoint.quarantine import put_aside
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests

KINDS = {"flipped bit": 16, "truncated": 2, "removed": 2}
# One of this many trials is a whole run.
WHOLE_RUNS = 50
# How much text is read.
_MIB = 4


def damage(folder: Path, rng: random.Random, kinds: dict[str, int]) -> tuple[str, str]:
    """Damages one file below a folder, or empties the folder.

    Returns:
        The kind of damage, and the name of what was damaged.
    """
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "emptied":
        shutil.rmtree(folder)
        folder.mkdir()
        return kind, folder.name
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1)
    # Half of the time any file is drawn, half of the time any byte: else small files, or large
    # ones, would hardly ever be hit.
    if rng.random() < 0.5:
        path = rng.choice(files)
    else:
        sizes = [path.stat().st_size for path in files]
        path = rng.choices(files, sizes)[0]
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) - 1)
    if kind == "removed":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[:at])
    else:
        content[at] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
    return kind, path.relative_to(folder).as_posix()


def flips_of_checkpoints(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Damage the newest checkpoint of a run, again and again."""
    scene = Scene(folder / "run")
    rng = random.Random(args.seed)
    reference = scene.reference()
    kinds = {**KINDS, "emptied": 1}
    sound = reference.run / "checkpoints"
    table = collections.Counter[str]()
    alarms = 0

    def restores() -> Iterator[dict[str, Any]]:
        own_rng = random.Random(args.seed)
        return _restores(sound, folder / "copy", own_rng, kinds, tally.wanted)

    for said in apart(restores):
        problem = said["problem"]
        if said["kind"] == "none":
            alarms += 1
            if problem:
                tally.fail(problem)
        else:
            table[said["kind"]] += 1
            tally.count(problem, said["kind"])
        if tally.done():
            break
    runs = max(1, tally.trials // WHOLE_RUNS)
    for number in range(runs):
        name = f"{tally.name}-{number}"
        shutil.copytree(reference.run, scene.runs / name)
        what = damage(scene.runs / name / "checkpoints" / sound_name(reference.newest), rng, kinds)
        code = end(scene.start(name, command=rng.random() < args.commands))
        left = RunFiles(scene.runs / name)
        problems = left.unlike(reference, whole=True) + ended_with(code, 0)
        if len(left.aside()) != 1:
            problems.append(f"put aside: {left.aside()}")
        tally.tell(f"whole run {number + 1} of {runs}: {what[0]} of {what[1]}")
        _conclude(scene, tally, name, f"{what}", problems)
    _count(tally, "checkpoint", table, alarms, runs)


def _conclude(scene: Scene, tally: Tally, name: str, what: str, problems: list[str]) -> None:
    """Reports what is wrong with a whole run that has ended, and keeps the run; removes it if all
    is well."""
    if problems:
        tally.fail(failure(what, problems))
        put_away(scene, name)
    shutil.rmtree(scene.runs / name, ignore_errors=True)


def _count(tally: Tally, what: str, table: dict[str, int], alarms: int, runs: int) -> None:
    """Fills the table: trials of each kind of damage, trials without damage, whole runs."""
    tally.rows = [(f"{what}: {kind}", count, _failed(tally, kind)) for kind, count in table.items()]
    tally.rows.append((f"{what}: no damage, no alarm", alarms, _failed(tally, "none")))
    # The failures of whole runs begin with the kind and the file in brackets.
    tally.rows.append((f"{what}: any of these, in whole runs", runs, _failed(tally, "(")))


def sound_name(step: int) -> str:
    return f"{step:08d}"


def _failed(tally: Tally, kind: str) -> int:
    return sum(failure.startswith(kind) for failure in tally.failures)


def _restores(
    sound: Path, copy: Path, rng: random.Random, kinds: dict[str, int], trials: int
) -> Iterator[dict[str, Any]]:
    """Damages a checkpoint and opens it, again and again; yields the kind of damage, and what is
    wrong. It starts a device, so it runs in a process of its own."""
    jax.config.update("jax_platforms", "cpu")
    checkpoints = Checkpoints(copy, CheckpointConfig())
    steps = [int(path.name) for path in sorted(sound.iterdir()) if path.name.isdecimal()]
    commit = read_commit(sound / sound_name(steps[-1]))
    abstract = {
        name: jax.ShapeDtypeStruct(x["shape"], jax.numpy.dtype(x["dtype"]))
        for name, x in commit["arrays"].items()
    }
    for trial in range(trials + trials // 10):
        shutil.rmtree(copy, ignore_errors=True)
        for step in steps[-2:]:
            shutil.copytree(sound / sound_name(step), copy / sound_name(step))
        kind = "none"
        where = ""
        expected = steps[-1]
        if trial % 11 != 10:
            kind, where = damage(copy / sound_name(steps[-1]), rng, kinds)
            expected = steps[-2]
        problem = _open_newest(checkpoints, abstract, sound, expected)
        if problem:
            problem = f"{kind} of {where}: {problem}"
        yield {"kind": kind, "problem": problem}


def _open_newest(
    checkpoints: Checkpoints, abstract: dict[str, Any], sound: Path, expected: int
) -> str:
    """Opens the newest checkpoint as a run does; what is wrong with what it finds."""
    for _ in range(3):
        try:
            record = latest_record(checkpoints.directory)
            if record is None:
                return "the run would start over"
            state, _ = checkpoints.restore(abstract, record["step"])
        except DamagedError as found:
            put_aside(found)
            continue
        except UserError as error:
            return f"no step is left: {error}"
        digests = {
            name: entry["digest"]
            for name, entry in read_commit(sound / sound_name(expected))["arrays"].items()
        }
        if record["step"] != expected or record != read_record(sound / sound_name(expected)):
            return f"SILENT: it goes on from step {record['step']}"
        if tree_digests(state) != digests:
            return "SILENT: arrays are not what was saved"
        return ""
    return "it never ends"


def flips_of_shards(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Damage a data set of a few blocks, again and again."""
    scene = Scene(folder / "run")
    rng = random.Random(args.seed)
    reference = scene.reference()
    sound = folder / "long" / "data"
    copy = folder / "copy"
    Scene(folder / "long", megabytes=_MIB)
    contents, _ = _read(sound / "train")
    table = collections.Counter[str]()
    alarms = 0
    while not tally.done():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound / "train", copy)
        if (tally.trials + alarms) % 11 != 10:
            kind, where = damage(copy, rng, KINDS)
            problem = _damage_unlike(copy, contents, where)
            if problem:
                problem = f"{kind} of {where}: {problem}"
            table[kind] += 1
            tally.count(problem, kind)
        else:
            alarms += 1
            read, error = _read(copy)
            if error or read != contents:
                tally.fail(f"none: {error or 'SILENT: batches are not those of the data'}")
    runs = max(1, tally.trials // WHOLE_RUNS)
    for number in range(runs):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(scene.folder / "data" / "train", copy)
        kind, where = damage(copy, rng, KINDS)
        name = f"{tally.name}-{number}"
        is_command = rng.random() < args.commands
        code = end(scene.start(name, f"data.sources.text.path={copy}", command=is_command))
        left = RunFiles(scene.runs / name)
        problems = left.unlike(reference, whole=False) + ended_with(code, 65)
        if Path(where).stem not in scene.log(name).read_text():
            problems.append("the message does not name it")
        tally.tell(f"whole run {number + 1} of {runs}: {kind} of {where}")
        _conclude(scene, tally, name, f"({kind} of {where})", problems)
    _count(tally, "data shards", table, alarms, runs)


def _damage_unlike(copy: Path, contents: list[int], where: str) -> str:
    """Return the problem with how damaged data is read; empty if there is none.

    Args:
        copy: the damaged data.
        contents: of the batches of the undamaged data.
        where: the damaged file.
    """
    read, error = _read(copy)
    if not error:
        return "SILENT"
    if Path(where).stem not in error:
        return f"the message does not name it: {error}"
    if read != contents[: len(read)]:
        return "SILENT: a batch is not that of the whole data"
    return ""


def _read(data: Path) -> tuple[list[int], str]:
    """The contents of an epoch's batches, and the error that ended them, if one did."""
    contents = []
    try:
        config = DataConfig(
            sources={"text": SourceConfig(str(data))}, seq_length=256, batch_size=512
        )
        training = open_training(config, 0, "auto")
        for step in range(training.plan.num_steps):
            contents.append(training.batch(step).content)
    except (DataError, StorageError) as error:
        return contents, str(error)
    return contents, ""
