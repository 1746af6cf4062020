"""Runs that are stopped, and go on with another mesh, other accumulation, or other processes.

The batch of a step does not depend on any of these, so its content and its digest on the devices
are the reference's, bit for bit. Losses are sums in another order: each of the roundings is at most
2^-24 (6e-8) of a term, and what they change in the weights is carried on from step to step.
TOLERANCE allows a loss to differ by 1e-5 of itself, some hundred roundings; the largest difference
there was is in the notes. One batch that is read twice, or not at all, changes a loss by 1e-3 or
more.
"""

import argparse
import collections
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.chaos.report import Tally
from benchmarks.chaos.victim import (
    CONFIG,
    PATIENCE,
    Forked,
    Left,
    Progress,
    Scene,
    end,
    put_away,
    wait_for,
)

TOLERANCE = 1e-5  # of a loss, relative
SAME = ("batch", "batch_hash", "tokens_seen", "learning_rate")  # bit for bit
DEVICES = (1, 2, 4, 8)
ACCUMULATIONS = (1, 2, 4)
ROWS = 8
CHANGES = {
    "steps": 60,
    "checkpoint_interval": 10,
    "eval_interval": 20,
    "checkpoint": {"keep": 2},
    "model": {**CONFIG["model"], "vocab_size": 264},  # the tokenizer's 257 can't be split
}


class Shape(NamedTuple):
    """How a job is laid out: on how many processes, and how its batch and its weights are split."""

    processes: int
    data: int
    fsdp: int
    tensor: int
    accumulation: int

    def __str__(self) -> str:
        mesh = f"{self.data} x {self.fsdp} x {self.tensor}"
        return f"{mesh} devices of {self.processes} processes, accumulation {self.accumulation}"

    def overrides(self) -> list[str]:
        """As of one of its processes."""
        devices = self.data * self.fsdp * self.tensor // self.processes
        return [
            f"mesh.data={self.data}",
            f"mesh.fsdp={self.fsdp}",
            f"mesh.tensor={self.tensor}",
            f"mesh.simulated_devices={devices}",
            f"optimizer.accumulation={self.accumulation}",
        ]


def shapes(processes: int) -> list[Shape]:
    """All that fit the batch and the heads of the victims."""
    found = []
    for devices in DEVICES:
        for tensor in (1, 2):
            for data in (1, 2, 4, 8):
                fsdp, rest = divmod(devices, tensor * data)
                if rest or not fsdp or devices % processes:
                    continue
                for accumulation in ACCUMULATIONS:
                    if ROWS % (data * fsdp * accumulation) == 0:
                        found.append(Shape(processes, data, fsdp, tensor, accumulation))
    return found


class Job:
    """The processes of an attempt."""

    def __init__(self, scene: Scene, name: str, shape: Shape):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        self.members: list[Forked | subprocess.Popen] = []
        for index in range(shape.processes):
            words = shape.overrides()
            if shape.processes > 1:
                words += [
                    f"mesh.coordinator={address}",
                    f"mesh.num_processes={shape.processes}",
                    f"mesh.process_id={index}",
                ]
            self.members.append(scene.start(name, *words))

    def send_signal(self, number: int) -> None:
        for member in self.members:
            member.send_signal(number)

    def end(self, patience: float) -> list[int | str]:
        """The exit codes."""
        return [end(member, patience) for member in self.members]


