"""`maxtrain teach RUN|DIR DATA...`: what a teacher says of each token of prepared data, kept beside
the data for runs with distill.stored=NAME.

Of each token the K likeliest ones are kept with their log-probabilities, and the mass of all
others. The teacher reads each document alone, as rows of whole documents have it. What is written
when the command is killed stays: the same command goes on behind it, and what it makes is the same,
bit for bit. The format is that of data_pipeline/shards/teacher_logits.py.
"""

import argparse
import dataclasses
import math
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.base.errors import ConfigError, StorageError, UsageError, run_command
from data_pipeline.plan.document_packing import document_targets
from data_pipeline.shards import TokenShards
from data_pipeline.shards.teacher_logits import RECORD, TeacherRecord, folder_of
from maxtrain.commands.teach.compute import LoadedTeacher, load_teacher, teach
from maxtrain.config.schema import MeshConfig, ObserveConfig
from maxtrain.parallel.distributed import start

_DEFAULT_TOP = 64


def make_record(
    teacher: LoadedTeacher, shards: TokenShards, top: int, temperature: float, length: int | None
) -> TeacherRecord:
    """Return what is to be made of shards.

    Args:
        top: entries of each token.
        temperature: that divides the teacher's logits.
        length: targets of a document at most; None: as many as the teacher and the data have.

    Raises:
        ConfigError: the data is of another tokenizer, or has other entries.
        UsageError: a number is too large.
    """
    frozen = teacher.frozen
    entries = frozen.model.vocab_size or 0
    if shards.vocab_size > entries:
        raise ConfigError(
            f"{frozen.name} has a vocabulary of {entries:,} entries, and {shards.path} of "
            f"{shards.vocab_size:,}. Prepare the data with the teacher's tokenizer."
        )
    frozen.require_same_tokenizer(shards.manifest.tokenizer["sha256"])
    if top > entries:
        raise UsageError(f"--top {top}: the teacher has {entries:,} entries. Name at most those.")
    _, sizes = document_targets(shards, np.arange(shards.num_documents))
    longest = min(int(sizes.max()), frozen.model.max_length)
    if length is not None:
        if length > frozen.model.max_length:
            raise UsageError(
                f"--seq-length {length}: the teacher reads at most {frozen.model.max_length:,} "
                "tokens. Name at most those."
            )
        longest = min(longest, length)
    return TeacherRecord(
        data=shards.uid,
        teacher=teacher.digest,
        described=frozen.describe(),
        precision=dataclasses.asdict(frozen.precision),
        vocab_size=entries,
        top=top,
        temperature=temperature,
        length=max(longest, 1),
    )


def describe(shards: TokenShards, record: TeacherRecord, folder: Path) -> str:
    """Return what will be written, in a line. StorageError: there is no room for it."""
    size = record.entry().itemsize
    total = size * shards.num_tokens
    there = sum(path.stat().st_size for path in folder.glob("*.top"))
    free = shutil.disk_usage(folder.parent).free
    line = (
        f"{folder}: {shards.num_tokens:,} tokens x {size:,} bytes ({record.top} entries) = "
        f"{total / 1e6:,.1f} MB"
    )
    if total - there > free:
        raise StorageError(
            f"{line}, and {free / 1e6:,.1f} MB are free. Free space, or lower --top."
        )
    return line


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog,
        allow_abbrev=False,
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "teacher",
        metavar="RUN|DIR",
        help="a run of maxtrain, its RUN/checkpoints/STEP, or a Hugging Face directory",
    )
    add("data", metavar="DATA", nargs="+", help="prepared directories, each with manifest.json")
    add("--name", default="teacher", help="what distill.stored calls it (default: teacher)")
    add(
        "--top",
        metavar="K",
        type=int,
        default=_DEFAULT_TOP,
        help=f"entries that are kept of each token (default: {_DEFAULT_TOP})",
    )
    add(
        "--temperature",
        metavar="T",
        type=float,
        default=1.0,
        help="divides the teacher's logits; that of distill.temperature (default: 1)",
    )
    add(
        "--seq-length",
        metavar="N",
        type=int,
        help="of longer documents, the first N tokens (default: as many as the teacher reads)",
    )
    args = parser.parse_args(argv)
    for option, value in (("--top", args.top), ("--seq-length", args.seq_length)):
        if value is not None and value < 1:
            parser.error(f"{option} {value} must be at least 1")
    if not (args.temperature > 0 and math.isfinite(args.temperature)):
        parser.error(f"--temperature {args.temperature} must be above 0, and finite")
    return args


def _is_there(folder: Path, record: TeacherRecord) -> bool:
    """Return whether the same is there already. ConfigError: something else is."""
    if not (folder / RECORD).exists():
        return False
    found = dataclasses.replace(TeacherRecord.load(folder), files=())
    if found.digest() != record.digest():
        raise ConfigError(
            f"{folder} is there already, of another teacher, other data or other options. Name "
            "another one with --name, or remove it."
        )
    return True


def main(argv: Sequence[str], prog: str = "maxtrain teach") -> int:
    """Runs the command; the exit code."""

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    def job() -> None:
        args = _parse(argv, prog)
        start(MeshConfig(num_processes=1), ObserveConfig().compilation_cache)
        teacher = load_teacher(args.teacher)
        todo: list[tuple[Any, ...]] = []
        for place in args.data:
            shards = TokenShards.open(place)
            folder = folder_of(shards, args.name, "--name")
            record = make_record(teacher, shards, args.top, args.temperature, args.seq_length)
            if _is_there(folder, record):
                say(f"{folder}: is there already")
                continue
            say(describe(shards, record, folder))
            todo.append((shards, record, folder))
        for shards, record, folder in todo:
            began = time.monotonic()
            teach(teacher, shards, record, folder, say)
            print(f"{folder}: done in {time.monotonic() - began:,.1f} s")

    return run_command(job, resumes=True)
