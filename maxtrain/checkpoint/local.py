"""Steps of a run behind a URL that are on the disks of its hosts alone, saved between uploads.

    DIRECTORY/00001000/commit.json    of the whole step, the same on all hosts
    DIRECTORY/00001000/record.json    what the caller saves beside it, the same on all hosts
    DIRECTORY/00001000/local.json     says that this is no step of its own
    DIRECTORY/00001000/arrays/...     the files that this process wrote

Each process has a directory of its own. A step counts when the processes of a job have all of its
files between them, which they find out together when a launch begins. Such a step is never at the
URL, and nothing but the run itself reads it.
"""

import json
import platform
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from zlib_ng.zlib_ng import crc32

from data_pipeline.base import strict_json
from maxtrain.checkpoint.copying import remove_step
from maxtrain.checkpoint.integrity import (
    FORMAT,
    LOCAL_FILE,
    SMALL_FILES,
    read_commit,
    survey,
)
from maxtrain.checkpoint.listing import read_record
from maxtrain.checkpoint.local_writing import LocalWriter, write_texts
from maxtrain.checkpoint.peers import is_here
from maxtrain.checkpoint.quorum import CompleteStep, LocalStep, what_is_missing, whole_steps
from maxtrain.parallel.agreement import broadcast_text, report

_TEXTS = (*SMALL_FILES, LOCAL_FILE, "commit.json")


class StepMismatchError(Exception):
    """The processes go on from another step than one of them began its launch with."""


class LocalSteps:
    """The steps of a run on the disk of this host, in a directory of this process.

    Args:
        directory: which exists.
        keep: the newest that are kept.
        before_commit: is called on process 0 before a step counts.

    Attributes:
        whole: the steps that count, by number. Until `agree`, those that this host has a part of.
        writer: of new ones.
    """

    def __init__(
        self, directory: Path, keep: int, before_commit: Callable[[], object] | None = None
    ):
        self.directory = directory
        self.keep = keep
        self.whole: dict[int, Path] = {}
        self.writer = LocalWriter(directory, before_commit)
        # Lines about what is not a step of this run, and what of others is on no disk.
        self._told: list[str] = []
        self._missing: dict[int, str] = {}

    def look(self, why_not: Callable[[dict[str, Any]], str]) -> None:
        """Finds the steps that this host has a part of.

        Args:
            why_not: says of a record why the run can't go on from it; empty: it can.
        """
        self.whole = {}
        self._told = []
        for step, damage in survey(self.directory).items():
            path = self.writer.path(step)
            why = damage or _unreadable(path) or why_not(read_record(path))
            if why:
                self._told.append(f"{path} is passed over: {why}.")
            else:
                self.whole[step] = path

    def agree(self, name: str) -> None:
        """Finds, of the steps that hosts have parts of, those that are whole; together with the
        other processes.

        A process that has nothing of such a step gets its small files.

        Args:
            name: used once, in all processes the same.

        Raises:
            LostProcessError, TryAgainError: a process does not come.
        """
        held = {step: _to_json(_held(path)) for step, path in self.whole.items()}
        mine = {"host": platform.node(), "told": self._told, "held": held}
        said = [json.loads(text) for text in report(f"{name}/held", json.dumps(mine))]
        whole: dict[int, CompleteStep] = {}
        if said:
            all_held = [_from_json(theirs["held"]) for theirs in said]
            hosts = [theirs["host"] for theirs in said]
            whole = whole_steps(all_held)
            self._missing = what_is_missing(all_held, hosts)
            self._told = [
                f"{host}: {line}" for host, theirs in zip(hosts, said) for line in theirs["told"]
            ]
        text = broadcast_text(f"{name}/whole", json.dumps(whole))
        self.whole = {}
        for step, found in json.loads(text).items():
            self._take_part(f"{name}/{step}", int(step), CompleteStep(*found))

    def require_same(self, name: str, is_same: bool) -> None:
        """OtherStep, in all processes: what is whole is not what one of them went by.

        Args:
            name: used once, in all processes the same.
            is_same: whether it is what this process went by.
        """
        mine = ""
        if not is_same:
            mine = "another"
        said = report(f"{name}/same", mine)
        if broadcast_text(f"{name}/all the same", "".join(said)):
            raise StepMismatchError

    def told(self, newest: int) -> list[str]:
        """Return a line about each step that was passed over; on process 0, after `agree`.

        Args:
            newest: the step that the run goes on from. Older ones that are not whole are left out.
        """
        lines = list(self._told)
        for step, why in self._missing.items():
            if step > newest:
                lines.append(f"Step {step:,} in checkpoint.local is passed over: {why}.")
        return lines

    def _take_part(self, name: str, step: int, whole: CompleteStep) -> None:
        """Has a directory of a step that is whole, with its small files, on this host, too."""
        path = self.writer.path(step)
        sender = whole.holders[0]
        text = ""
        if jax.process_index() == sender:
            texts = {file: (path / file).read_text(encoding="utf-8") for file in _TEXTS}
            text = json.dumps(texts)
        if len(whole.holders) < jax.process_count():
            text = broadcast_text(name, text, sender)
        if jax.process_index() not in whole.holders:
            staging = self.writer.staging(step)
            for leftover in (staging, path):
                shutil.rmtree(leftover, ignore_errors=True)
            staging.mkdir(parents=True)
            write_texts(staging, json.loads(text))
            staging.rename(path)
        self.whole[step] = path

    def note_saved(self, step: int) -> None:
        """A step has come to count in all processes."""
        self.whole = {other: path for other, path in self.whole.items() if other < step}
        self.whole[step] = self.writer.path(step)

    def retire(self) -> None:
        """Remove all local steps except the newest complete ones.

        A step that can't be removed stays, and is reported.
        """
        self._keep_only(sorted(self.whole)[-self.keep :])

    def clear(self, uploaded: int) -> None:
        """Remove all local steps except complete ones that are later than the last uploaded
        step.
        """
        self._keep_only([step for step in self.whole if step > uploaded])

    def _keep_only(self, kept: list[int]) -> None:
        try:
            for step in survey(self.directory):
                if step not in kept:
                    remove_step(self.writer.path(step))
            for aside in self.directory.glob("*.damaged-*"):
                shutil.rmtree(aside)
        except OSError as error:
            what = f"removing old checkpoints from {self.directory} failed ({error})"
            fix = "Training goes on; they take space until they are removed"
            print(f"WARNING: {what}. {fix}.", file=sys.stderr, flush=True)
        self.whole = {step: self.whole[step] for step in kept}

    def discard_after(self, step: int) -> None:
        """Removes later steps: the run goes on from this one on another way. OSError: one can't be
        removed."""
        for later in survey(self.directory):
            if later > step:
                remove_step(self.writer.path(later))
        self.whole = {other: path for other, path in self.whole.items() if other <= step}


