"""SIGKILL at random instants and at named places: the same command goes on, and only a little time
is lost.

After every kill, all records so far must be the reference's bit for bit; every checkpoint that was
complete must be there, unless the policy has removed it; and at most one interval of work may be
lost, or two while a save is under way. At the end, records, checkpoints and weights must be the
reference's.
"""

import argparse
import collections
import dataclasses
import random
import shutil
import signal
import statistics
import time
from pathlib import Path

from benchmarks.chaos.report import Tally, failure, quantile
from benchmarks.chaos.victim import (
    PATIENCE,
    AttemptProgress,
    RunFiles,
    Scene,
    end,
    ended_with,
    kept,
    put_away,
    size_of,
    wait_for,
)

# Places that every launch comes by.
FIRST_PLACES = ("during_save", "before_commit", "after_commit", "during_removal", "eval")
# And those that a run comes by once it has a checkpoint.
PLACES = (*FIRST_PLACES, "restore", "data", "after_step")
IN_SAVE = ("save", "during_save", "before_commit", "after_commit")
# By whether a victim is the command: the seconds that a start may take, before any was measured.
GUESSES = {False: 3, True: 12}
STARTED = {False: "a fork of a process that has imported everything", True: "the command"}
# How a kill is aimed, and how often.
AIMS = {"instant": 2, "steps": 3, "save": 3, "place": 3}


@dataclasses.dataclass
class Kill:
    """One kill."""

    # Where it struck.
    where: str
    # Steps that must be made again.
    lost: int
    # What is wrong with what it left.
    problems: list[str]


