"""SIGTERM and SIGINT at random instants of every phase: the run saves its last step, ends with exit
75, and the same command goes on.

Once a launch has made a step, a signal lets it finish the current step, save it, and end with exit
75. Before that it ends at once, and nothing that was there is lost. A second signal ends it at
once, and damages nothing either.
"""

import argparse
import collections
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

from benchmarks.chaos.report import Tally, failure, quantile
from benchmarks.chaos.victim import (
    AttemptProgress,
    RunFiles,
    Scene,
    end,
    ended_with,
    put_away,
    size_of,
    wait_for,
)
from maxtrain.commands.checkpoint import check

# By phase: the fault that makes it long enough to be hit, what the run says when the phase begins,
# and how many seconds it then takes.
PHASES = {
    "start": ("", "", 0.4),
    "compile": ("", "compiling the step", 0.5),
    "restore": ("restore:delay=0.3", "delay at restore", 0.3),
    "step": ("", "", 1.0),
    "eval": ("eval:delay=0.3", "delay at eval", 0.3),
    "save": ("during_save:delay=0.2", "delay at during_save", 0.2),
    "data wait": ("data:delay=0.3:{step}", "delay at data", 0.3),
}
# What a launch says that ends before its first step.
NOTHING_NEW = ("interrupted. Run", "nothing is left to save")
# The share of trials with a second signal.
SECOND = 0.15


def terms(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Send signals, phase by phase, over as many runs as that takes."""
    scene = Scene(folder / "run")
    rng = random.Random(args.seed)
    counts = collections.Counter[str]()
    failed = collections.Counter[str]()
    seconds = []
    runs = 0
    scene.reference()
    name = "stopped-0"
    while not tally.done():
        at_once = rng.random() < SECOND
        phase = list(PHASES)[tally.trials % len(PHASES)]
        code, problems, took = _trial(scene, name, phase, rng, at_once, args.commands)
        what = phase
        if at_once and code != 75:
            what = f"{phase}, second signal"
        if code == 75:
            seconds.append(took)
        if code != 0:
            counts[what] += 1
            failed[what] += bool(problems)
            tally.count(failure(f"{name}, {what}", problems), what)
        elif problems:
            tally.fail(failure(f"{name}, its end", problems))
        if problems:
            tally.tell(f"kept in {put_away(scene, name)}")
        if problems or code == 0:
            shutil.rmtree(scene.runs / name, ignore_errors=True)
            runs += 1
            name = f"stopped-{runs}"
    tally.rows = [
        (f"signal in: {what}", count, failed[what]) for what, count in sorted(counts.items())
    ]
    if seconds:
        tally.notes.append(
            f"{runs + 1} runs. From the signal to the end of the process, its step saved: "
            f"p50 {statistics.median(seconds):.2f} s, "
            f"p99 {quantile(seconds, 0.99):.2f} s."
        )


def _trial(
    scene: Scene, name: str, phase: str, rng: random.Random, at_once: bool, commands: float
) -> tuple[int | str, list[str], float]:
    """Starts the run and stops it.

    Returns:
        Its exit code, what is wrong, and the seconds from the signal to the end.
    """
    run = scene.runs / name
    log = scene.log(name)
    before = RunFiles(run)
    if phase == "restore" and not before.newest:
        phase = "compile"
    fault, text, most = PHASES[phase]
    begin = size_of(log)

    def said() -> str:
        if not log.exists():
            return ""
        return log.read_bytes()[begin:].decode(errors="replace")

    progress = AttemptProgress(run, before.newest)
    step = min(scene.steps, before.newest + rng.randrange(1, 40))
    process = scene.start(name, fault=fault.format(step=step), command=rng.random() < commands)
    if phase == "step":
        wait_for(progress.has_made_a_step, process)
    elif text:
        wait_for(lambda: text in said(), process)
    wait_for(lambda: False, process, rng.uniform(0, most))
    began = time.monotonic()
    number = signal.SIGINT
    if phase == "start" or rng.random() < 0.7:
        number = signal.SIGTERM
    process.send_signal(number)
    if at_once:
        time.sleep(rng.uniform(0, 0.05))
        process.send_signal(signal.SIGTERM)
    code = end(process)
    took = time.monotonic() - began
    left = RunFiles(run)
    problems = left.unlike(scene.reference(), whole=code == 0)
    problems += [f"not whole: {what}" for what in left.bad]
    problems += [f"put aside: {what}" for what in left.aside()]
    why = ""
    if left.newest:
        why = check(run / "checkpoints" / f"{left.newest:08d}")
    if left.newest < before.newest or why:
        problems.append(
            f"the newest checkpoint is {left.newest}, was {before.newest}; {why or 'gone'}"
        )
    is_saved = phase != "start" and not any(words in said() for words in NOTHING_NEW)
    if code == 75 and is_saved:
        if f"stopped and saved at step {left.newest} of" not in said() or left.newest != left.last:
            problems.append(f"{left.last} steps are on record, the checkpoint is of {left.newest}")
        partial = [path.name for path in (run / "checkpoints").glob(".*.partial")]
        if partial:
            problems.append(f"left behind: {partial}")
    else:
        allowed = [0, 75]
        if phase == "start" or at_once:
            # The signal may kill the process.
            allowed += [-number, -signal.SIGTERM, 128 + number, 128 + signal.SIGTERM]
        problems += ended_with(code, *allowed)
    return code, problems, took
