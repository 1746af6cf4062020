"""SIGKILL around rollbacks: the same command must come to the numbers of a run that was rolled back
and never killed.

In every attempt, two steps of the run read noise instead of text, and one has a NaN in its batch;
each time the run goes back to a checkpoint before the step. Kills are aimed at the instants before
and after the list of rollbacks is written, at the removal of the checkpoints after it, at the
restore, and at the steps that are made again.
"""

import argparse
import collections
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import (
    PATIENCE,
    AttemptProgress,
    ForkedProcess,
    RunFiles,
    Scene,
    end,
    ended_with,
    make_data,
    put_away,
    wait_for,
)
from maxtrain.checkpoint.listing import latest_state
from maxtrain.checkpoint.rollback import FILE_NAME, Rollback, read_rollbacks

NOISE = [chr(code) for code in range(0x100, 0x800)]
# Steps that read noise, and a step whose batch has a NaN.
SPIKES = (33, 67)
NAN = 94
# In every attempt, and in the reference.
FAULT = f"data:nan:{NAN}"
CHANGES = {
    "steps": 120,
    "checkpoint_interval": 10,
    "eval_interval": 30,
    "optimizer": {"learning_rate": 1e-2},
    "schedule": {"warmup_steps": 2},
    "anomaly": {
        "window": 8,
        "min_steps": 6,
        "loss_limit": 8.0,
        "loss_spike": "rollback",
        "non_finite": "rollback",
        "leave_out": 6,
    },
}
# How a kill is aimed, and how often.
AIMS = {"instant": 1, "before": 2, "written": 4, "place": 4, "again": 2}
PLACES = ("rollback", "during_removal", "restore", "data", "after_step", "after_commit")


class RollbackScene(Scene):
    """A scene whose run is rolled back three times."""

    def __init__(self, folder: Path):
        if not (folder / "noise").exists():
            make_data(folder / "noise", 0.05, NOISE)
        stages = []
        for step in SPIKES:
            stages.append({"until": step - 1, "weights": {"text": 1}})
            stages.append({"until": step, "weights": {"noise": 1}})
        stages.append({"weights": {"text": 1}})
        noise = {"path": str(folder / "noise" / "data" / "train"), "epochs": None}
        super().__init__(folder, **CHANGES, data={"sources": {"noise": noise}, "stages": stages})

    def start(
        self, run: str, *overrides: str, fault: str = "", command: bool = False
    ) -> ForkedProcess | subprocess.Popen:
        """Start a run with the NaN, and with another fault if there is one."""
        faults = ",".join(filter(None, [FAULT, fault]))
        return super().start(run, *overrides, fault=faults, command=command)


