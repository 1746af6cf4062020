"""`maxtrain checkpoint list|show|verify|copy|prune DIR`: the checkpoints of a run, looked at and
kept. Starts no device.

DIR is a run, such as runs/quickstart, or its folder `checkpoints`; for `show` and `verify` also one
step in it.
"""

import argparse
import contextlib
import json
import math
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.errors import DamagedError, StorageError, UsageError, run_command
from maxtrain.checkpoint.copying import copy_step, remove_step
from maxtrain.checkpoint.finite import find_non_finite
from maxtrain.checkpoint.integrity import FORMAT, defect, find_damage, read_commit, survey
from maxtrain.checkpoint.listing import read_record
from maxtrain.observe.lock import RunLock

_MOST_LISTED, _LONGEST = 8, 300  # entries of a list, and characters of a value, that are shown


def open_directory(directory: Path) -> tuple[Path, list[Path]]:
    """The folder of checkpoints and the steps meant, ascending: those of a run or folder, whole or
    not, or one alone.

    UsageError: there is none.
    """
    directory = directory.expanduser().absolute()
    if directory.name.isdecimal() and directory.is_dir():
        return directory.parent, [directory]
    folder = directory / "checkpoints" if (directory / "checkpoints").is_dir() else directory
    steps = [folder / f"{step:08d}" for step in survey(folder)]
    if not steps:
        raise UsageError(
            f"DIR={directory} has no checkpoints. Name a run, such as runs/quickstart, or its folder checkpoints."
        )
    return folder, steps


def size(path: Path) -> int:
    """Bytes of all files of a step."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def make_table(*heads: str) -> Table:
    """With numbers to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        table.add_column(
            head, justify="right" if head in ("step", "MB") else "left", overflow="fold"
        )
    return table


def show_list(directory: Path, console: Console) -> None:
    """A line for each step: when it was made, how large it is, whether it counts, of which
    evaluations it is the best."""
    folder, steps = open_directory(directory)
    table = make_table("step", "date", "MB", "state", "best of")
    whole = {path: not defect(path) for path in steps}
    records = {path: read_record(path) for path in steps if whole[path]}
    best = max(records.items(), default=(None, {}))[1].get(
        "best", {}
    )  # the newest knows of all before it
    put_aside = [
        path
        for path in sorted(folder.glob("*.damaged-*"))
        if path.name.partition(".")[0].isdecimal()
    ]
    for path in [*steps, *put_aside]:
        step = int(path.name.partition(".")[0])
        made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
        why = "put aside" if path not in whole else defect(path)
        state = Text(why or "whole", "red" if why else "green")
        of = ", ".join(
            name for name, mark in best.items() if whole.get(path) and mark["step"] == step
        )
        table.add_row(f"{step:,}", made, f"{size(path) / 1e6:,.1f}", state, of)
    console.print(table)
    console.print(
        f"{sum(whole.values())} whole of {len(steps)}; their sizes are checked here, their bytes by verify.",
        style="dim",
    )


def newest(steps: Sequence[Path], step: int | None) -> Path:
    """The step asked for, or the newest whole one; DamagedError: it is not whole. UsageError: there
    is no such step."""
    named = [path for path in steps if step is None or int(path.name) == step]
    if not named:
        known = ", ".join(str(int(path.name)) for path in steps)
        raise UsageError(f"--step={step}: there is no such checkpoint. Use one of {known}.")
    whole = [path for path in named if not defect(path)]
    if not whole:
        raise DamagedError(named[-1], defect(named[-1]))
    return whole[-1]


def in_words(value: Any) -> str:
    """A value of a record as a person reads it, on one line; long lists as how many there are."""
    if isinstance(value, dict):
        return ", ".join(f"{name} {in_words(inner)}" for name, inner in value.items()) or "none"
    if isinstance(value, list) and (
        len(value) > _MOST_LISTED or any(isinstance(inner, list | dict) for inner in value)
    ):
        return f"{len(value):,} entries" if value else "none"
    if isinstance(value, list):
        return " ".join(map(in_words, value)) or "none"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def show_step(directory: Path, step: int | None, console: Console, raw: bool = False) -> None:
    """What one step holds: its record, and every array with shape, type, bytes and digest; `raw`:
    as the files have it."""
    path = newest(open_directory(directory)[1], step)
    commit, record = read_commit(path), read_record(path)
    if raw:
        print(json.dumps({"path": str(path), "commit": commit, "record": record}))
        return
    made = ", ".join(f"{name} {version}" for name, version in commit["versions"].items())
    console.print(f"{path}\nformat {commit['format']}, by {made}\n", soft_wrap=True)
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in record.items():
        if name in (
            "config",
            "digests",
        ):  # one has a file of its own, older ones have the other here as well
            continue
        parts = (
            value
            if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values())
            else None
        )
        for part, inner in (parts or {"": value}).items():
            label = f"{name} {part}".strip().replace("_", " ")
            text = in_words(inner)
            rows.add_row(
                Text(label), Text(text if len(text) <= _LONGEST else text[:_LONGEST] + " ...")
            )
    console.print(rows)
    console.print()
    table = make_table("array", "type", "shape", "MB", "digest")
    total = 0
    for name, array in commit["arrays"].items():
        count = math.prod(array["shape"]) * item_bytes(array["dtype"])
        total += count
        shape = " x ".join(f"{n:,}" for n in array["shape"])
        table.add_row(
            Text(name), array["dtype"], shape, f"{count / 1e6:,.3f}", array.get("digest", "")
        )
    console.print(table)
    console.print(
        f"{len(commit['arrays']):,} arrays, {total / 1e6:,.1f} MB; {size(path) / 1e6:,.1f} MB on the disk"
    )


