"""Files of JSON lines that a run keeps about itself: launches, the clock, attempts. No run stops
because of them.

Readers leave out lines that can't be read or belong to another run. If there are such lines,
training first keeps a copy of the whole file, and then goes on with the good lines alone.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base import strict_json
from data_pipeline.shards import write_atomic

# The field with the id of the run that a line belongs to; older lines have none.
RUN = "run"


class LogLine(NamedTuple):
    """One line of a book."""

    # Counted from 1.
    number: int
    text: str
    # None: the line can't be read.
    record: dict[str, Any] | None
    # Why it can't be read; empty: it can.
    problem: str


class JsonlLog:
    """One kind of file.

    Args:
        name: of the file in the run's folder.
        fields: what every record has, with its type; `a.b` is b inside a, and `float` takes whole
            numbers, too.
    """

    def __init__(self, name: str, fields: Mapping[str, type]):
        self.name = name
        self._fields = fields

    def read(self, folder: Path) -> list[dict[str, Any]]:
        """The records that can be read, in their order; empty if there is no such file."""
        return [line.record for line in self._lines(folder) if line.record is not None]

    def problems(self, folder: Path, run: str = "") -> list[str]:
        """A sentence for each line that can't be read, or belongs to another run.

        Args:
            folder: of the run.
            run: its id; empty: lines of any run are good.
        """
        found = []
        for line in self._lines(folder):
            problem = line.problem
            if line.record is not None:
                problem = _foreign(line.record, run)
            if problem:
                found.append(f"{folder / self.name}:{line.number} {problem}")
        return found

    def fix(self, folder: Path, run: str) -> list[str]:
        """Leaves only the good lines of this run in the file, after a copy of it was kept.

        Returns:
            A text that says what was wrong and where the copy is; empty if nothing was wrong.
        """
        problems = self.problems(folder, run)
        if not problems:
            return []
        path = folder / self.name
        aside = put_aside(path, copy=True)
        good = []
        for line in self._lines(folder):
            if line.record and not _foreign(line.record, run):
                good.append(f"{line.text}\n")
        write_atomic(path, "".join(good).encode(), private=True)
        more = ""
        if len(problems) > 1:
            more = f", and {len(problems) - 1:,} lines more"
        return [
            f"{problems[0]}{more}. The file as it was is kept as {aside.name}; the run goes on "
            "without these lines."
        ]

    def _lines(self, folder: Path) -> Iterator[LogLine]:
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
                yield LogLine(number, text, None, f"is not a record of {self.name} ({error})")
            else:
                yield LogLine(number, text, record, "")

    def _check(self, record: Any) -> None:
        if not isinstance(record, dict):
            raise ValueError("it is no JSON object")
        for field, kind in self._fields.items():
            value: Any = record
            for part in field.split("."):
                if isinstance(value, dict):
                    value = value.get(part)
                else:
                    value = None
            if not _is(value, kind):
                raise ValueError(f"{field} must be {_WORDS[kind]}")


_WORDS = {int: "a whole number", float: "a number", str: "a text", dict: "an object"}


def _is(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return False
    if kind is float:
        return isinstance(value, int | float) and math.isfinite(value)
    return isinstance(value, kind)


def _foreign(record: dict[str, Any], run: str) -> str:
    """Return the problem with a record of another run; empty if it belongs to this one, or does
    not say which one.
    """
    theirs = record.get(RUN)
    if not run or theirs is None or theirs == run:
        return ""
    return f"is of another run, {theirs}"


def put_aside(path: Path, copy: bool = False) -> Path:
    """Renames a file, or copies it, to a name that nothing reads.

    Returns:
        The new path.
    """
    aside = path.with_name(f"{path.name}.damaged-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    if copy:
        shutil.copy(path, aside)
    else:
        path.rename(aside)
    return aside


def encode(record: Mapping[str, Any]) -> str:
    """One line of a book, with its newline."""
    return json.dumps(record, allow_nan=False) + "\n"
