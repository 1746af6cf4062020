"""How much of the time makes progress when a run is killed again and again, against the best that
is possible (Young, Daly).

Kills come at exponential intervals. A pilot measures the seconds of a step, of what a save keeps
the loop waiting, and from a kill to the first new step; the interval between checkpoints that these
recommend is sqrt(2 * save * time between failures). Goodput is the seconds of the steps that count,
but for the first after each start, over wall time. Both sides of the ratio use what is measured in
the same run, so that a machine that is slower now than it was in the pilot changes both.
Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps, eq.
    20.
"""

import argparse
import math
import random
import shutil
import signal
import statistics
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.chaos.report import Tally
from benchmarks.chaos.victim import PATIENCE, Left, Progress, Scene, end, wait_for
from maxtrain.observe.goodput import read_clock

CHANGES = {"steps": 1_000_000, "eval_interval": 0, "checkpoint": {"keep": 2}}
PILOT_SECONDS = 40.0


class Costs(NamedTuple):
    """Seconds of a step, of a save, and from a kill to the first new step."""

    step: float
    save: float
    restart: float


def efficiency(interval: float, costs: Costs, between: float) -> float:
    """The expected share of useful time with checkpoints after `interval` seconds of work;
    `between`: mean of failures."""
    again = math.exp(costs.restart / between) * (math.exp((interval + costs.save) / between) - 1)
    return interval / (between * again)


def best_interval(costs: Costs, between: float) -> float:
    """Seconds of work between two checkpoints."""
    return math.sqrt(2 * costs.save * between)


def goodput(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many kills at the recommended interval, and a quarter of them each at a fourth and at four
    times it."""
    scene, rng = Scene(folder / "goodput", **CHANGES), random.Random(asked.seed)
    pilot, *_ = _run(scene, "pilot", 50, [PILOT_SECONDS])
    recommended = max(1, round(best_interval(pilot, asked.mtbf) / pilot.step))
    lines = [
        "| interval, steps | kills | seconds | step, ms | save, ms | restart, s | goodput | best possible | of it |"
    ]
    lines += ["|:--|--:|--:|--:|--:|--:|--:|--:|--:|"]
    for factor, share in ((1.0, 1.0), (0.25, 0.25), (4.0, 0.25)):
        gaps = [rng.expovariate(1 / asked.mtbf) for _ in range(max(1, round(share * tally.wanted)))]
        steps = max(1, round(recommended * factor))
        costs, useful, wall = _run(scene, f"every-{steps}", steps, gaps, pilot.save)
        reached, between = useful / wall, wall / len(gaps)
        optimum = efficiency(best_interval(costs, between), costs, between)
        name = f"{steps:,}" + (" (recommended)" if factor == 1 else "")
        numbers = f"{1e3 * costs.step:.1f} | {1e3 * costs.save:.0f} | {costs.restart:.1f} | {reached:.3f} | {optimum:.3f}"
        lines.append(
            f"| {name} | {len(gaps)} | {wall:,.0f} | {numbers} | {reached / optimum:.2f} |"
        )
        tally.tell(lines[-1])
        if factor == 1:
            tally.trials = len(gaps)
            if reached < 0.9 * optimum:
                tally.fail(f"goodput {reached:.3f} is below 0.9 of {optimum:.3f}")
        if tally.done() and tally.trials < tally.wanted:
            break
    tally.rows = [
        (
            "kills at the recommended interval, goodput at least 0.9 of the best",
            tally.trials,
            len(tally.failures),
        )
    ]
    tally.notes.append("\n".join(lines))
    tally.notes.append(
        f"Asked for: {asked.mtbf:.0f} s between failures on average; the best possible is for the gaps there were."
    )


def _run(
    scene: Scene, name: str, interval: int, gaps: list[float], save: float = 0.0
) -> tuple[Costs, float, float]:
    """A run that is killed after each gap: what things cost in it, seconds of steps that count in
    the end, and wall seconds.

    The time begins with the first step, and ends with the first new one after the last kill.
    `save`: the seconds of a save, if no launch lived long enough to write down its own.

    Raises:
        RuntimeError: nor is that known.
    """
    run, restarts = scene.runs / name, []
    shutil.rmtree(run, ignore_errors=True)
    began = struck = 0.0
    for gap in [*gaps, math.inf]:
        start, progress = time.monotonic(), Progress(run, Left(run).newest)
        process = scene.start(name, f"checkpoint_interval={interval}")
        if wait_for(progress.has_made_a_step, process, min(gap, PATIENCE) if struck else PATIENCE):
            restarts += [time.monotonic() - struck] if struck else []
        began = began or time.monotonic()
        wait_for(
            lambda: False,
            process,
            (start if struck else began) + gap - time.monotonic() if gap < math.inf else 0.0,
        )
        process.send_signal(signal.SIGKILL)
        struck = time.monotonic()
        end(process)
    clock, left = read_clock(run), Left(run)
    first = {launch["first"] + 1 for launch in clock}
    seconds = [
        r["step_seconds"] for r in left.records if r["kind"] == "train" and r["step"] not in first
    ]
    saves = sum(launch["step"] // interval - launch["first"] // interval for launch in clock)
    save = sum(launch["seconds"].get("save", 0.0) for launch in clock) / saves if saves else save
    if not save:
        raise RuntimeError(
            f"no save was measured in {run}, with an interval of {interval} steps. Give the machine more time."
        )
    return (
        Costs(statistics.mean(seconds), save, statistics.mean(restarts)),
        sum(seconds),
        struck - began,
    )
