"""`maxtrain compare RUN RUN`: show where the numbers of two runs differ, and how the runs differ.
Starts no device.

The exit code is 0 if the numbers are the same, bit for bit, and 70 if not. It is an error only if
nothing in the two configs explains the difference.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DataError, DifferentError, run_command
from maxtrain.checkpoint.listing import saved_digests
from maxtrain.observe.launches import launch_differences, read_launches
from maxtrain.observe.metrics import FILE_NAME, OF_THE_MACHINE, read_metrics, same
from maxtrain.storage.reading import readable
from maxtrain.trainer.run_dir import require_run

# What says which record it is, and what equal runs may differ in.
_NOT_COMPARED = OF_THE_MACHINE | {"kind", "step", "set"}
# Names of arrays, or keys, that are shown.
_MOST = 12
# Columns of a table.
_WIDEST = 1000
# Characters of a digest that are shown.
_SHORT = 12


class FieldComparison(NamedTuple):
    """One number of the records: how often both runs have it, and how they differ."""

    # With the evaluation set in front.
    name: str
    compared: int
    different: int
    # Step and both values.
    first: tuple[int, Any, Any] | None
    # Difference of finite numbers.
    largest: float


class _RecordKey(NamedTuple):
    """Sort key of a record. Records of training come first."""

    is_other: bool
    set_name: str
    step: int
    kind: str


def compare_records(
    ours: list[dict[str, Any]], theirs: list[dict[str, Any]]
) -> list[FieldComparison]:
    """The numbers that two runs have in common, of the steps that both have recorded."""
    of_ours = _by_key(ours)
    of_theirs = _by_key(theirs)
    pairs: dict[str, list[tuple[int, Any, Any]]] = {}
    for key in sorted(of_ours.keys() & of_theirs.keys()):
        x = of_ours[key]
        y = of_theirs[key]
        for name in x:
            if name in y and name not in _NOT_COMPARED:
                field = f"{key.set_name} {name}".strip()
                pairs.setdefault(field, []).append((key.step, x[name], y[name]))
    return [_field(name, values) for name, values in pairs.items()]


def _by_key(records: list[dict[str, Any]]) -> dict[_RecordKey, dict[str, Any]]:
    found = {}
    for record in records:
        kind = record["kind"]
        key = _RecordKey(kind != "train", record.get("set", ""), record["step"], kind)
        found[key] = record
    return found


def _field(name: str, values: list[tuple[int, Any, Any]]) -> FieldComparison:
    different = [(step, x, y) for step, x, y in values if not same(x, y)]
    numbers = []
    for _, x, y in different:
        if isinstance(x, int | float) and isinstance(y, int | float):
            numbers.append(abs(x - y))
    largest = max(filter(math.isfinite, numbers), default=math.nan)
    first = different[0] if different else None
    return FieldComparison(name, len(values), len(different), first, largest)


def compare_arrays(
    ours: dict[int, dict[str, str]], theirs: dict[int, dict[str, str]]
) -> tuple[int, int, list[str]]:
    """Compares the newest step that both runs have saved with digests.

    Returns:
        The step (0: there is none), its number of arrays, and those that differ.
    """
    step = max(ours.keys() & theirs.keys(), default=0)
    x = ours.get(step, {})
    y = theirs.get(step, {})
    names = list(x | y)
    return step, len(names), [name for name in names if x.get(name) != y.get(name)]


def values_in_words(x: Any, y: Any) -> tuple[str, str]:
    """Return two values that differ, as text just long enough to show the difference.

    9 digits distinguish float32 numbers, and the first digits are enough for digests.
    """
    if isinstance(x, float) and isinstance(y, float) and f"{x:.9g}" != f"{y:.9g}":
        return f"{x:.9g}", f"{y:.9g}"
    if isinstance(x, str) and isinstance(y, str) and x[:_SHORT] != y[:_SHORT]:
        return _beginning(x), _beginning(y)
    return str(x), str(y)


def _beginning(text: str) -> str:
    if len(text) <= _SHORT:
        return text
    return f"{text[:_SHORT]}..."


def _listed(names: list[str]) -> str:
    """The first names of a list, and how many there are more."""
    listed = ", ".join(names[:_MOST])
    if len(names) > _MOST:
        listed += f" and {len(names) - _MOST:,} more"
    return listed


def _first_step(field: FieldComparison) -> float:
    """The step at which a number differs first; infinity: at none."""
    if field.first is None:
        return math.inf
    step, _, _ = field.first
    return step


def table_of(fields: list[FieldComparison]) -> Table:
    """A line for each number, those that part first on top. No column is broken over lines."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("number", no_wrap=True)
    for head in ("different", "first at", "A", "B", "largest"):
        table.add_column(head, justify="right", no_wrap=True)
    for field in sorted(fields, key=_first_step):
        count = f"{field.different:,} of {field.compared:,}"
        largest = "-"
        if math.isfinite(field.largest):
            largest = f"{field.largest:.3g}"
        if field.first is None:
            table.add_row(Text(field.name), count, "-", "-", "-", largest)
            continue
        step, x, y = field.first
        table.add_row(Text(field.name), count, f"step {step:,}", *values_in_words(x, y), largest)
    return table


