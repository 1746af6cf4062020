"""Goodput of a run that is killed again and again: the share of the time in which it makes
progress, compared with the best that is possible (Young, Daly).

Kills come at exponential intervals. A pilot measures the seconds of a step, those that a save keeps
the loop waiting, and those from a kill to the first new step. The recommended interval between
checkpoints is then sqrt(2 * save * time between failures). Goodput is the time of the steps that
count, without the first one after each start, over wall time. Goodput and the best possible are
both computed from measurements of the same run, so that a slower machine changes both.

Source: Daly 2006, A higher order estimate of the optimum checkpoint interval for restart dumps,
eq. 20.
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
from benchmarks.chaos.victim import PATIENCE, AttemptProgress, RunFiles, Scene, end, wait_for
from maxtrain.observe.goodput import read_clock

CHANGES = {"steps": 1_000_000, "eval_interval": 0, "checkpoint": {"keep": 2}}
PILOT_SECONDS = 40.0


class Costs(NamedTuple):
    """Seconds of a step, of a save, and from a kill to the first new step."""

    step: float
    save: float
    restart: float


def efficiency(interval: float, costs: Costs, between: float) -> float:
    """The expected share of useful time.

    Args:
        interval: seconds of work between two checkpoints.
        costs: of the run.
        between: mean seconds between two failures.
    """
    again = math.exp(costs.restart / between) * (math.exp((interval + costs.save) / between) - 1)
    return interval / (between * again)


def best_interval(costs: Costs, between: float) -> float:
    """Seconds of work between two checkpoints."""
    return math.sqrt(2 * costs.save * between)


def goodput(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Measure the kills at the recommended interval, and a quarter as many each at a fourth of it
    and at four times it.
    """
    scene = Scene(folder / "goodput", **CHANGES)
    rng = random.Random(args.seed)
    pilot, *_ = _run(scene, "pilot", 50, [PILOT_SECONDS])
    recommended = max(1, round(best_interval(pilot, args.mtbf) / pilot.step))
    lines = [
        "| interval, steps | kills | seconds | step, ms | save, ms | restart, s | goodput "
        "| best possible | of it |",
        "|:--|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for factor, share in ((1.0, 1.0), (0.25, 0.25), (4.0, 0.25)):
        gaps = [rng.expovariate(1 / args.mtbf) for _ in range(max(1, round(share * tally.wanted)))]
        steps = max(1, round(recommended * factor))
        costs, useful, wall = _run(scene, f"every-{steps}", steps, gaps, pilot.save)
        reached = useful / wall
        between = wall / len(gaps)
        optimum = efficiency(best_interval(costs, between), costs, between)
        name = f"{steps:,}"
        if factor == 1:
            name += " (recommended)"
        cells = [
            name,
            str(len(gaps)),
            f"{wall:,.0f}",
            f"{1e3 * costs.step:.1f}",
            f"{1e3 * costs.save:.0f}",
            f"{costs.restart:.1f}",
            f"{reached:.3f}",
            f"{optimum:.3f}",
            f"{reached / optimum:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
        tally.tell(lines[-1])
        if factor == 1:
            tally.trials = len(gaps)
            if reached < 0.9 * optimum:
                tally.fail(f"goodput {reached:.3f} is below 0.9 of {optimum:.3f}")
        if tally.done() and tally.trials < tally.wanted:
            break
    what = "kills at the recommended interval, goodput at least 0.9 of the best"
    tally.rows = [(what, tally.trials, len(tally.failures))]
    tally.notes.append("\n".join(lines))
    tally.notes.append(
        f"Asked for: {args.mtbf:.0f} s between failures on average; the best possible is for the "
        "gaps there were."
    )


def _run(
    scene: Scene, name: str, interval: int, gaps: list[float], save: float = 0.0
) -> tuple[Costs, float, float]:
    """A run that is killed after each gap.

    The time begins with the first step, and ends with the first new one after the last kill.

    Args:
        scene: where the run is.
        name: of the run.
        interval: steps between two checkpoints.
        gaps: seconds before each kill.
        save: the seconds of a save, in case that no launch lives long enough to record its own.

    Returns:
        What things cost in the run, the seconds of the steps that count in the end, and wall
        seconds.

    Raises:
        RuntimeError: the run recorded no save, and `save` is 0.
    """
    run = scene.runs / name
    restarts = []
    shutil.rmtree(run, ignore_errors=True)
    began = 0.0
    struck = 0.0
    for gap in [*gaps, math.inf]:
        start = time.monotonic()
        progress = AttemptProgress(run, RunFiles(run).newest)
        process = scene.start(name, f"checkpoint_interval={interval}")
        patience = PATIENCE
        if struck:
            patience = min(gap, PATIENCE)
        has_stepped = wait_for(progress.has_made_a_step, process, patience)
        if has_stepped and struck:
            restarts.append(time.monotonic() - struck)
        if not began:
            # The first gap is counted from the first step.
            began = time.monotonic()
            start = began
        if gap < math.inf:
            wait_for(lambda: False, process, start + gap - time.monotonic())
        process.send_signal(signal.SIGKILL)
        struck = time.monotonic()
        end(process)
    clock = read_clock(run)
    left = RunFiles(run)
    first = {launch["first"] + 1 for launch in clock}
    seconds = []
    for record in left.records:
        if record["kind"] == "train" and record["step"] not in first:
            seconds.append(record["step_seconds"])
    saves = sum(launch["step"] // interval - launch["first"] // interval for launch in clock)
    if saves:
        save = sum(launch["seconds"].get("save", 0.0) for launch in clock) / saves
    if not save:
        raise RuntimeError(
            f"no save was measured in {run}, with an interval of {interval} steps. Give the "
            "machine more time."
        )
    costs = Costs(statistics.mean(seconds), save, statistics.mean(restarts))
    return costs, sum(seconds), struck - began
