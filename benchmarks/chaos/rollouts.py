"""SIGKILL of runs that learn from rewards (GRPO): in every phase, the same command must come to the
records, checkpoints and rollouts of a run that nobody disturbed, bit for bit.

Each run has one of the variants below. Places of maxtrain/failpoints.py write a line when a run
comes by, so that it is known in which phase a kill has struck. Kills are aimed at random instants
since the start; at random instants after a place was passed; and at the place itself. The first two
strike the whole group of processes at once. Processes of rewards are in groups of their own, and
must end by themselves.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.rollbacks import unlike_so_far
from benchmarks.chaos.victim import (
    PATIENCE,
    ForkedProcess,
    RunFiles,
    Scene,
    end,
    ended_with,
    put_away,
    size_of,
    wait_for,
)
from data_pipeline.prepare import command as prepare
from maxtrain.checkpoint.listing import latest_state
from maxtrain.checkpoint.rollback import Rollback, read_rollbacks
from maxtrain.failpoints import VARIABLE
from maxtrain.rl.rollout import FOLDER, DamagedRolloutError, load

REWARDS = ["benchmarks.chaos.letters:has_letter(by='group')", "exact"]
CHANGES: dict[str, Any] = {
    "steps": 24,
    "checkpoint_interval": 5,
    "eval_interval": 6,
    "objective": "grpo",
    "optimizer": {"learning_rate": 1e-3},
    "schedule": {"warmup_steps": 0},
    "data": {"seq_length": 16, "batch_size": 4, "packing": "pad"},
    "checkpoint": {"keep": 2, "keep_every": 100},
    "anomaly": {"non_finite": "rollback", "leave_out": 4},
}
GRPO = {"rewards": REWARDS, "num_generations": 4, "max_completion_length": 6}
AHEAD = {"staleness": 1, "importance_sampling_cap": 2.0}
EXACT = "determinism=full, dynamic_sampling"
# Of each: settings of grpo, of the model, and a fault that every attempt has.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "plain": ({"num_iterations": 2}, {}, ""),
    "staleness=1": ({"num_iterations": 2, **AHEAD}, {}, ""),
    "dynamic_sampling": ({"dynamic_sampling": 2, "keep_rollouts": True}, {}, ""),
    "staleness=1, with adapters": (
        {"num_iterations": 2, "beta": 0.05, **AHEAD},
        {"lora": {"rank": 2}},
        "",
    ),
    "dynamic_sampling, rolled back": (
        {"num_iterations": 2, "dynamic_sampling": 2, "keep_rollouts": True},
        {},
        "data:nan:13",
    ),
    "staleness=1, rolled back": ({"num_iterations": 2, **AHEAD}, {}, "data:nan:13"),
    EXACT: ({"dynamic_sampling": 2}, {}, ""),
}
# The phase in which a run is that has come by a place, and by no other since.
PHASES = {
    "": "start",
    "restore": "start",
    "sampling": "rollout",
    "rewards": "reward",
    "scoring": "scoring and storing",
    "stored": "update",
    "ahead": "update",
    "data": "update",
    "after_step": "update",
    "eval": "evaluation",
    "during_save": "save",
    "before_commit": "save",
    "after_commit": "save",
    "during_removal": "save",
    "rollback": "rollback",
}
PLACES = [place for place in PHASES if place]


def places_of_phases() -> dict[str, list[str]]:
    """Kills are aimed at phases, each as often as another; a rollback is hit by chance."""
    found = collections.defaultdict(list)
    for place in PLACES:
        if PHASES[place] != "rollback":
            found[PHASES[place]].append(place)
    return found


# How a kill is aimed, and how often.
AIMS = {"instant": 2, "behind a place": 4, "at a place": 3}
# Seconds behind a place, at most.
BEHIND = 0.04
# Seconds that a start may take, before any was measured; and that processes may take to end.
GUESS = 3.0
ENDING = 10.0


class RolloutScene(Scene):
    """A scene whose run is of one of the variants."""

    def __init__(self, folder: Path, variant: str):
        self.variant = variant
        grpo, model, self.fault = VARIANTS[variant]
        if not (folder / "data").exists():
            write_prompts(folder)
        super().__init__(folder, **CHANGES, grpo=GRPO | grpo)
        self.values["model"] = self.values["model"] | model
        if variant == EXACT:
            self.values["determinism"] = "full"
        self.config.write_text(json.dumps(self.values))

    def start(
        self, run: str, *overrides: str, fault: str = "", command: bool = False
    ) -> ForkedProcess | subprocess.Popen:
        """Start a run with a line for each place, the variant's own fault, and another one if there
        is one.
        """
        lines = [f"{place}:delay=0" for place in PLACES]
        faults = ",".join([*filter(None, [self.fault]), *lines, *filter(None, [fault])])
        return super().start(run, *overrides, fault=faults, command=command)


def write_prompts(folder: Path) -> None:
    """Sums with their answers, of which some are held out, prepared in `folder`/data."""
    folder.mkdir(parents=True)
    lines = []
    for a in range(6):
        for b in range(6):
            lines.append(json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n")
    path = folder / "prompts.jsonl"
    path.write_text("".join(lines))
    words = [str(folder / "data"), "--prompts", str(path), "--tokenizer", "bytes"]
    with (
        open(folder / "prepare.log", "w") as log,
        contextlib.redirect_stdout(log),
        contextlib.redirect_stderr(log),
    ):
        if prepare.main([*words, "--holdout", "0.2", "--workers", "1"]):
            raise RuntimeError(f"prepare failed; see {folder / 'prepare.log'}")


class RolloutVictim:
    """One run, whose attempts are killed until one reaches the end."""

    def __init__(
        self,
        scene: RolloutScene,
        name: str,
        rng: random.Random,
        commands: float,
        seconds: list[float],
    ):
        self.scene = scene
        self.name = name
        self.rng = rng
        self.commands = commands
        self.run = scene.runs / name
        self.reference = scene.reference()
        self.planned: list[Rollback] = read_rollbacks(self.reference.run) or []
        # Seconds of attempts until their first sampling or update.
        self.seconds = seconds
        # The newest step whose checkpoint is known to have counted, since the last rollback.
        self.counted = 0
        # Rollbacks that are known to have been written down.
        self.known = 0
        self._log = scene.log(name)
        self._begin = 0

    def attempt(self) -> tuple[str, list[str]] | None:
        """Starts an attempt and kills it: the phase, and what is wrong; None: it reached its end,
        and nothing is."""
        rng = self.rng
        aim = rng.choices(list(AIMS), list(AIMS.values()))[0]
        of_phases = places_of_phases()
        places = of_phases[rng.choice(list(of_phases))]
        if not self.scene.values["grpo"].get("staleness"):
            # Nothing is sampled ahead.
            places = [place for place in places if place != "ahead"]
        place = rng.choice(places)
        skipped = rng.randrange(6)
        if PHASES[place] in ("start", "evaluation", "save"):
            # A run comes by seldom.
            skipped = rng.randrange(2)
        fault = ""
        if aim == "at a place":
            fault = f"{place}:kill:{self._step_of(place)}"
        self._begin = size_of(self._log)
        began = time.monotonic()
        command = rng.random() < self.commands
        process = self.scene.start(self.name, fault=fault, command=command)
        if aim == "behind a place":
            wait_for(lambda: len(self._passed(place)) > skipped, process)
            time.sleep(rng.uniform(0, BEHIND))
        elif aim == "instant":
            usual = statistics.median(self.seconds or [GUESS])
            wait_for(lambda: False, process, rng.uniform(0, 1.5 * usual))
        else:
            wait_for(lambda: bool(self._passed()), process)
            self.seconds.append(time.monotonic() - began)
        if aim != "at a place":
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        code = end(process)
        places = self._passed()
        last = ""
        if places:
            last = places[-1]
        phase = PHASES[last]
        problems = self._judge(code) + outlived(process.pid)
        if code == 0 and not problems:
            return None
        return phase, problems

    def end_unlike(self) -> list[str]:
        """Return how the run that has ended differs from the reference."""
        since = 0
        if not self.scene.values["grpo"].get("keep_rollouts"):
            since = min(self.reference.saved)
        reference = self.reference
        problems = RunFiles(self.run).unlike(reference, whole=True)
        return problems + rollouts_unlike(self.run, reference.run, whole=True, since=since)

    def _step_of(self, place: str) -> int:
        """A step at which a run that goes on passes a place, most of the time."""
        left = RunFiles(self.run)
        newest = left.newest
        due = 1
        if place in ("during_save", "before_commit", "after_commit"):
            due = self.scene.interval
        elif place == "eval":
            due = self.scene.values["eval_interval"]
        elif place in ("sampling", "rewards", "scoring", "stored", "ahead"):
            due = self.scene.values["grpo"].get("num_iterations", 1)
        if place == "restore":
            return newest
        if place == "during_removal":
            policy = self.scene.values["checkpoint"]
            return max(self.scene.interval, newest - (policy["keep"] - 1) * self.scene.interval)
        offset = 0
        if place in ("sampling", "rewards", "scoring", "stored", "ahead"):
            offset = 1
        upcoming = range(newest + 1, self.scene.steps + 1)
        steps = [step for step in upcoming if (step - offset) % due == 0][:5]
        return self.rng.choice(steps or [self.scene.steps])

    def _passed(self, place: str = "") -> list[str]:
        """The places that this attempt has come by, in order: all, or those of this name."""
        if not self._log.exists():
            return []
        said = self._log.read_bytes()[self._begin :].decode(errors="replace")
        found = []
        for line in said.splitlines():
            _, mark, rest = line.partition(f"{VARIABLE}: ")
            words = rest.split()
            if mark and len(words) >= 3 and words[2] in PHASES and place in ("", words[2]):
                found.append(words[2])
        return found

    def _judge(self, code: int | str) -> list[str]:
        """Return the problem with what an attempt has left."""
        left = RunFiles(self.run)
        written = read_rollbacks(self.run) or []
        problems = ended_with(code, 0, -signal.SIGKILL)
        if written != self.planned[: len(written)] or len(written) < self.known:
            problems.append(f"rollbacks are {written}, not the first of {self.planned}")
        problems += [f"not whole: {what}" for what in left.bad]
        problems += [f"put aside: {name}" for name in left.aside()]
        if code == 0:
            return problems + self.end_unlike()
        problems += rollouts_unlike(self.run, self.reference.run, whole=False)
        problems += unlike_so_far(left, self.reference, self.planned, len(written))
        for rollback in written[self.known :]:
            behind = (rollback["left_out"][0] - 1) // self.scene.interval * self.scene.interval
            self.counted = min(self.counted, behind)
        self.known = len(written)
        state = latest_state(self.run / "checkpoints", lambda state: state.went_with(written))
        newest = 0
        if state:
            newest = state.step
        if newest < self.counted:
            problems.append(f"goes on from step {newest}, and {self.counted} had counted")
        self.counted = newest
        return problems


def rollouts_unlike(run: Path, reference: Path, whole: bool, since: int = 0) -> list[str]:
    """Return how the stored rollouts of a run differ from those of the reference.

    Args:
        run: the folder of the run.
        reference: the folder of the undisturbed run.
        whole: both have ended. Before, a rollout may be of steps that are taken back later, and is
            only looked at for damage.
        since: rollouts of earlier steps may be missing: when they are removed depends on when saves
            beside the steps have ended.
    """
    problems: list[str] = []
    ours = contents(run / FOLDER, problems)
    if not whole:
        return problems
    theirs = contents(reference / FOLDER, problems)
    missing = [name for name in theirs if name not in ours and _step(name) > since]
    more = [name for name in ours if name not in theirs and _step(name) > since]
    if missing or more:
        problems.append(f"rollouts {missing} are missing, and {more} are too many")
    for name in sorted(ours.keys() & theirs.keys()):
        if ours[name] != theirs[name]:
            problems.append(f"{name} differs")
    return problems


def _step(name: str) -> int:
    """The first step that reads a rollout."""
    number, _, _ = name.partition(".")
    return int(number)


def contents(folder: Path, problems: list[str]) -> dict[str, str]:
    """The digest of each rollout; one that is damaged is added to `problems`."""
    found = {}
    for path in sorted(folder.glob("*.npz")):
        try:
            found[path.name] = load(path).content()
        except DamagedRolloutError as damage:
            problems.append(f"{path.name}: {damage}")
    return found


def outlived(pid: int) -> list[str]:
    """Report processes of rewards that have outlived the run that started them."""
    deadline = time.monotonic() + ENDING
    while servers := _servers_of(pid):
        if time.monotonic() > deadline:
            return [f"processes of rewards live on: {servers}"]
        time.sleep(0.05)
    return []


def _servers_of(pid: int) -> list[int]:
    """Processes whose command says that they compute rewards for this one."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            said = path.read_bytes().decode(errors="replace")
            if "rewards.worker_process" in said and f", {pid}, " in said:
                found.append(int(path.parent.name))
    return found


