"""`maxtrain checkpoint list|show|verify|copy|prune DIR`: the checkpoints of a run, looked at and
kept. Starts no device.

DIR is a run, such as runs/quickstart, or its folder `checkpoints`; for `show` and `verify` also one
step in it. A run may be behind a URL, such as s3://bucket/runs/quickstart.
"""

import argparse
import contextlib
import json
import math
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from data_pipeline.base.console import SafeConsole
from data_pipeline.base.errors import DamagedError, StorageError, UsageError, run_command
from data_pipeline.base.remote import is_url
from maxtrain.checkpoint.at_url import drop_arrays, fetch, home_of, url_of
from maxtrain.checkpoint.at_url import remove as remove_at_url
from maxtrain.checkpoint.copying import copy_step, half_removed, remove_step
from maxtrain.checkpoint.finite import find_non_finite
from maxtrain.checkpoint.frozen_params import (
    FOLDER,
    KEY,
    advice,
    copy_frozen,
    frozen_of,
    is_store,
    lack,
    stores,
)
from maxtrain.checkpoint.integrity import FORMAT, defect, find_damage, read_commit, survey
from maxtrain.checkpoint.listing import read_record
from maxtrain.checkpoint.run_state import RunState, best_steps, run_of
from maxtrain.observe.lock import RunLock
from maxtrain.storage.lease import Lease
from maxtrain.storage.reading import readable, require_no_url, split_run
from maxtrain.storage.records import copied_from
from maxtrain.trainer.forks import copy_run, newest_that_fits
from maxtrain.trainer.run_dir import CONFIG, run_id

# Entries of a list that are shown.
_MOST_LISTED = 8
# Characters of a value that are shown.
_LONGEST = 300
# Fields of a record that are not shown: the config has a file of its own, and older versions have
# the digests here as well.
_NOT_SHOWN = ("config", "digests")
# Begins what is wrong with a step whose own files are whole.
_LACKS = "its frozen parameters"


def directory_of(text: str) -> Path:
    """The argument DIR; of a run behind a URL, a copy whose arrays come when they are read."""
    if is_url(text):
        return readable(text.rstrip("/").removesuffix("/checkpoints"))
    return Path(text)


def open_directory(directory: Path) -> tuple[Path, list[Path]]:
    """The folder of checkpoints and the steps meant, ascending.

    These are those of a run or folder, whole or not, or one alone. UsageError: there is none.
    """
    directory = directory.expanduser().absolute()
    folder = directory
    # A run may have a number as its name, as steps do.
    if (directory / "checkpoints").is_dir():
        folder = directory / "checkpoints"
    elif directory.name.isdecimal() and directory.is_dir():
        return directory.parent, [directory]
    steps = [folder / f"{step:08d}" for step in survey(folder)]
    if not steps:
        fix = "Name a run, such as runs/quickstart, or its folder checkpoints"
        raise UsageError(f"DIR={directory} has no checkpoints. {fix}.")
    return folder, steps


def size(path: Path) -> int:
    """Bytes of all files of a step, wherever they are."""
    if url_of(path) is not None and not defect(path):
        return sum(entry["bytes"] for entry in read_commit(path)["files"].values())
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def make_table(*heads: str) -> Table:
    """Make a table with its numbers aligned to the right."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for head in heads:
        justify = "left"
        if head in ("step", "MB"):
            justify = "right"
        table.add_column(head, justify=justify, overflow="fold")
    return table


def show_list(directory: Path, console: Console) -> None:
    """A line for each step.

    It says when the step was made, how large it is, whether it counts, and of which evaluations it
    is the best.
    """
    folder, steps = open_directory(directory)
    table = make_table("step", "date", "MB", "state", "best of")
    defects = {path: defect(path) for path in steps}
    records = {path: read_record(path) for path in steps if not defects[path]}
    # The newest knows of all before it.
    best = {}
    if records:
        best = best_steps(records[max(records)])
    for path in steps:
        why = defects[path]
        marks: list[str] = []
        if not why:
            marks = [name for name, step in best.items() if step == int(path.name)]
        table.add_row(*_cells(path, why, marks))
    for path in sorted(folder.glob("*.damaged-*")):
        if _step_of(path).isdecimal():
            table.add_row(*_cells(path, "put aside", []))
    console.print(table)
    for frozen in stores(folder):
        megabytes = f"{size(frozen) / 1e6:,.1f} MB"
        state = Text(defect(frozen) or "whole", "red" if defect(frozen) else "green")
        console.print(Text(f"frozen parameters, of all steps: {megabytes}, ") + state)
    how = "their sizes are checked here, their bytes by verify"
    console.print(f"{len(records)} whole of {len(steps)}; {how}.", style="dim")


def _step_of(path: Path) -> str:
    """The number at the beginning of a step's name, which it keeps when it is put aside."""
    number, _, _ = path.name.partition(".")
    return number


