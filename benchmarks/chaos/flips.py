"""Damage to checkpoints and data shards: noticed before it is used, and never imagined.

One file at a time of a whole copy: a bit flipped, truncated or removed; or all of a step's
directory emptied. A checkpoint is then opened as a run does it: what is damaged is put aside, until
one is whole, which must be the step before, array by array what was saved. Data is read to its end,
and each batch handed out must be that of the whole data. Every eleventh time there is no damage. A
share of both goes through whole runs, which must end with the reference's numbers, or with exit 65
and the name of the file.
"""

import argparse
import collections
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from benchmarks.chaos.report import Tally
from benchmarks.chaos.victim import Left, Scene, apart, end, put_away
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.errors import DamagedError, DataError, StorageError, UserError
from data_pipeline.loader import open_training
from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import latest_record, read_record
from maxtrain.checkpoint.manager import Checkpoints, put_aside
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests

KINDS = {"flipped bit": 16, "truncated": 2, "removed": 2}
WHOLE_RUNS = 50  # one of so many
_MIB = 4  # of text to be read


def damage(folder: Path, rng: random.Random, kinds: dict[str, int]) -> tuple[str, str]:
    """Spoils one file below a folder, or all of it: what was done, and where."""
    kind = rng.choices(list(kinds), list(kinds.values()))[0]
    if kind == "emptied":
        shutil.rmtree(folder)
        folder.mkdir()
        return kind, folder.name
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 1)
    # Half of the time any file, half of the time any byte: else small files are hardly ever hit, or
    # large ones.
    path = (
        rng.choice(files)
        if rng.random() < 0.5
        else rng.choices(files, [path.stat().st_size for path in files])[0]
    )
    content = bytearray(path.read_bytes())
    at = rng.randrange(len(content) - 1)
    if kind == "flipped bit":
        content[at] ^= 1 << rng.randrange(8)
    path.unlink() if kind == "removed" else path.write_bytes(
        content[:at] if kind == "truncated" else content
    )
    return kind, path.relative_to(folder).as_posix()


def flips_of_checkpoints(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many damages of the newest checkpoint of a run."""
    scene, rng = Scene(folder / "run"), random.Random(asked.seed)
    reference, kinds = scene.reference(), {**KINDS, "emptied": 1}
    sound = reference.run / "checkpoints"
    table, alarms = collections.Counter[str](), 0
    for said in apart(
        lambda: _restores(sound, folder / "copy", random.Random(asked.seed), kinds, tally.wanted)
    ):
        if said["kind"] == "none":
            alarms += 1
            tally.fail(said["problem"]) if said["problem"] else None
        else:
            table[said["kind"]] += 1
            tally.count(said["problem"], said["kind"])
        if tally.done():
            break
    runs = max(1, tally.trials // WHOLE_RUNS)
    for number in range(runs):
        name = f"{tally.name}-{number}"
        shutil.copytree(reference.run, scene.runs / name)
        what = damage(scene.runs / name / "checkpoints" / sound_name(reference.newest), rng, kinds)
        code, left = (
            end(scene.start(name, command=rng.random() < asked.commands)),
            Left(scene.runs / name),
        )
        problems = left.unlike(reference, whole=True) + ([f"ended with {code}"] if code else [])
        problems += [] if len(left.aside()) == 1 else [f"put aside: {left.aside()}"]
        tally.tell(f"whole run {number + 1} of {runs}: {what[0]} of {what[1]}")
        _conclude(scene, tally, name, f"{what}", problems)
    _count(tally, "checkpoint", table, alarms, runs)


def _conclude(scene: Scene, tally: Tally, name: str, what: str, problems: list[str]) -> None:
    """A whole run has ended: what is wrong with it is told and kept."""
    if problems:
        tally.fail(f"{what}: {'; '.join(problems)}")
        put_away(scene, name)
    shutil.rmtree(scene.runs / name, ignore_errors=True)


def _count(tally: Tally, what: str, table: dict[str, int], alarms: int, runs: int) -> None:
    """The rows of the table: trials of each kind of damage, false alarms, whole runs."""
    tally.rows = [(f"{what}: {kind}", count, _failed(tally, kind)) for kind, count in table.items()]
    tally.rows += [(f"{what}: no damage, no alarm", alarms, _failed(tally, "none"))]
    tally.rows += [
        (
            f"{what}: any of these, in whole runs",
            runs,
            sum(f.startswith("(") for f in tally.failures),
        )
    ]


def sound_name(step: int) -> str:
    return f"{step:08d}"


def _failed(tally: Tally, kind: str) -> int:
    return sum(failure.startswith(kind) for failure in tally.failures)


def _restores(
    sound: Path, copy: Path, rng: random.Random, kinds: dict[str, int], trials: int
) -> Iterator[dict[str, Any]]:
    """In a process of its own, which starts a device: each damage, and what came of it."""
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
        spoil = trial % 11 != 10
        kind, where = damage(copy / sound_name(steps[-1]), rng, kinds) if spoil else ("none", "")
        expected = steps[-2 if spoil else -1]
        problem = _open_newest(checkpoints, abstract, sound, expected)
        yield {"kind": kind, "problem": f"{kind} of {where}: {problem}" if problem else ""}


def _open_newest(
    checkpoints: Checkpoints, abstract: dict[str, Any], sound: Path, expected: int
) -> str:
    """Goes on as a run does; what is wrong with that."""
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
        return "" if tree_digests(state) == digests else "SILENT: arrays are not what was saved"
    return "it never ends"


def flips_of_shards(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many damages of a data set of a few blocks."""
    scene, rng = Scene(folder / "run"), random.Random(asked.seed)
    reference, sound, copy = scene.reference(), folder / "long" / "data", folder / "copy"
    Scene(folder / "long", megabytes=_MIB)
    contents, _ = _read(sound / "train")
    table, alarms = collections.Counter[str](), 0
    while not tally.done():
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(sound / "train", copy)
        spoil = (tally.trials + alarms) % 11 != 10
        kind, where = damage(copy, rng, KINDS) if spoil else ("none", "")
        read, error = _read(copy)
        problem = (
            ""
            if bool(error) == spoil and (spoil or len(read) == len(contents))
            else "SILENT"
            if spoil
            else f"{error}"
        )
        problem = problem or (
            "" if read == contents[: len(read)] else "SILENT: a batch is not that of the whole data"
        )
        if spoil and error and Path(where).stem not in error:
            problem = f"the message does not name it: {error}"
        problem = f"{kind} of {where}: {problem}" if problem else ""
        if spoil:
            table[kind] += 1
            tally.count(problem, kind)
        else:
            alarms += 1
            tally.fail(problem) if problem else None
    runs = max(1, tally.trials // WHOLE_RUNS)
    for number in range(runs):
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(scene.folder / "data" / "train", copy)
        kind, where = damage(copy, rng, KINDS)
        name = f"{tally.name}-{number}"
        code, left = (
            end(
                scene.start(
                    name, f"data.sources.text.path={copy}", command=rng.random() < asked.commands
                )
            ),
            Left(scene.runs / name),
        )
        problems = left.unlike(reference, whole=False) + (
            [f"ended with {code}"] if code != 65 else []
        )
        problems += (
            []
            if Path(where).stem in scene.log(name).read_text()
            else ["the message does not name it"]
        )
        tally.tell(f"whole run {number + 1} of {runs}: {kind} of {where}")
        _conclude(scene, tally, name, f"({kind} of {where})", problems)
    _count(tally, "data shards", table, alarms, runs)


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