def rollouts(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill runs again and again, over as many runs as that takes; the last run goes on to its
    end.
    """
    rng = random.Random(args.seed)
    phases = collections.Counter[str]()
    variants = collections.Counter[str]()
    seconds: list[float] = []
    runs = 0
    scenes = {}
    for number, variant in enumerate(VARIANTS):
        scenes[variant] = RolloutScene(folder / f"rollouts-{number}", variant)
    while not tally.done():
        variant = list(VARIANTS)[runs % len(VARIANTS)]
        victim = RolloutVictim(scenes[variant], f"victim-{runs}", rng, args.commands, seconds)
        problems: list[str] = []
        while not tally.done() and not problems:
            struck = victim.attempt()
            if struck is None:
                break
            phase, problems = struck
            phases[phase] += 1
            variants[variant] += 1
            what = f"{victim.name} ({variant}), {phase}"
            tally.count(failure(what, problems), what)
        if not problems and tally.done():
            code = end(victim.scene.start(victim.name), PATIENCE)
            problems = ended_with(code, 0) + victim.end_unlike()
            if problems:
                tally.fail(failure(f"{victim.name} ({variant}), its end", problems))
        if problems:
            tally.tell(f"kept in {put_away(victim.scene, victim.name)}")
        shutil.rmtree(victim.run, ignore_errors=True)
        runs += 1
    tally.rows = [("SIGKILL of runs of GRPO", tally.trials, len(tally.failures))]
    for phase, count in phases.most_common():
        failed = sum(f", {phase}:" in problem for problem in tally.failures)
        tally.rows.append((f"of these in: {phase}", count, failed))
    of_variants = "; ".join(f"{variant} {count}" for variant, count in variants.items())
    tally.notes = [
        f"{runs} runs of {CHANGES['steps']} steps, a checkpoint every "
        f"{CHANGES['checkpoint_interval']}. Kills by variant: {of_variants}",
        "Compared bit for bit: records, checkpoints, and stored rollouts with their tokens, "
        "log-probabilities, rewards and advantages. After each kill, no process of rewards lived "
        "on.",
    ]