def item_bytes(dtype: str) -> int:
    """Bytes of a number; a random key's are not known by its type's name."""
    bits = re.search(r"(\d+)", dtype)
    return (
        1
        if dtype == "bool" or dtype.startswith("float8")
        else int(bits[1]) // 8
        if bits and "key" not in dtype
        else 0
    )


def check(path: Path) -> str:
    """What is wrong with a step, every byte read; empty if nothing is."""
    why = defect(path)
    if why:
        return why
    commit = read_commit(path)
    if commit["format"] > FORMAT:
        raise StorageError(
            f"{path} has format {commit['format']}; this version reads up to {FORMAT}. Upgrade maxtrain."
        )
    return find_damage(path, commit["files"]) or find_non_finite(path, commit)


def verify(directory: Path, console: Console) -> None:
    """Reads all steps; DamagedError: one is not what was saved."""
    bad = []
    for path in open_directory(directory)[1]:
        begin, why = time.monotonic(), check(path)
        if why:
            bad.append((path, why))
        hashed = not why and read_commit(path)["format"] > 1
        told = why or (
            "all hashes are those of what was saved"
            if hashed
            else "sizes only: an older version saved no hashes"
        )
        rate = size(path) / max(1e-9, time.monotonic() - begin) / 1e9
        console.print(
            Text(f"{path.name}: {told} ({rate:.1f} GB/s)", "red" if why else "green"),
            soft_wrap=True,
        )
    if bad:
        raise DamagedError(*bad[0])


def copy(directory: Path, target: Path, step: int | None, console: Console) -> None:
    """Copies one step, whole or not at all; checked before and after."""
    path, target = newest(open_directory(directory)[1], step), target.expanduser().absolute()
    if (target / path.name).exists():
        raise UsageError(f"TO={target / path.name} exists. Name another directory, or remove it.")
    final = copy_step(path, target, read_back=True)
    console.print(f"{path} is copied to {final} and checked.", soft_wrap=True)


def prune(
    directory: Path, keep: int, keep_every: int | None, apply: bool, console: Console
) -> None:
    """Removes whole steps but for the newest, every Nth and the best of each evaluation; without
    `apply` only says so.

    Removing takes the run's lock, so that nothing is removed that a training beside it goes by.

    LockedError: such a training runs.
    """
    folder, _ = open_directory(directory)
    run = folder.parent if folder.name == "checkpoints" else folder
    with RunLock(run) if apply else contextlib.nullcontext():
        _prune(directory, keep, keep_every, apply, console)


def _prune(
    directory: Path, keep: int, keep_every: int | None, apply: bool, console: Console
) -> None:
    steps = [path for path in open_directory(directory)[1] if not defect(path)]
    best = {
        mark["step"] for mark in (read_record(steps[-1]).get("best", {}) if steps else {}).values()
    }
    kept = {
        path
        for path in steps
        if int(path.name) in best or (keep_every and int(path.name) % keep_every == 0)
    }
    going = [path for path in steps[:-keep] if path not in kept]
    if apply and going and (why := check(steps[-1])):
        raise DamagedError(steps[-1], f"{why}, so nothing is removed")
    for path in going:
        console.print(
            f"{'removes' if apply else 'would remove'} {path.name}, {size(path) / 1e6:,.1f} MB",
            soft_wrap=True,
        )
        if apply:
            remove_step(path)
    rest = "" if apply or not going else " Nothing is removed without --apply."
    console.print(
        f"{len(going)} of {len(steps)} whole steps {'are removed' if apply else 'would go'}.{rest}"
    )


def main(argv: Sequence[str] | None = None, program: str | None = None) -> int:
    """Runs the command; the exit code: 74 for damage."""
    parser = argparse.ArgumentParser(
        program, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    about = {
        "list": "a table of all steps",
        "show": "record and arrays of one step",
        "verify": "read every byte of every step; ends with 74 if one is damaged",
        "copy": "copy one step to another directory, checked on both sides",
        "prune": "remove old steps, never the newest, nor the best of an evaluation; only says so without --apply",
    }
    for verb, text in about.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        sub.add_argument(
            "directory", metavar="DIR", type=Path, help="a run, or its folder checkpoints"
        )
        if verb == "copy":
            sub.add_argument("to", metavar="TO", type=Path, help="folder that gets the step")
        if verb == "show":
            sub.add_argument("--json", action="store_true", help="all of it, as it is in the files")
        if verb in ("show", "copy"):
            sub.add_argument("--step", type=int, metavar="N", help="default: the newest whole one")
        if verb == "prune":
            sub.add_argument(
                "--keep",
                type=int,
                default=3,
                metavar="K",
                help="newest steps kept (default: %(default)s)",
            )
            sub.add_argument(
                "--keep-every",
                type=int,
                metavar="N",
                help="also keep steps that are a multiple of this",
            )
            sub.add_argument("--apply", action="store_true", help="remove them")

    def job() -> None:
        asked, console = parser.parse_args(argv), Console(highlight=False, markup=False)
        for name, low in (("step", 0), ("keep", 1), ("keep_every", 1)):
            value = getattr(asked, name, None)
            if value is not None and value < low:
                option = f"--{name.replace('_', '-')}"
                raise UsageError(
                    f"{option}={value} must be at least {low}. Use {option} {low} or more."
                )
        if asked.verb == "list":
            show_list(asked.directory, console)
        elif asked.verb == "show":
            show_step(asked.directory, asked.step, console, asked.json)
        elif asked.verb == "verify":
            verify(asked.directory, console)
        elif asked.verb == "copy":
            copy(asked.directory, asked.to, asked.step, console)
        else:
            prune(asked.directory, asked.keep, asked.keep_every, asked.apply, console)

    return run_command(job, resumes=False)