def _cells(path: Path, why: str, best_of: Sequence[str]) -> tuple[str | Text, ...]:
    """A step in the list; `why`: why it does not count, empty if it does."""
    made = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(path.stat().st_mtime))
    # The time of the copy says nothing.
    if url_of(path) is not None:
        made = "-"
    state = Text("whole", "green")
    if why:
        state = Text(why, "red")
    step = int(_step_of(path))
    return f"{step:,}", made, f"{size(path) / 1e6:,.1f}", state, ", ".join(best_of)


def newest(steps: Sequence[Path], step: int | None) -> Path:
    """Return the requested step, or the newest complete one.

    Raises:
        DamagedError: it is not whole.
        UsageError: there is no such step.
    """
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
    if isinstance(value, list):
        nested = any(isinstance(inner, list | dict) for inner in value)
        if nested or len(value) > _MOST_LISTED:
            return f"{len(value):,} entries"
        return " ".join(map(in_words, value)) or "none"
    if value is None or value == "":
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value)


def show_step(directory: Path, step: int | None, console: Console, raw: bool = False) -> None:
    """Print the contents of one step: its record, and every array with shape, type, bytes and
    digest.

    `raw`: as the files have it.
    """
    _, steps = open_directory(directory)
    path = newest(steps, step)
    commit = read_commit(path)
    record = read_record(path)
    if raw:
        print(json.dumps({"path": str(path), "commit": commit, "record": record}))
        return
    made = ", ".join(f"{name} {version}" for name, version in commit["versions"].items())
    console.print(f"{path}\nformat {commit['format']}, by {made}\n", soft_wrap=True)
    console.print(_table_of_record(record))
    console.print()
    _print_arrays(path, commit, console)
    frozen = frozen_of(path, commit)
    if frozen is not None:
        console.print(f"\nfrozen, in {frozen.path}\n", soft_wrap=True)
        _print_arrays(frozen.path, frozen.commit, console)


def _table_of_record(record: dict[str, Any]) -> Table:
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(no_wrap=True)
    rows.add_column(overflow="fold")
    for name, value in record.items():
        if name in _NOT_SHOWN:
            continue
        # What has parts of its own is shown part by part.
        parts = {"": value}
        if isinstance(value, dict) and any(isinstance(inner, dict) for inner in value.values()):
            parts = value
        for part, inner in parts.items():
            label = f"{name} {part}".strip().replace("_", " ")
            text = in_words(inner)
            if len(text) > _LONGEST:
                text = f"{text[:_LONGEST]} ..."
            rows.add_row(Text(label), Text(text))
    return rows


def _print_arrays(path: Path, commit: dict[str, Any], console: Console) -> None:
    table = make_table("array", "type", "shape", "MB", "digest")
    total = 0
    for name, array in commit["arrays"].items():
        count = math.prod(array["shape"]) * item_bytes(array["dtype"])
        total += count
        shape = " x ".join(f"{n:,}" for n in array["shape"])
        megabytes = f"{count / 1e6:,.3f}"
        table.add_row(Text(name), array["dtype"], shape, megabytes, array.get("digest", ""))
    console.print(table)
    on_disk = f"{size(path) / 1e6:,.1f} MB on the disk"
    console.print(f"{len(commit['arrays']):,} arrays, {total / 1e6:,.1f} MB; {on_disk}")


def item_bytes(dtype: str) -> int:
    """Bytes of a number; a random key's are not known by its type's name."""
    if dtype == "bool" or dtype.startswith("float8"):
        return 1
    bits = re.search(r"(\d+)", dtype)
    if bits and "key" not in dtype:
        return int(bits[1]) // 8
    return 0


