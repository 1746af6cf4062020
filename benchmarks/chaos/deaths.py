"""One of four processes killed, or stopped, at a random instant: the job ends, is started again,
and comes to the same numbers.

Jobs are those of `maxtrain supervise --processes 4`: its own supervisor, whose processes are forks
as in victim.py. A death is noticed when the supervisor has ended the attempt; a hang when the
watchdogs of the others have, and it has ended what is left.
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

from benchmarks.chaos.report import Tally, quantile
from benchmarks.chaos.victim import (
    PATIENCE,
    Forked,
    Left,
    Progress,
    Scene,
    put_away,
    train_forked,
    wait_for,
)
from data_pipeline.errors import run_command
from maxtrain import supervise
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
STALL = 20.0  # seconds
CHANGES = {
    "steps": 60,
    "checkpoint_interval": 10,
    "eval_interval": 30,
    "checkpoint": {"keep": 2, "keep_every": 100},
    "mesh": {"data": 2, "fsdp": 2, "simulated_devices": 1, "heartbeat_seconds": 60},
    "watchdog": {"step_seconds": STALL, "factor": 3.0},
}


class Forking(supervise.Supervisor):
    """A supervisor that forks what it would start, and writes down who they are."""

    def __init__(self, scene: Scene, name: str, *overrides: str):
        self._scene, self._name, self._words = scene, name, scene.words(name, *overrides)
        options = supervise._parse(OPTIONS, "supervise")
        super().__init__(options, ["maxtrain", "train", *self._words], load_config(self._words))

    def _start(self, extra: dict[str, str]) -> Forked:  # pyright: ignore  # as much of Popen as is used
        words = self._words
        # Each process compiles all by itself, so quickly.
        environment = (
            self._scene.environment | extra | {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        )
        child = Forked(lambda: train_forked(words), self._scene.log(self._name), environment)
        with open(members(self._scene, self._name), "a") as file:
            print(json.dumps([int(extra["MAXTRAIN_ATTEMPT"]), child.pid]), file=file)
        return child


def members(scene: Scene, name: str) -> Path:
    """The file that has attempt and process of all that was started."""
    return scene.folder / f"{name}.members"


def supervised(scene: Scene, name: str, *overrides: str) -> Forked:
    """A supervised job, in processes of its own."""

    def job() -> int:
        codes = []
        return run_command(lambda: codes.append(Forking(scene, name, *overrides).run())) or codes[0]

    members(scene, name).unlink(missing_ok=True)
    return Forked(job, scene.log(name), scene.environment)


def deaths(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many SIGKILLs of one process."""
    _disturb(folder, tally, random.Random(asked.seed), signal.SIGKILL)


def hangs(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many SIGSTOPs of one process."""
    _disturb(folder, tally, random.Random(asked.seed), signal.SIGSTOP)


def _disturb(folder: Path, tally: Tally, rng: random.Random, number: int) -> None:
    scene, seconds, runs, of_rank = Scene(folder / "deaths", **CHANGES), [], 0, [0] * PROCESSES
    if not (scene.runs / "reference").exists():
        job = supervised(scene, "reference", "watchdog.factor=0")
        if job.wait(2 * PATIENCE) or len(read_attempts(scene.runs / "reference")) > 1:
            raise RuntimeError(
                f"the reference itself ended with {job.returncode}, or not at once; see {scene.log('reference')}"
            )
    reference = Left(scene.runs / "reference")
    while not tally.done():
        name = f"{tally.name}-{runs}"
        job, problems = supervised(scene, name), []
        while not tally.done() and not problems:
            rank = rng.randrange(PROCESSES)
            found = _strike(scene, name, job, rank, number, rng)
            if found is None:
                break
            took, problems = found
            problems += Left(scene.runs / name).unlike(reference, whole=False)
            seconds.append(took)
            of_rank[rank] += 1
            tally.count(
                f"{name}, process {rank}: {'; '.join(problems)}" if problems else "",
                f"process {rank}, {took:.1f} s",
            )
        code = job.wait(2 * PATIENCE) if not problems else 0
        end = (
            []
            if problems
            else Left(scene.runs / name).unlike(reference, whole=True)
            + ([f"{code}"] if code else [])
        )
        if end:
            tally.fail(f"{name}, its end: {'; '.join(end)}")
        job.send_signal(signal.SIGTERM)
        if problems or end:
            tally.tell(f"kept in {put_away(scene, name)}")
        shutil.rmtree(scene.runs / name, ignore_errors=True)
        runs += 1
    what = (
        "one of four processes killed"
        if number == signal.SIGKILL
        else "one of four processes stopped (SIGSTOP)"
    )
    tally.rows = [(what, tally.trials, len(tally.failures))]
    if seconds:
        who = ", ".join(f"process {rank} {count}" for rank, count in enumerate(of_rank))
        limit = f"; a step may stand still for {STALL:.0f} s" if number == signal.SIGSTOP else ""
        tally.notes.append(
            f"{runs} runs; {who}. Until the whole attempt had ended: p50 {statistics.median(seconds):.1f} s, "
            f"p99 {quantile(seconds, 0.99):.1f} s, longest {max(seconds):.1f} s{limit}. All were started again."
        )


def _strike(
    scene: Scene, name: str, job: Forked, rank: int, number: int, rng: random.Random
) -> tuple[float, list[str]] | None:
    """Strikes one process up to two checkpoints after the last: seconds until the attempt was over,
    and what is wrong.

    None: the job came to its end first.
    """
    run = scene.runs / name
    done = len(read_attempts(run))
    progress = Progress(run, Left(run).newest + rng.randrange(2 * scene.interval))
    wait_for(progress.has_made_a_step, job, 2 * PATIENCE)
    wait_for(lambda: False, job, rng.uniform(0, 0.3))
    if job.poll() is not None or len(read_attempts(run)) > done:
        return (
            None
            if job.poll() is not None
            else (0.0, [f"ended by itself: {read_attempts(run)[-1]['reason']}"])
        )
    lines = [json.loads(line) for line in members(scene, name).read_text().splitlines()]
    attempt = max(number for number, _ in lines)
    pid = [pid for number, pid in lines if number == attempt][rank]
    began = time.time()
    try:
        os.kill(pid, number)
    except ProcessLookupError:  # it has ended just now, and the job with it
        return None
    over = wait_for(lambda: len(read_attempts(run)) > done, job, PATIENCE)
    last = read_attempts(run)[-1] if len(read_attempts(run)) > done else {}
    if last.get("code") == 0:
        return None  # it had ended before it was struck
    problems = [] if over else ["the job did not end"]
    expected = (
        ("SIGKILL", "exit 75", "SIGABRT") if number == signal.SIGKILL else ("exit 75", "SIGABRT")
    )
    if over and last["reason"] not in expected:
        problems.append(f"ended with {last['reason']}")
    return last.get("end", time.time()) - began, problems