def compare(ours: Path, theirs: Path, console: Console, names: Sequence[str] = ()) -> int:
    """Print what is the same in two runs and what is not.

    Args:
        ours, theirs: the folders of the runs.
        console: to print on.
        names: what to call the runs, such as their URLs; empty: by their folders.

    Returns:
        The exit code: 0, or that of DifferentError if other configs made the numbers differ.

    Raises:
        DifferentError: numbers of the same step differ, with the same config.
        UsageError: one of the folders is not the folder of a run.
        DataError: no step has records in both.
    """
    name_of_ours, name_of_theirs = names or (str(ours), str(theirs))
    for folder, name in ((ours, name_of_ours), (theirs, name_of_theirs)):
        require_run(folder, name)
    records = _read_records(ours, name_of_ours)
    other_records = _read_records(theirs, name_of_theirs)
    fields = compare_records(records, other_records)
    if not fields:
        raise DataError(
            f"{name_of_ours} and {name_of_theirs} have no records of the same step: the first has "
            f"{_steps_in_words(records)}, the second {_steps_in_words(other_records)}. "
            "Compare two runs that have gone through the same steps, with the same log_interval."
        )
    console.print(Text(f"A: {name_of_ours}\nB: {name_of_theirs}"), soft_wrap=True)
    _print_wide(table_of(fields), console)
    first_of_arrays = _print_arrays(ours, theirs, console)
    settings = _print_launches(ours, theirs, console)
    steps = [_first_step(field) for field in fields if field.first]
    first = int(min(steps, default=first_of_arrays))
    if first and settings:
        why = f"The configs differ ({_listed(settings)}), so other numbers are no surprise"
        message = f"{why}. They are not the same from step {first:,} on."
        console.print(Text(message, "yellow"), soft_wrap=True)
        return DifferentError.exit_code
    if first:
        both = f"{name_of_ours} and {name_of_theirs}"
        rule = f"the numbers of {both} are not the same from step {first:,} on"
        window = f"{first - 1}:{first}"
        fix = f"Replay {window} of each with `maxtrain replay` to see which one repeats"
        raise DifferentError(f"{rule}. {fix}.")
    compared = sum(field.compared for field in fields)
    console.print(Text(f"The same bit for bit: {compared:,} numbers.", "green"))
    return 0


def _read_records(run: Path, name: str) -> list[dict[str, Any]]:
    """The records of a run. DataError: it has none yet."""
    records = read_metrics(run)
    if records:
        return records
    what = f"its {FILE_NAME} has none"
    if not (run / FILE_NAME).exists():
        what = f"there is no {FILE_NAME}"
    raise DataError(
        f"{name} has no records to compare: {what}. A run writes its first record after "
        "log_interval steps. Let the run train, or name another run."
    )


def _steps_in_words(records: Sequence[dict[str, Any]]) -> str:
    """The steps that records are of, as a range."""
    steps = [record["step"] for record in records]
    if min(steps) == max(steps):
        return f"step {min(steps):,}"
    return f"steps {min(steps):,} to {max(steps):,}"


def _print_wide(table: Table, console: Console) -> None:
    """Prints a table as wide as it needs be.

    A line that is too long is the terminal's to show; a broken number would be nobody's.
    """
    options = console.options.update(max_width=_WIDEST)
    needed = console.measure(table, options=options).maximum
    console.width = max(console.width, needed)
    console.print(table)


def _print_arrays(ours: Path, theirs: Path, console: Console) -> int:
    """Prints which saved arrays differ; the step that they were saved at, 0 if none differs."""
    step, count, names = compare_arrays(
        saved_digests(ours / "checkpoints"), saved_digests(theirs / "checkpoints")
    )
    if not step:
        console.print(Text("checkpoints: none of the same step, with digests, in both"))
        return 0
    if not names:
        what = f"all {count:,} arrays are the same"
        console.print(Text(f"checkpoints of step {step:,}: {what}"))
        return 0
    what = f"{len(names):,} of {count:,} arrays differ: {_listed(names)}"
    console.print(Text(f"checkpoints of step {step:,}: {what}"))
    return step


def _print_launches(ours: Path, theirs: Path, console: Console) -> list[str]:
    """Prints what the last launches differ in; the keys of their configs among that."""
    of_ours = read_launches(ours)
    of_theirs = read_launches(theirs)
    if not of_ours or not of_theirs:
        return []
    differences = launch_differences(of_ours[-1], of_theirs[-1])
    text = "launched alike"
    if differences:
        lines = [f"\n  {name}: {x} and {y}" for name, (x, y) in differences.items()]
        text = f"the last launches differ in{''.join(lines)}"
    console.print(Text(text), soft_wrap=True)
    return [name.removeprefix("config.") for name in differences if name.startswith("config.")]


def main(argv: Sequence[str], prog: str = "maxtrain compare") -> int:
    """Runs the command.

    Returns:
        The exit code: 0 for the same, 70 for different, also where other configs explain it.
    """
    parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "runs", nargs=2, metavar="RUN", help="folder of a run, such as runs/quickstart, or its URL"
    )
    code = 0

    def job() -> None:
        nonlocal code
        names = parser.parse_args(argv).runs
        ours, theirs = map(readable, names)
        code = compare(ours, theirs, SafeConsole(), names)

    failed = run_command(job, resumes=False)
    return failed or code