def is_local(step: Path) -> bool:
    """Return whether this is a part of a step whose other files are on the disks of other hosts."""
    return (step / LOCAL_FILE).exists()


def saves_since_upload(path: Path) -> int:
    """Return how many saves in a row there were, with this one, without an upload.

    Raises:
        ValueError: local.json is not what was written.
        OSError: it can't be read.
    """
    try:
        return int(strict_json.loads((path / LOCAL_FILE).read_bytes())["since_upload"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"{LOCAL_FILE} is not what was written") from error


def _unreadable(path: Path) -> str:
    """Why this version can't go by a step that is what was written; empty: it can."""
    number = read_commit(path)["format"]
    if number > FORMAT:
        return f"it has format {number}, and this version reads up to {FORMAT}"
    try:
        saves_since_upload(path)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _held(path: Path) -> LocalStep:
    """Return what this process has of a step."""
    text = (path / "commit.json").read_bytes()
    files = read_commit(path)["files"]
    there = 0
    for place, name in enumerate(sorted(files)):
        if is_here(path, files, name):
            there |= 1 << place
    return LocalStep(f"{crc32(text):08x}", len(files), there)


def _to_json(held: LocalStep) -> list[Any]:
    # As hexadecimal digits: numbers of thousands of digits are no JSON to everybody.
    return [held.identity, held.count, f"{held.files:x}"]


def _from_json(held: dict[str, list[Any]]) -> dict[int, LocalStep]:
    found = {}
    for step, (identity, count, files) in held.items():
        found[int(step)] = LocalStep(identity, count, int(files, 16))
    return found
