"""SIGKILL at random instants and at named places; the same command goes on, and nothing is lost but
a little time.

Held after every kill: all records so far are the reference's bit for bit; every checkpoint that had
counted is there, or retired by policy; work lost is at most an interval, or two while a save is
under way. At the end: records, checkpoints and weights are the reference's.
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

from benchmarks.chaos.report import Tally, quantile
from benchmarks.chaos.victim import PATIENCE, Left, Progress, Scene, end, kept, put_away, wait_for

PLACES = (
    "during_save",
    "before_commit",
    "after_commit",
    "during_removal",
    "eval",
    "restore",
    "data",
    "after_step",
)
IN_SAVE = ("save", "during_save", "before_commit", "after_commit")
# How a kill is aimed, and how often.
AIMS = {"instant": 2, "steps": 3, "save": 3, "place": 3}


@dataclasses.dataclass
class Kill:
    """One kill: where it struck, steps to be made again, and what is wrong with what it left."""

    where: str
    lost: int
    problems: list[str]


class Victim:
    """One run and its attempts, each killed, until one is not."""

    def __init__(
        self,
        scene: Scene,
        name: str,
        rng: random.Random,
        commands: float,
        recoveries: dict[bool, list[float]],
    ):
        self.scene, self.name, self.rng, self.commands = scene, name, rng, commands
        self.run, self.reference = scene.runs / name, scene.reference()
        self.options = ["checkpoint.asynchronous=false"] if rng.random() < 0.2 else []
        self.recoveries = recoveries  # seconds, of forked ones and of commands
        self.counted = 0  # the newest step that is known to have counted

    def attempt(self) -> Kill | None:
        """Starts it and kills it; None: it came to its end first, and that is wrong if it left
        anything else than 0."""
        rng, command = self.rng, self.rng.random() < self.commands
        aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
        before, began = Left(self.run), time.time()
        log = self.scene.log(self.name).stat().st_size if self.scene.log(self.name).exists() else 0
        place, fault = self._draw(before.newest) if aim == "place" else ("", "")
        progress = Progress(self.run, before.newest)
        process = self.scene.start(self.name, *self.options, fault=fault, command=command)
        if aim == "instant":
            usual = statistics.median(self.recoveries[command] or [12 if command else 3])
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
            self.counted = max(self.counted, Left(self.run).newest)
            process.send_signal(signal.SIGKILL)
        code = end(process)
        said = self.scene.log(self.name).read_bytes()[log:].decode(errors="replace")
        return self._judge(code, place, began, said if progress.opened() else None)

    def _draw(self, newest: int) -> tuple[str, str]:
        """A place, and the fault that kills there the first or second time that it comes by."""
        scene, rng = self.scene, self.rng
        place = rng.choice(PLACES if newest else PLACES[:-3])
        after = range(newest + 1, scene.steps + 1)
        due = {"eval": scene.values["eval_interval"], "data": 1, "after_step": 1, "restore": 1}.get(
            place, scene.interval
        )
        steps = [step for step in after if step % due == 0][:2] or [scene.steps]
        return place, f"{place}:kill" + (
            "" if place in ("restore", "during_removal") else f":{rng.choice(steps)}"
        )

    def _partial(self, since: float, newest: int) -> list[Path]:
        """Directories of saves that this attempt has under way."""
        found = (self.run / "checkpoints").glob(".*.partial")
        return [path for path in found if int(path.name[1:9]) > newest and _changed(path) >= since]

    def _judge(self, code: int | str, place: str, began: float, said: str | None) -> Kill | None:
        """What an attempt has left; `said` since it opened its logs, None: it did not."""
        left, interval, policy = (
            Left(self.run),
            self.scene.interval,
            self.scene.values["checkpoint"],
        )
        problems = left.unlike(self.reference, whole=code == 0)
        if code not in (0, -signal.SIGKILL):
            problems.append(f"ended with {code}")
        missing = kept(left.newest, interval, policy["keep"], policy["keep_every"]) - set(
            left.saved
        )
        if missing or left.newest < self.counted:
            problems.append(
                f"lost checkpoints: {sorted(missing)} of {left.saved}; {self.counted} had counted"
            )
        problems += [f"not whole: {what}" for what in left.bad] + [
            f"put aside: {name}" for name in left.aside()
        ]
        self.counted = left.newest
        if code == 0:
            return Kill("end", 0, problems) if problems else None
        partial = [
            path
            for path in (self.run / "checkpoints").glob(".*.partial")
            if _changed(path) >= began
        ]
        saving = any(int(path.name[1:9]) > left.newest for path in partial)
        lost = left.last - left.newest if said else 0
        if lost > interval * (2 if saving else 1):
            problems.append(f"{lost} steps lost, with an interval of {interval}")
        where = (
            "save"
            if saving
            else "removal"
            if partial
            else "steps"
            if lost
            else "compile"
            if said
            else "start or restore"
        )
        return Kill(place or where, lost, problems)


def _changed(path: Path) -> float:
    try:
        return path.stat().st_ctime
    except FileNotFoundError:  # it has its name by now
        return 0.0


def kills(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many kills, over as many runs as that takes."""
    scene, rng = Scene(folder / "run"), random.Random(asked.seed)
    where, lost, runs = collections.Counter[str](), [], 0
    recoveries: dict[bool, list[float]] = {False: [], True: []}
    scene.reference()
    while not tally.done():
        victim = Victim(scene, f"victim-{runs}", rng, asked.commands, recoveries)
        while not tally.done() and (kill := victim.attempt()):
            if kill.where != "end":
                where[kill.where] += 1
                lost.append(kill.lost)
            tally.count(
                f"victim-{runs}, {kill.where}: {'; '.join(kill.problems)}" if kill.problems else "",
                kill.where,
            )
            if kill.problems:
                tally.tell(f"kept in {put_away(scene, victim.name)}")
                break
        else:
            if tally.done() and (problems := _finish(victim)):
                tally.fail(f"victim-{runs}, its end: {'; '.join(problems)}")
                put_away(scene, victim.name)
        shutil.rmtree(victim.run, ignore_errors=True)
        runs += 1
    in_save = sum(where[place] for place in IN_SAVE)
    tally.rows = [
        ("SIGKILL", tally.trials, len(tally.failures)),
        (
            "of these inside a save",
            in_save,
            sum(any(place in f.partition(":")[0] for place in IN_SAVE) for f in tally.failures),
        ),
    ]
    tally.notes = [
        f"{runs} runs of {scene.steps} steps, a checkpoint every {scene.interval}. Struck in: "
        + ", ".join(f"{place} {count}" for place, count in where.most_common()),
        f"Steps to be made again: mean {statistics.mean(lost):.1f}, most {max(lost)} (the limit is {scene.interval}, and "
        f"{2 * scene.interval} while a save is under way).",
    ]
    for command, seconds in recoveries.items():
        if seconds:
            what = "the command" if command else "a fork of a process that has imported everything"
            tally.notes.append(
                f"From the start of {what} to its first new step: mean {statistics.mean(seconds):.2f} s, "
                f"p99 {quantile(seconds, 0.99):.2f} s ({len(seconds)} starts)."
            )


def _finish(victim: Victim) -> list[str]:
    """The last run goes on undisturbed, and ends as the reference."""
    code = end(victim.scene.start(victim.name, *victim.options), PATIENCE)
    return ([f"ended with {code}"] if code else []) + Left(victim.run).unlike(
        victim.reference, True
    )