def check(path: Path) -> str:
    """Return the problem with a step, every byte read; empty if there is none."""
    why = defect(path)
    if why:
        return why
    commit = read_commit(path)
    if commit["format"] > FORMAT:
        rule = f"has format {commit['format']}; this version reads up to {FORMAT}"
        raise StorageError(f"{path} {rule}. Upgrade maxtrain.")
    if KEY in commit:
        lacking = lack(path.parent, commit[KEY])
        if lacking:
            return f"{_LACKS}: {lacking}"
    try:
        fetch(path, commit["files"], commit["files"])
    except DamagedError as damage:
        return damage.what
    try:
        return find_damage(path, commit["files"]) or find_non_finite(path, commit)
    finally:
        # There may be no room for all steps.
        drop_arrays(path)


def verify(directory: Path, console: Console) -> None:
    """Reads all steps; DamagedError: one is not what was saved."""
    bad = []
    folder, steps = open_directory(directory)
    steps = [*stores(folder), *steps]
    for path in steps:
        begin = time.monotonic()
        result = check(path)
        color = "red"
        if result:
            bad.append((path, result))
        else:
            color = "green"
            result = "all hashes are those of what was saved"
        rate = size(path) / max(1e-9, time.monotonic() - begin) / 1e9
        name = path.name
        if is_store(path):
            name = f"{FOLDER} {path.parent.name}"
        console.print(Text(f"{name}: {result} ({rate:.1f} GB/s)", color), soft_wrap=True)
    if bad:
        path, why = bad[0]
        fix = ""
        if is_store(path) or why.startswith(_LACKS):
            fix = advice(folder)
        raise DamagedError(path, why, fix)


def copy(named: str, target: Path, step: int | None, console: Console) -> None:
    """Makes a run that continues from a step of another one, whole or not at all; checked before
    and after. Into a folder `checkpoints`, it copies the step alone.

    Args:
        named: the run, its folder of checkpoints or one step, or the URL of the run.
        target: the folder of the new run, or the folder `checkpoints` of a run.
        step: None: the newest one that is whole and that no rollback has taken back.
        console: to print on.

    Raises:
        UsageError: there is something at `target`, or it belongs to another run.
        DamagedError: the step is not what was saved.
        StorageError: the copy is not like it, or something can't be read or written.
    """
    require_no_url(target, "TO", "A run at a URL can begin with checkpoint.fork_from=RUN@STEP")
    _, steps = open_directory(directory_of(named))
    path = newest(steps, step)
    target = target.expanduser().absolute()
    if target.name == "checkpoints":
        _copy_step_alone(path, target, console)
        return
    if step is None and len(steps) > 1:
        path = newest_that_fits(path)
    run, _, _ = split_run(named)
    place = run or named
    notes = copy_run(f"copy {named}", place, path, target)
    for note in notes:
        console.print(note, style="yellow", soft_wrap=True, markup=False)
    console.print(
        f"{target} is a run with step {int(path.name):,} of {place}, copied and checked.",
        soft_wrap=True,
        markup=False,
    )
    then = f"continue it: maxtrain train config={shlex.quote(os.path.relpath(target / CONFIG))}"
    # The other run may have removed its checkpoint by now.
    copied = target / "checkpoints" / path.name
    if RunState.from_record(read_record(copied)).imported is not None:
        then = f"train with it: checkpoint.init_from={shlex.quote(os.path.relpath(target))}"
    console.print(then, soft_wrap=True, markup=False)


def _copy_step_alone(path: Path, target: Path, console: Console) -> None:
    """Copies one step into the folder of checkpoints of a run.

    UsageError: it is there, or is of another run than the folder.
    """
    theirs = run_id(target.parent)
    ours = run_of(read_record(path))
    if theirs and ours and theirs != ours:
        raise UsageError(
            f"TO={target} belongs to run {theirs}, and {path} to run {ours}, which no launch would "
            "accept. Name a run that is not there yet as TO."
        )
    if (target / path.name).exists():
        raise UsageError(f"TO={target / path.name} exists. Name another directory, or remove it.")
    copy_frozen(path, target, read_back=True)
    final = copy_step(path, target, read_back=True)
    console.print(f"{path} is copied to {final} and checked.", soft_wrap=True)