def unlike(left: Left, reference: Left) -> tuple[list[str], float]:
    """What is not the reference's, and the largest relative difference of a loss."""
    problems, largest = [], 0.0
    if left.steps != list(range(1, left.last + 1)):
        problems.append(f"the records have not every step up to {left.last} once, in order")
    expected = {
        (record["kind"], record.get("set"), record["step"]): record for record in reference.records
    }
    for record in left.records:
        key = (record["kind"], record.get("set"), record["step"])
        other = expected.get(key)
        if other is None:
            problems.append(f"there is a record that the reference has not: {key}")
            continue
        for name in SAME:
            if record.get(name) != other.get(name):
                problems.append(
                    f"{name} differs at step {record['step']}: {record.get(name)}, {other.get(name)}"
                )
        if record["kind"] == "train" and not record.get("batch_hash"):
            problems.append(f"step {record['step']} has no digest of its batch")
        name = "loss" if record["kind"] == "train" else "nll"
        difference = abs(record[name] - other[name]) / abs(other[name])
        largest = max(largest, difference)
        if not difference <= TOLERANCE:
            problems.append(f"loss differs by {difference:.1e} of itself at step {record['step']}")
    return problems[:5] + [f"not whole: {what}" for what in left.bad] + [
        f"put aside: {name}" for name in left.aside()
    ], largest


def meshes(folder: Path, tally: Tally, asked: argparse.Namespace) -> None:
    """So many attempts, each with another layout than the one before it; most are stopped, the last
    of a run ends it."""
    scene, rng = Scene(folder / "meshes", **CHANGES), random.Random(asked.seed)
    scene.environment["XLA_FLAGS"] = (
        "--xla_backend_optimization_level=0"  # nearly every layout is a program of its own
    )
    reference = scene.reference()
    counts, largest, runs = collections.Counter[str](), 0.0, 0
    while not tally.done():
        name, problems, codes = f"{tally.name}-{runs}", list[str](), list[int | str]()
        before: Shape | None = None
        while not problems and codes != [0] * max(1, len(codes)):
            processes = (
                2
                if rng.random() < 0.2 or (before and before.processes == 2 and rng.random() < 0.3)
                else 1
            )
            shape = rng.choice([shape for shape in shapes(processes) if shape != before])
            last = tally.done()
            codes, by = _attempt(scene, name, shape, rng, last)
            left = Left(scene.runs / name)
            problems, difference = unlike(left, reference)
            largest = max(largest, difference)
            allowed = {"kill": {0, -signal.SIGKILL}, "stop": {0, 75}, "nothing": {0}}[by]
            problems += [f"ended with {codes} after {by}"] if not set(codes) <= allowed else []
            if before and not last:
                counts[
                    "other processes"
                    if before.processes != shape.processes
                    else "one process, or as many"
                ] += 1
                problem = (
                    f"{name}, from {before} to {shape}: {'; '.join(problems)}" if problems else ""
                )
                tally.count(problem, f"step {left.last}, {shape}")
            elif problems:  # of the first attempt of a run, or of the one that ends the last run
                tally.fail(f"{name}, {shape}: {'; '.join(problems)}")
            before = shape
        if not problems and left.last != scene.steps:
            tally.fail(f"{name} ended after {left.last} steps")
        if problems:
            tally.tell(f"kept in {put_away(scene, name)}")
        shutil.rmtree(scene.runs / name, ignore_errors=True)
        runs += 1
    tally.rows = [
        ("another mesh, accumulation or number of processes", tally.trials, len(tally.failures))
    ]
    kinds = ", ".join(f"{kind} {count}" for kind, count in counts.most_common())
    tally.notes.append(
        f"{runs} runs of {scene.steps} steps: {kinds}. Batches are the same bit for bit; losses differ by at most "
        f"{largest:.1e} of themselves, {TOLERANCE:.0e} are allowed."
    )


def _attempt(
    scene: Scene, name: str, shape: Shape, rng: random.Random, last: bool
) -> tuple[list[int | str], str]:
    """Starts it, and stops it some steps further; the exit codes, and how it was stopped."""
    newest = Left(scene.runs / name).newest
    progress = Progress(scene.runs / name, newest + rng.randrange(3, 25))
    job = Job(scene, name, shape)
    by = "nothing"
    if not last:
        by = rng.choice(["kill", "stop"])
        if wait_for(progress.has_made_a_step, job.members[0]):
            time.sleep(rng.uniform(0, 0.05))
        job.send_signal(signal.SIGKILL if by == "kill" else signal.SIGTERM)
    return job.end(PATIENCE), by
