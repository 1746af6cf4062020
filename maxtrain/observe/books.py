"""Books that a run keeps about itself, a record of JSON a line: launches, the clock, attempts. No
run stops because of them.

A line that can't be read, or is of another run, is left out by whoever reads. Before a training
writes there, it puts the whole file aside and goes on with the lines that are good.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline import strict_json
from data_pipeline.shards import write_atomic

RUN = "run"  # the field with the id of the run that a line is of; older lines have none


class Line(NamedTuple):
    """One line of a book: its number from 1, its text, the record if it is a good one, and else
    what is wrong with it."""

    number: int
    text: str
    record: dict[str, Any] | None
    problem: str


class Book:
    """One kind of file.

    Args:
        name: of the file in the run's folder.
        fields: what every record has, with its type; `a.b` is b inside a, and `float` takes whole
            numbers, too.
    """

    def __init__(self, name: str, fields: Mapping[str, type]):
        self.name, self._fields = name, fields

    def read(self, folder: Path) -> list[dict[str, Any]]:
        """The records that can be read, in their order; empty if there is no such file."""
        return [line.record for line in self._lines(folder) if line.record is not None]

    def problems(self, folder: Path, run: str = "") -> list[str]:
        """A text about each line that can't be read, or is not of this run (empty: of
        whichever)."""
        found = []
        for line in self._lines(folder):
            if problem := line.problem or _foreign(line.record, run):
                found.append(f"{folder / self.name}:{line.number} {problem}")
        return found

    def mend(self, folder: Path, run: str) -> list[str]:
        """Makes the file one of good lines of this run; a text about what was wrong, and where the
        file as it was is kept."""
        problems = self.problems(folder, run)
        if not problems:
            return []
        path = folder / self.name
        aside = put_aside(path, copy=True)
        good = [
            line.text
            for line in self._lines(folder)
            if line.record and not _foreign(line.record, run)
        ]
        write_atomic(path, "".join(f"{text}\n" for text in good).encode())
        more = f", and {len(problems) - 1:,} lines more" if len(problems) > 1 else ""
        return [
            f"{problems[0]}{more}. The file as it was is kept as {aside.name}; the run goes on without these lines."
        ]

    def _lines(self, folder: Path) -> Iterator[Line]:
        path = folder / self.name
        if not path.exists():
            return
        for number, raw in enumerate(path.read_bytes().split(b"\n"), 1):
            if not raw.strip():
                continue
            text = raw.decode("utf-8", "replace")
            try:
                record = strict_json.loads(raw)
                self._check(record)
            except ValueError as error:
                yield Line(number, text, None, f"is not a record of {self.name} ({error})")
            else:
                yield Line(number, text, record, "")

    def _check(self, record: Any) -> None:
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        for field, kind in self._fields.items():
            value: Any = record
            for part in field.split("."):
                value = value.get(part) if isinstance(value, dict) else None
            if not _is(value, kind):
                raise ValueError(f"{field} must be {_WORDS[kind]}")


_WORDS = {int: "a whole number", float: "a number", str: "a text", dict: "an object"}


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _foreign(record: dict[str, Any] | None, run: str) -> str:
    """What is wrong with a record of another run; empty if it is of this one, or does not say."""
    theirs = (record or {}).get(RUN)
    return f"is of another run, {theirs}" if run and theirs is not None and theirs != run else ""


def put_aside(path: Path, copy: bool = False) -> Path:
    """Renames a file, or copies it, to a name that nothing reads; nothing is deleted."""
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if copy:
        shutil.copyfile(path, aside)
    else:
        path.rename(aside)
    return aside


def encode(record: Mapping[str, Any]) -> str:
    """One line of a book, with its end."""
    return json.dumps(record, allow_nan=False) + "\n"