def prune(
    directory: Path, keep: int, keep_every: int | None, apply: bool, console: Console
) -> None:
    """Removes whole steps but for the newest, every Nth and the best of each evaluation, and what
    an interrupted removal has left.

    Without `apply` it only says so. Removing takes the run's lock, so that nothing is removed that
    a training beside it goes by. LockedError: such a training runs.
    """
    folder, _ = open_directory(directory)
    if not apply:
        going, steps = _superfluous(directory, keep, keep_every)
        left = half_removed(folder)
        for path in [*left, *going]:
            _print_removal("would remove", path, console)
        rest = ""
        if left or going:
            rest = " Nothing is removed without --apply."
        console.print(f"{len(going)} of {len(steps)} whole steps would go.{rest}")
        return
    run = folder
    if folder.name == "checkpoints":
        run = folder.parent
    with _locked(run, console):
        for path in half_removed(folder):
            _print_removal("removes", path, console)
            shutil.rmtree(path)
        going, steps = _superfluous(directory, keep, keep_every)
        if going:
            why = check(steps[-1])
            if why:
                raise DamagedError(steps[-1], f"{why}, so nothing is removed")
        for path in going:
            _print_removal("removes", path, console)
            url = url_of(path)
            if url is not None:
                remove_at_url(url)
            remove_step(path)
        console.print(f"{len(going)} of {len(steps)} whole steps are removed.")


@contextlib.contextmanager
def _locked(run: Path, console: Console) -> Iterator[None]:
    """Keeps trainings away from a run, or from the one behind a URL that this is a copy of."""
    home = home_of(run / "checkpoints")
    if home is None:
        url = copied_from(run)
        if url is not None:
            raise UsageError(f"DIR={run}: is a copy of {url}. Name that URL if it is your own run.")
        with RunLock(run):
            yield
        return
    lease = Lease(home.parent, console.print)
    try:
        yield
    finally:
        lease.free()


def _print_removal(verb: str, path: Path, console: Console) -> None:
    console.print(f"{verb} {path.name}, {size(path) / 1e6:,.1f} MB", soft_wrap=True)


def _superfluous(
    directory: Path, keep: int, keep_every: int | None
) -> tuple[list[Path], list[Path]]:
    """The whole steps that are not to be kept, and all whole ones."""
    _, found = open_directory(directory)
    steps = [path for path in found if not defect(path)]
    best = {}
    if steps:
        best = best_steps(read_record(steps[-1]))
    kept = set(best.values())
    going = []
    for path in steps[:-keep]:
        step = int(path.name)
        is_nth = keep_every and step % keep_every == 0
        if step not in kept and not is_nth:
            going.append(path)
    return going, steps


def main(argv: Sequence[str], prog: str = "maxtrain checkpoint") -> int:
    """Runs the command; the exit code: 74 for damage."""
    parser = argparse.ArgumentParser(
        prog, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    about = {
        "list": "a table of all steps",
        "show": "record and arrays of one step",
        "verify": "read every byte of every step; ends with 74 if one is damaged",
        "copy": "make a run that continues from one step of another run, checked on both sides; "
        "into a folder named checkpoints, copy the step alone",
        "prune": "remove old steps, never the newest, nor the best of an evaluation; "
        "only says so without --apply",
    }
    for verb, text in about.items():
        sub = verbs.add_parser(verb, help=text, description=text, allow_abbrev=False)
        sub.add_argument(
            "directory", metavar="DIR", help="a run, its folder checkpoints, or the URL of a run"
        )
        if verb == "copy":
            sub.add_argument(
                "to",
                metavar="TO",
                type=Path,
                help="the new run, which is not there yet; or the folder checkpoints of a run",
            )
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
        args = parser.parse_args(argv)
        console = SafeConsole()
        for name, low in (("step", 0), ("keep", 1), ("keep_every", 1)):
            value = getattr(args, name, None)
            if value is not None and value < low:
                option = f"--{name.replace('_', '-')}"
                fix = f"Use {option} {low} or more"
                raise UsageError(f"{option}={value} must be at least {low}. {fix}.")
        if args.verb == "copy":
            copy(args.directory, args.to, args.step, console)
            return
        directory = directory_of(args.directory)
        if args.verb == "list":
            show_list(directory, console)
        elif args.verb == "show":
            show_step(directory, args.step, console, args.json)
        elif args.verb == "verify":
            verify(directory, console)
        else:
            prune(directory, args.keep, args.keep_every, args.apply, console)

    return run_command(job, resumes=False)