class Victim:
    """One run, whose attempts are killed until one reaches the end."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        rng: random.Random,
        commands: float,
        recoveries: dict[bool, list[float]],
    ):
        self.scene = scene
        self.name = name
        self.rng = rng
        self.commands = commands
        self.run = scene.runs / name
        self.reference = scene.reference()
        self.options = []
        if rng.random() < 0.2:
            self.options.append("checkpoint.asynchronous=false")
        # Seconds, of forks (False) and of commands (True).
        self.recoveries = recoveries
        # The newest step whose checkpoint is known to have been complete.
        self.counted = 0

    def attempt(self) -> Kill | None:
        """Starts an attempt and kills it; None: it reached its end first, and all is well."""
        rng = self.rng
        command = rng.random() < self.commands
        aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
        before = RunFiles(self.run)
        began = time.time()
        log = self.scene.log(self.name)
        log_bytes = size_of(log)
        place = ""
        fault = ""
        if aim == "place":
            place, fault = self._draw(before.newest)
        progress = AttemptProgress(self.run, before.newest)
        process = self.scene.start(self.name, *self.options, fault=fault, command=command)
        if aim == "instant":
            usual = statistics.median(self.recoveries[command] or [GUESSES[command]])
            wait_for(lambda: False, process, rng.uniform(0, 1.2 * usual))
        elif wait_for(progress.has_made_a_step, process):
            if before.newest:
                self.recoveries[command].append(time.time() - began)
            if aim == "steps":
                wait_for(lambda: False, process, rng.uniform(0, 1.5))
            elif aim == "save":
                wait_for(lambda: bool(self._partial(began, before.newest)), process)
                time.sleep(rng.uniform(0, 0.15))
        if aim != "place":
            self.counted = max(self.counted, RunFiles(self.run).newest)
            process.send_signal(signal.SIGKILL)
        code = end(process)
        said = None
        if progress.opened():
            said = log.read_bytes()[log_bytes:].decode(errors="replace")
        return self._judge(code, place, began, said)

    def _draw(self, newest: int) -> tuple[str, str]:
        """A place, and the fault that kills the run when it is there for the first or second
        time."""
        scene = self.scene
        places = FIRST_PLACES
        if newest:
            places = PLACES
        place = self.rng.choice(places)
        if place in ("restore", "during_removal"):
            return place, f"{place}:kill"
        due = scene.interval
        if place == "eval":
            due = scene.values["eval_interval"]
        elif place in ("data", "after_step"):
            due = 1
        after = range(newest + 1, scene.steps + 1)
        steps = [step for step in after if step % due == 0][:2] or [scene.steps]
        return place, f"{place}:kill:{self.rng.choice(steps)}"

    def _partial(self, since: float, newest: int) -> list[Path]:
        """Directories of saves that this attempt has begun."""
        found = (self.run / "checkpoints").glob(".*.partial")
        return [path for path in found if int(path.name[1:9]) > newest and _changed(path) >= since]

    def _judge(self, code: int | str, place: str, began: float, said: str | None) -> Kill | None:
        """Return the problems of what an attempt has left; None: it reached the end without a
        problem.

        Args:
            code: with which it ended.
            place: at which it was to be killed; empty: at an instant.
            began: when it was started.
            said: its output; None: it did not get so far as to open its records.
        """
        left = RunFiles(self.run)
        interval = self.scene.interval
        policy = self.scene.values["checkpoint"]
        problems = left.unlike(self.reference, whole=code == 0)
        problems += ended_with(code, 0, -signal.SIGKILL)
        wanted = kept(left.newest, interval, policy["keep"], policy["keep_every"])
        missing = wanted - set(left.saved)
        if missing or left.newest < self.counted:
            problems.append(
                f"lost checkpoints: {sorted(missing)} of {left.saved}; {self.counted} had counted"
            )
        problems += [f"not whole: {what}" for what in left.bad]
        problems += [f"put aside: {name}" for name in left.aside()]
        self.counted = left.newest
        if code == 0:
            if problems:
                return Kill("end", 0, problems)
            return None
        partial = self._partial(began, newest=-1)
        is_saving = any(int(path.name[1:9]) > left.newest for path in partial)
        lost = 0
        if said:
            lost = left.last - left.newest
        allowed = interval
        if is_saving:
            allowed = 2 * interval
        if lost > allowed:
            problems.append(f"{lost} steps lost, with an interval of {interval}")
        if place:
            where = place
        elif is_saving:
            where = "save"
        elif partial:
            where = "removal"
        elif lost:
            where = "steps"
        elif said:
            where = "compile"
        else:
            where = "start or restore"
        return Kill(where, lost, problems)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:
        # The save was finished meanwhile, and the directory renamed.
        return 0.0


def kills(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill runs again and again, over as many runs as that takes."""
    scene = Scene(folder / "run")
    rng = random.Random(args.seed)
    where = collections.Counter[str]()
    lost = []
    runs = 0
    recoveries: dict[bool, list[float]] = {False: [], True: []}
    scene.reference()
    while not tally.done():
        victim = Victim(scene, f"victim-{runs}", rng, args.commands, recoveries)
        while not tally.done() and (kill := victim.attempt()):
            if kill.where != "end":
                where[kill.where] += 1
                lost.append(kill.lost)
            tally.count(failure(f"{victim.name}, {kill.where}", kill.problems), kill.where)
            if kill.problems:
                tally.tell(f"kept in {put_away(scene, victim.name)}")
                break
        else:
            problems = []
            if tally.done():
                problems = _finish(victim)
            if problems:
                tally.fail(failure(f"{victim.name}, its end", problems))
                put_away(scene, victim.name)
        shutil.rmtree(victim.run, ignore_errors=True)
        runs += 1
    in_save = sum(where[place] for place in IN_SAVE)
    failed_in_save = sum(_is_in_save(problem) for problem in tally.failures)
    tally.rows = [
        ("SIGKILL", tally.trials, len(tally.failures)),
        ("of these inside a save", in_save, failed_in_save),
    ]
    places = ", ".join(f"{place} {count}" for place, count in where.most_common())
    interval = scene.interval
    tally.notes = [
        f"{runs} runs of {scene.steps} steps, a checkpoint every {interval}. Struck in: {places}",
        f"Steps to be made again: mean {statistics.mean(lost):.1f}, most {max(lost)} (the limit is "
        f"{interval}, and {2 * interval} while a save is under way).",
    ]
    for command, seconds in recoveries.items():
        if seconds:
            tally.notes.append(
                f"From the start of {STARTED[command]} to its first new step: "
                f"mean {statistics.mean(seconds):.2f} s, p99 {quantile(seconds, 0.99):.2f} s "
                f"({len(seconds)} starts)."
            )


def _is_in_save(problem: str) -> bool:
    """Return whether a failure is of a kill inside a save."""
    where, _, _ = problem.partition(":")
    return any(place in where for place in IN_SAVE)


def _finish(victim: Victim) -> list[str]:
    """Lets the last run go on undisturbed; how its end differs from the reference."""
    code = end(victim.scene.start(victim.name, *victim.options), PATIENCE)
    return ended_with(code, 0) + RunFiles(victim.run).unlike(victim.reference, whole=True)
