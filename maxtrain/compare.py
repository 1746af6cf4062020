"""`maxtrain compare RUN RUN`: where the numbers of two runs part, and what was not the same about
them. Starts no device.

Ends with 0 if they are the same, bit for bit, and with 70 if not: with an error if nothing in their
configs says why, without one if their configs differ.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.errors import DataError, DifferentError, run_command
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.observe.launches import launch_differences, read_launches
from maxtrain.observe.metrics import read_metrics, same

_OF_THE_CLOCK = re.compile(r".*second.*|mfu\w*|kind|step|set")
_MOST = 12  # names of arrays, or keys, that are shown
_WIDEST = 1000  # columns of a table
_SHORT = 12  # characters of a digest that are shown


class Field(NamedTuple):
    """One number of the records: how often both runs have it, and how they differ."""

    name: str  # with the evaluation set in front
    compared: int
    different: int
    first: tuple[int, Any, Any] | None  # step and both values
    largest: float  # difference of finite numbers


def compare_records(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> list[Field]:
    """The numbers that two runs have in common, of the steps that both have recorded."""
    a, b = (
        {(r["kind"], r.get("set", ""), r["step"]): r for r in records} for records in (ours, theirs)
    )
    pairs: dict[str, list[tuple[int, Any, Any]]] = {}
    for key in sorted(a.keys() & b.keys(), key=lambda key: (key[0] != "train", *key[1:])):
        for name in a[key]:
            if name in b[key] and not _OF_THE_CLOCK.fullmatch(name):
                pairs.setdefault(f"{key[1]} {name}".strip(), []).append(
                    (key[2], a[key][name], b[key][name])
                )
    return [_field(name, values) for name, values in pairs.items()]


def _field(name: str, values: list[tuple[int, Any, Any]]) -> Field:
    different = [value for value in values if not same(*value[1:])]
    numbers = [
        abs(x - y)
        for _, x, y in different
        if isinstance(x, int | float) and isinstance(y, int | float)
    ]
    largest = max(filter(math.isfinite, numbers), default=math.nan)
    return Field(name, len(values), len(different), different[0] if different else None, largest)


def compare_arrays(
    ours: dict[int, dict[str, str]], theirs: dict[int, dict[str, str]]
) -> tuple[int, int, list[str]]:
    """The newest step that both runs have saved with digests (0: none), its number of arrays, and
    those that differ."""
    step = max(ours.keys() & theirs.keys(), default=0)
    x, y = ours.get(step, {}), theirs.get(step, {})
    return step, len(x | y), [name for name in x | y if x.get(name) != y.get(name)]


def values_in_words(x: Any, y: Any) -> tuple[str, str]:
    """Two values that differ, as short as shows it: 9 digits tell numbers of float32 apart, and
    digests have no need of all."""
    if isinstance(x, float) and isinstance(y, float) and f"{x:.9g}" != f"{y:.9g}":
        return f"{x:.9g}", f"{y:.9g}"
    if isinstance(x, str) and isinstance(y, str) and x[:_SHORT] != y[:_SHORT]:
        return _beginning(x), _beginning(y)
    return str(x), str(y)


def _beginning(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def table_of(fields: list[Field]) -> Table:
    """A line for each number, those that part first on top. No column is broken over lines."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in ("number", "different", "first at", "A", "B", "largest"):
        table.add_column(head, justify="left" if head == "number" else "right", no_wrap=True)
    for field in sorted(fields, key=lambda field: field.first[0] if field.first else math.inf):
        count = f"{field.different:,} of {field.compared:,}"
        largest = f"{field.largest:.3g}" if math.isfinite(field.largest) else "-"
        if field.first is None:
            table.add_row(Text(field.name), count, "-", "-", "-", largest)
            continue
        step, x, y = field.first
        table.add_row(Text(field.name), count, f"step {step:,}", *values_in_words(x, y), largest)
    return table


def compare(ours: Path, theirs: Path, console: Console) -> int:
    """Prints what is the same in two runs and what is not; the exit code: that of DifferentError if
    other configs made them so.

    Raises:
        DifferentError: numbers of the same step differ, with the same config. DataError: no step
            has records in both.
    """
    fields = compare_records(read_metrics(ours), read_metrics(theirs))
    if not fields:
        mend = "Compare two runs that have gone through the same steps, with log_interval in common"
        raise DataError(f"{ours} and {theirs} have no records of the same step. {mend}.")
    console.print(Text(f"A: {ours}\nB: {theirs}"), soft_wrap=True)
    table = table_of(fields)
    needed = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    console.width = max(
        console.width, needed
    )  # a line that is too long is the terminal's to show, a broken number nobody's
    console.print(table)
    step, arrays, names = compare_arrays(
        *(saved_digests(run / "checkpoints") for run in (ours, theirs))
    )
    if step:
        listed = ", ".join(names[:_MOST]) + (
            f" and {len(names) - _MOST:,} more" if len(names) > _MOST else ""
        )
        words = (
            f"{len(names):,} of {arrays:,} arrays differ: {listed}"
            if names
            else f"all {arrays:,} arrays are the same"
        )
        console.print(Text(f"checkpoints of step {step:,}: {words}"))
    else:
        console.print(Text("checkpoints: none of the same step, with digests, in both"))
    launches = [read_launches(run) for run in (ours, theirs)]
    settings: list[str] = []
    if all(launches):
        differences = launch_differences(launches[0][-1], launches[1][-1])
        lines = [f"{name}: {x} and {y}" for name, (x, y) in differences.items()]
        settings = [
            name.removeprefix("config.") for name in differences if name.startswith("config.")
        ]
        text = (
            "\n".join(["the last launches differ in", *(f"  {line}" for line in lines)])
            if lines
            else "launched alike"
        )
        console.print(Text(text), soft_wrap=True)
    first = min((field.first[0] for field in fields if field.first), default=step if names else 0)
    if first and settings:
        listed = ", ".join(settings[:_MOST]) + (
            f" and {len(settings) - _MOST:,} more" if len(settings) > _MOST else ""
        )
        said = f"The configs differ ({listed}), so other numbers are no surprise. They are not the same from step {first:,} on."
        console.print(Text(said, "yellow"), soft_wrap=True)
        return DifferentError.exit_code
    if first:
        rule = f"the numbers of {ours} and {theirs} are not the same from step {first:,} on"
        raise DifferentError(
            f"{rule}. Replay {first - 1:,}:{first:,} of each with `maxtrain replay` to see which one repeats."
        )
    console.print(
        Text(f"The same bit for bit: {sum(field.compared for field in fields):,} numbers.", "green")
    )
    return 0


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Runs the command; the exit code: 0 for the same, 70 for different, also where other configs
    explain it."""
    parser = argparse.ArgumentParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", type=Path, nargs=2, metavar="RUN", help="folder of a run, such as runs/quickstart"
    )

    codes: list[int] = []

    def job() -> None:
        ours, theirs = parser.parse_args(argv).runs
        codes.append(compare(ours, theirs, Console(highlight=False)))

    failed = run_command(job, resumes=False)
    return failed or sum(codes)
