"""One of four processes is killed, or stopped, at a random instant: the job must end, be started
again, and come to the same numbers.

Jobs are those of `maxtrain supervise --processes 4`, with its own supervisor, whose processes are
forks as in victim.py. After a death, the supervisor ends the attempt. After a hang, the watchdogs
of the other processes end these, and the supervisor ends what is left.
"""

import argparse
import json
import os
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
    ForkedProcess,
    RunFiles,
    Scene,
    ended_with,
    put_away,
    train_forked,
    wait_for,
)
from data_pipeline.base.errors import run_command
from maxtrain.commands import supervise
from maxtrain.config import load_config
from maxtrain.observe.attempts import read_attempts

PROCESSES = 4
OPTIONS = [
    "--processes",
    str(PROCESSES),
    "--backoff",
    "0",
    "--crash-loop",
    "1000",
    "--max-restarts",
    "1000",
]
# Seconds that a step may stand still.
STALL = 20.0
CHANGES = {
    "steps": 60,
    "checkpoint_interval": 10,
    "eval_interval": 30,
    "checkpoint": {"keep": 2, "keep_every": 100},
    "mesh": {"data": 2, "fsdp": 2, "simulated_devices": 1, "heartbeat_seconds": 60},
    "watchdog": {"step_seconds": STALL, "factor": 3.0},
}


class ForkingSupervisor(supervise.Supervisor):
    """A supervisor that forks its processes, and writes down their numbers."""

    def __init__(self, scene: Scene, name: str, *overrides: str):
        self._scene = scene
        self._name = name
        self._words = scene.words(name, *overrides)
        options = supervise._parse(OPTIONS, "supervise")
        super().__init__(options, ["maxtrain", "train", *self._words], load_config(self._words))

    # A Forked has as much of Popen as the supervisor uses.
    def _start(self, extra: dict[str, str]) -> ForkedProcess:  # pyright: ignore
        words = self._words
        environment = self._scene.environment | extra
        # Each process compiles everything itself, which must not take long.
        environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
        child = ForkedProcess(lambda: train_forked(words), self._scene.log(self._name), environment)
        with open(members(self._scene, self._name), "a") as file:
            print(json.dumps([int(extra["MAXTRAIN_ATTEMPT"]), child.pid]), file=file)
        return child


def members(scene: Scene, name: str) -> Path:
    """The file with the number of the attempt and of the process, for each one that was started."""
    return scene.folder / f"{name}.members"


def supervised(scene: Scene, name: str, *overrides: str) -> ForkedProcess:
    """A supervised job, in processes of its own."""

    def job() -> int:
        codes = []

        def supervise_it() -> None:
            codes.append(ForkingSupervisor(scene, name, *overrides).run())

        return run_command(supervise_it) or codes[0]

    members(scene, name).unlink(missing_ok=True)
    return ForkedProcess(job, scene.log(name), scene.environment)


def deaths(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Kill one process, again and again."""
    _disturb(folder, tally, random.Random(args.seed), signal.SIGKILL)


def hangs(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Stop one process, again and again."""
    _disturb(folder, tally, random.Random(args.seed), signal.SIGSTOP)


def _disturb(folder: Path, tally: Tally, rng: random.Random, number: int) -> None:
    scene = Scene(folder / "deaths", **CHANGES)
    seconds = []
    runs = 0
    of_rank = [0] * PROCESSES
    if not (scene.runs / "reference").exists():
        job = supervised(scene, "reference", "watchdog.factor=0")
        if job.wait(2 * PATIENCE) or len(read_attempts(scene.runs / "reference")) > 1:
            raise RuntimeError(
                f"the reference itself ended with {job.returncode}, or needed more than one "
                f"attempt; see {scene.log('reference')}"
            )
    reference = RunFiles(scene.runs / "reference")
    while not tally.done():
        name = f"{tally.name}-{runs}"
        job = supervised(scene, name)
        problems = []
        while not tally.done() and not problems:
            rank = rng.randrange(PROCESSES)
            found = _strike(scene, name, job, rank, number, rng)
            if found is None:
                break
            took, problems = found
            problems += RunFiles(scene.runs / name).unlike(reference, whole=False)
            seconds.append(took)
            of_rank[rank] += 1
            where = f"{name}, process {rank}"
            tally.count(failure(where, problems), f"process {rank}, {took:.1f} s")
        if not problems:
            code = job.wait(2 * PATIENCE)
            problems = RunFiles(scene.runs / name).unlike(reference, whole=True)
            problems += ended_with(code, 0)
            if problems:
                tally.fail(failure(f"{name}, its end", problems))
        job.send_signal(signal.SIGTERM)
        if problems:
            tally.tell(f"kept in {put_away(scene, name)}")
        shutil.rmtree(scene.runs / name, ignore_errors=True)
        runs += 1
    what = "one of four processes killed"
    limit = ""
    if number == signal.SIGSTOP:
        what = "one of four processes stopped (SIGSTOP)"
        limit = f"; a step may stand still for {STALL:.0f} s"
    tally.rows = [(what, tally.trials, len(tally.failures))]
    if seconds:
        who = ", ".join(f"process {rank} {count}" for rank, count in enumerate(of_rank))
        tally.notes.append(
            f"{runs} runs; {who}. Until the whole attempt had ended: "
            f"p50 {statistics.median(seconds):.1f} s, p99 {quantile(seconds, 0.99):.1f} s, "
            f"longest {max(seconds):.1f} s{limit}. All were started again."
        )


def _strike(
    scene: Scene, name: str, job: ForkedProcess, rank: int, number: int, rng: random.Random
) -> tuple[float, list[str]] | None:
    """Sends a signal to one process, up to two checkpoints after the last one.

    Returns:
        Seconds until the attempt was over, and what is wrong; None: the job reached its end first.
    """
    run = scene.runs / name
    done = len(read_attempts(run))
    progress = AttemptProgress(run, RunFiles(run).newest + rng.randrange(2 * scene.interval))
    wait_for(progress.has_made_a_step, job, 2 * PATIENCE)
    wait_for(lambda: False, job, rng.uniform(0, 0.3))
    if job.poll() is not None:
        return None
    attempts = read_attempts(run)
    if len(attempts) > done:
        return 0.0, [f"ended by itself: {attempts[-1]['reason']}"]
    lines = [json.loads(line) for line in members(scene, name).read_text().splitlines()]
    attempt = max(number for number, _ in lines)
    pid = [pid for number, pid in lines if number == attempt][rank]
    began = time.time()
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        # It has ended just now, and the job with it.
        return None
    is_over = wait_for(lambda: len(read_attempts(run)) > done, job, PATIENCE)
    last = {}
    attempts = read_attempts(run)
    if len(attempts) > done:
        last = attempts[-1]
    if last.get("code") == 0:
        # It had ended before it got the signal.
        return None
    expected = ["exit 75", "SIGABRT"]
    if number == signal.SIGKILL:
        expected.append("SIGKILL")
    problems = []
    if not is_over:
        problems.append("the job did not end")
    elif last["reason"] not in expected:
        problems.append(f"ended with {last['reason']}")
    return last.get("end", time.time()) - began, problems