class RollbackVictim:
    """One run, whose attempts are killed until one reaches the end."""

    def __init__(self, scene: RollbackScene, name: str, rng: random.Random, commands: float):
        self.scene = scene
        self.name = name
        self.rng = rng
        self.commands = commands
        self.run = scene.runs / name
        self.reference = scene.reference()
        self.planned = read_rollbacks(self.reference.run) or []
        # The number of rollbacks that are known to have been written down.
        self.known = 0
        # The newest step whose checkpoint is known to have been complete, since the last rollback.
        self.counted = 0

    def attempt(self) -> tuple[str, list[str]] | None:
        """Starts an attempt and kills it: where, and what is wrong; None: it reached its end, which
        is the reference's."""
        rng = self.rng
        aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
        place = ""
        if aim == "place":
            place = rng.choice(PLACES)
        before = RunFiles(self.run)
        # The step of the next rollback, or the last step.
        upcoming = self.scene.steps
        if self.known < len(self.planned):
            upcoming = self.planned[self.known]["step"]
        fault = ""
        if place:
            fault = self._fault(place, before.newest, upcoming)
        is_command = rng.random() < self.commands
        process = self.scene.start(self.name, fault=fault, command=is_command)
        if not place:
            self._wait(aim, process, before, upcoming)
            process.send_signal(signal.SIGKILL)
        code = end(process)
        problems = self._judge(code)
        if code == 0 and not problems:
            return None
        return place or aim, problems

    def _fault(self, place: str, newest: int, upcoming: int) -> str:
        """A kill at a place, and at a step around the next rollback where the place has steps."""
        if place in ("data", "after_step"):
            step = self.rng.randrange(max(newest + 1, upcoming - 6), upcoming + 4)
            return f"{place}:kill:{step}"
        if place == "after_commit":
            return f"{place}:kill:{min(self.scene.steps, newest + self.scene.interval)}"
        if place == "restore" and newest:
            # The restore of the rollback, not the one at the start.
            interval = self.scene.interval
            behind = (upcoming - CHANGES["anomaly"]["leave_out"]) // interval * interval
            return f"{place}:kill:{behind}"
        return f"{place}:kill"

    def _wait(
        self, aim: str, process: ForkedProcess | subprocess.Popen, before: RunFiles, upcoming: int
    ) -> None:
        """Waits until the instant that is aimed at."""
        rng = self.rng
        written = self.run / FILE_NAME
        progress = AttemptProgress(self.run, before.newest)
        changed = 0
        if written.exists():
            changed = written.stat().st_ino
        if aim == "instant":
            wait_for(lambda: False, process, rng.uniform(0, 4))
        elif aim == "before":
            near = AttemptProgress(self.run, upcoming - 2)
            wait_for(near.has_made_a_step, process)
            time.sleep(rng.uniform(0, 0.1))
        else:
            wait_for(lambda: written.exists() and written.stat().st_ino != changed, process)
            if aim == "again":
                wait_for(progress.has_made_a_step, process)
            time.sleep(rng.uniform(0, 0.2))

    def _judge(self, code: int | str) -> list[str]:
        """Return the problem with what an attempt has left. It is compared with the reference up
        to the next rollback.
        """
        left = RunFiles(self.run)
        found = read_rollbacks(self.run) or []
        problems = ended_with(code, 0, -signal.SIGKILL)
        if found != self.planned[: len(found)] or len(found) < self.known:
            problems.append(
                f"rollbacks are {found}, not the first of {self.planned}; {self.known} were known"
            )
        problems += [f"not whole: {what}" for what in left.bad]
        problems += [f"put aside: {name}" for name in left.aside()]
        if code == 0:
            return problems + left.unlike(self.reference, whole=True)
        problems += unlike_so_far(left, self.reference, self.planned, len(found))
        for rollback in found[self.known :]:
            behind = (rollback["left_out"][0] - 1) // self.scene.interval * self.scene.interval
            self.counted = min(self.counted, behind)
        self.known = len(found)
        state = latest_state(self.run / "checkpoints", lambda state: state.went_with(found))
        newest = 0
        if state:
            newest = state.step
        if newest < self.counted:
            problems.append(f"goes on from step {newest}, and {self.counted} had counted")
        self.counted = newest
        return problems


def unlike_so_far(
    left: RunFiles, reference: RunFiles, planned: list[Rollback], written: int
) -> list[str]:
    """Return how records differ from the reference's, up to the first step that will be left out
    and was not left out yet.

    Args:
        left: what a killed run has left; its records are cut.
        reference: what a run has left that was rolled back and not killed.
        planned: the rollbacks of the reference.
        written: how many of them the killed run has written down.
    """
    losses = {
        record["step"]: record["loss"] for record in left.records if record["kind"] == "train"
    }
    limit = reference.last
    for number, rollback in enumerate(planned):
        first, last = rollback["left_out"]
        there = [losses[step] for step in range(first, last + 1) if step in losses]
        if number < written and all(loss is None for loss in there):
            continue
        if left.last > last:
            return [
                f"there are records of step {left.last}, and the run should have been rolled back "
                f"at step {last}"
            ]
        limit = first - 1
        break
    left.records = [record for record in left.records if record["step"] <= limit]
    left.steps = [step for step in left.steps if step <= limit]
    left.last = max(left.steps, default=0)
    return left.unlike(reference, whole=False)


def rollbacks(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill runs again and again, over as many runs as that takes; the last run goes on to its
    end.
    """
    scene = RollbackScene(folder / "rollbacks")
    rng = random.Random(args.seed)
    where = collections.Counter[str]()
    taken = runs = 0
    scene.reference()
    while not tally.done():
        victim = RollbackVictim(scene, f"{tally.name}-{runs}", rng, args.commands)
        problems: list[str] = []
        while not tally.done() and not problems:
            struck = victim.attempt()
            if struck is None:
                break
            aim, problems = struck
            where[aim] += 1
            tally.count(failure(f"{victim.name}, {aim}", problems), aim)
        if not problems:
            code = end(scene.start(victim.name), PATIENCE)
            problems = RunFiles(victim.run).unlike(victim.reference, whole=True)
            problems += ended_with(code, 0)
            if problems:
                tally.fail(failure(f"{victim.name}, its end", problems))
        taken += victim.known
        if problems:
            tally.tell(f"kept in {put_away(scene, victim.name)}")
        shutil.rmtree(victim.run, ignore_errors=True)
        runs += 1
    tally.rows = [("SIGKILL around rollbacks", tally.trials, len(tally.failures))]
    aims = ", ".join(f"{aim} {count}" for aim, count in where.most_common())
    tally.notes.append(
        f"{runs} runs of {scene.steps} steps, rolled back {taken} times. Aimed at: {aims}"
    )
