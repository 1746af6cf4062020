"""A full disk, of many sizes: the run must end with exit 74 and a message that says what to do, its
last complete checkpoint must load, and with more space the same command must come to the same
numbers.

The disk is a tmpfs of its own if this user may mount one. Otherwise a trial is the fault `enospc`
at a place, which the notes then say.
"""

import argparse
import contextlib
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import RunFiles, Scene, end, ended_with, put_away
from maxtrain.commands.checkpoint import check

PLACES = ("during_save", "before_commit", "after_step", "eval")
_NAME = "full"


@contextlib.contextmanager
def small_disk(place: Path, size: int) -> Iterator[bool]:
    """Mount a file system of `size` bytes below `place`; False: this user may not mount one."""
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


def disk(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Try disk sizes, from too small for one checkpoint to a little less than the run needs."""
    scene = Scene(folder / "run")
    rng = random.Random(args.seed)
    reference = scene.reference()
    whole = sum(path.stat().st_blocks * 512 for path in reference.run.rglob("*"))
    with small_disk(folder / "probe", 1 << 20) as mounted:
        kind = "faults `enospc`: this user may not mount a tmpfs"
        if mounted:
            kind = "a tmpfs"
    ended: list[str] = []
    while not tally.done():
        place = folder / "small"
        size = whole
        with contextlib.ExitStack() as stack:
            if mounted:
                share = 0.02 + 0.93 * (tally.trials + rng.random()) / tally.wanted
                size = int(whole * share)
                stack.enter_context(small_disk(place, size))
            said, problems = _trial(scene, reference, place, mounted, rng, args.commands)
        ended.append(said)
        tally.count(failure(f"{size:,} bytes", problems), f"{size:,} bytes, {said}")
        if problems:
            tally.tell(f"kept in {put_away(scene, _NAME)}")
        scene.log(_NAME).unlink(missing_ok=True)
        shutil.rmtree(place, ignore_errors=True)
    tally.rows = [("disk full", tally.trials, len(tally.failures))]
    counts = ", ".join(f"{what} {ended.count(what)}" for what in dict.fromkeys(ended))
    tally.notes.append(
        f"By {kind}; sizes from 2 to 95 % of the {whole / 1e6:.1f} MB that a run takes in the end. "
        f"Of {tally.trials}: {counts}"
    )


def _trial(
    scene: Scene,
    reference: RunFiles,
    place: Path,
    mounted: bool,
    rng: random.Random,
    commands: float,
) -> tuple[str, list[str]]:
    """One run on a small disk, and then with more space.

    Returns:
        How far the run came on the small disk, and what is wrong.
    """
    run = place / _NAME
    step = rng.randrange(1, 12) * scene.interval
    fault = ""
    if not mounted:
        fault = f"{rng.choice(PLACES)}:enospc:{step}"
    is_command = rng.random() < commands
    code = end(scene.start(_NAME, f"output_dir={place}", fault=fault, command=is_command))
    text = scene.log(_NAME).read_text(errors="replace")
    left = RunFiles(run)
    if code == 0 and mounted:
        return "it was enough", left.unlike(reference, whole=True)
    problems = left.unlike(reference, whole=False) + ended_with(code, 74)
    says_what = "No space" in text or "free; a checkpoint takes" in text
    if not says_what or "Free space" not in text:
        messages = [line for line in text.splitlines() if line.startswith("error: ")]
        problems.append(f"the message does not say what is wrong and what to do: {messages[:1]}")
    if "Traceback" in text:
        problems.append("there is a traceback beside the message")
    problems += [f"not whole: {what}" for what in left.bad]
    for saved in left.saved:
        why = check(run / "checkpoints" / f"{saved:08d}")
        if why:
            problems.append(f"checkpoint {saved}: {why}")
    # A save in the background reports its failure when the next one is due.
    if left.last - left.newest > 2 * scene.interval:
        problems.append(f"the newest checkpoint is {left.newest} of {left.last} steps")
    if mounted and not _run("mount", "-o", "remount,size=1g", str(place)):
        problems.append("remount failed")
    code = end(scene.start(_NAME, f"output_dir={place}", command=rng.random() < commands))
    problems += [f"with space it {what}" for what in ended_with(code, 0)]
    problems += RunFiles(run).unlike(reference, whole=True)
    if left.newest:
        return "full after some checkpoints", problems
    return "no room for a checkpoint", problems
