"""A disk that is full, at many sizes: exit 74 with a message that says what to do, the last good
step loads, and with more space the same command goes on to the same numbers.

The disk is a tmpfs of its own if this user may mount one (else a trial is a fault `enospc` at a
place: see the notes).
"""

import argparse
import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.report import Tally
from benchmarks.chaos.victim import Left, Scene, end, put_away
from maxtrain.checkpoints import check

PLACES = ("during_save", "before_commit", "after_step", "eval")
_NAME = "full"


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """A file system of so many bytes below `place`; False: this user can't have one."""
    place.mkdir(parents=True, exist_ok=True)
    mounted = _run("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place))
    try:
        yield mounted
    finally:
        if mounted:
            _run("umount", "-l", str(place))


def _run(*command: str) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def disk(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many sizes, from too little for one checkpoint to a little less than the run needs at
    most."""
    scene, rng = Scene(folder / "run"), random.Random(asked.seed)
    reference = scene.reference()
    whole = sum(path.stat().st_blocks * 512 for path in reference.run.rglob("*"))
    with small_disk(folder / "probe", 1 << 20) as mounted:
        kind = "a tmpfs" if mounted else "faults `enospc`: this user may not mount a tmpfs"
    ended: list[str] = []
    while not tally.done():
        place = folder / "small"
        size = (
            int(whole * (0.02 + 0.93 * (tally.trials + rng.random()) / tally.wanted))
            if mounted
            else whole
        )
        with small_disk(place, size) if mounted else contextlib.nullcontext():
            said, problems = _trial(scene, reference, place, mounted, rng, asked.commands)
        ended.append(said)
        tally.count(
            f"{size:,} bytes: {'; '.join(problems)}" if problems else "", f"{size:,} bytes, {said}"
        )
        if problems:
            tally.tell(f"kept in {put_away(scene, _NAME)}")
        scene.log(_NAME).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    tally.rows = [("disk full", tally.trials, len(tally.failures))]
    tally.notes.append(
        f"By {kind}; sizes from 2 to 95 % of the {whole / 1e6:.1f} MB that a run takes in the end. Of {tally.trials}: "
        + ", ".join(f"{what} {ended.count(what)}" for what in dict.fromkeys(ended))
    )


def _trial(
    scene: Scene, reference: Left, place: Path, mounted: bool, rng: random.Random, commands: float
) -> tuple[str, list[str]]:
    """One run on a small disk, then with more space: how far it came, and what is wrong."""
    run = place / _NAME
    step = rng.randrange(1, 12) * scene.interval
    fault = "" if mounted else f"{rng.choice(PLACES)}:enospc:{step}"
    code = end(
        scene.start(_NAME, f"output_dir={place}", fault=fault, command=rng.random() < commands)
    )
    text, left = scene.log(_NAME).read_text(errors="replace"), Left(run)
    if code == 0 and mounted:
        return "it was enough", left.unlike(reference, whole=True)
    problems = left.unlike(reference, whole=False) + ([] if code == 74 else [f"ended with {code}"])
    message = next((line for line in text.splitlines() if line.startswith("error: ")), "")
    if not (
        ("No space" in text or "free; a checkpoint takes" in text)
        and ("Free space" in message or "Free space" in text)
    ):
        problems.append(f"the message says neither what nor a mend: {message}")
    if "Traceback" in text:
        problems.append("there is a traceback beside the message")
    problems += [f"not whole: {what}" for what in left.bad]
    problems += [
        f"checkpoint {step}: {why}"
        for step in left.saved
        if (why := check(run / "checkpoints" / f"{step:08d}"))
    ]
    if (
        left.last - left.newest > 2 * scene.interval
    ):  # a save in the background fails when the next one is due
        problems.append(f"the newest checkpoint is {left.newest} of {left.last} steps")
    if mounted and not _run("mount", "-o", "remount,size=1g", str(place)):
        problems.append("remount failed")
    code = end(scene.start(_NAME, f"output_dir={place}", command=rng.random() < commands))
    problems += ([f"with space it ended with {code}"] if code else []) + Left(run).unlike(
        reference, whole=True
    )
    return (
        "no room for a checkpoint" if not left.newest else "full after some checkpoints",
        problems,
    )
