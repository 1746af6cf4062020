"""Runs that are stopped, and go on with another mesh, other accumulation, or other processes.

The batch of a step does not depend on any of these, so its content and its digest on the devices
must be the reference's, bit for bit. Losses are summed in another order: each rounding is at most
2^-24 (6e-8) of a term, and changes the weights a little from step to step. TOLERANCE lets a loss
differ by 1e-5 of itself, some hundred roundings; the notes have the largest difference that was
found. One batch that is read twice, or not at all, changes a loss by 1e-3 or more.
"""

import argparse
import collections
import itertools
import random
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from benchmarks.chaos.report import Tally, failure
from benchmarks.chaos.victim import (
    CONFIG,
    PATIENCE,
    AttemptProgress,
    ForkedProcess,
    RunFiles,
    Scene,
    end,
    put_away,
    wait_for,
)

# By how much a loss may differ, relative to itself.
TOLERANCE = 1e-5
# Fields that must be the same bit for bit.
SAME = ("batch", "batch_hash", "tokens_seen", "learning_rate")
# How a job is stopped, and the exit codes that its processes may then have.
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGTERM}
ALLOWED_CODES = {"kill": {0, -signal.SIGKILL}, "stop": {0, 75}, "nothing": {0}}
DEVICES = (1, 2, 4, 8)
ACCUMULATIONS = (1, 2, 4)
ROWS = 8
CHANGES = {
    "steps": 60,
    "checkpoint_interval": 10,
    "eval_interval": 20,
    "checkpoint": {"keep": 2},
    "model": {
        **CONFIG["model"],
        # The tokenizer's 257 entries can't be split over devices.
        "vocab_size": 264,
        # Each token goes to all experts: roundings can't send it elsewhere.
        "family": "mixtral",
        "moe": {"num_experts": 4, "experts_per_token": 4},
    },
}


class JobShape(NamedTuple):
    """Layout of a job: the number of processes, and the split of its batch and its weights."""

    processes: int
    data: int
    fsdp: int
    context: int
    expert: int
    tensor: int
    accumulation: int

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context * self.expert * self.tensor

    def __str__(self) -> str:
        sizes = self.axes().items()
        mesh = " x ".join(f"{axis} {size}" for axis, size in sizes if size > 1) or "1"
        return f"{mesh} on {self.processes} processes, accumulation {self.accumulation}"

    def axes(self) -> dict[str, int]:
        """The sizes of the mesh's axes."""
        return {
            "data": self.data,
            "fsdp": self.fsdp,
            "context": self.context,
            "expert": self.expert,
            "tensor": self.tensor,
        }

    def overrides(self) -> list[str]:
        """The overrides of one of its processes."""
        attention = "xla"
        if self.context > 1:
            attention = "ring"
        return [
            *(f"mesh.{axis}={size}" for axis, size in self.axes().items()),
            f"mesh.simulated_devices={self.devices // self.processes}",
            f"model.attention={attention}",
            f"optimizer.accumulation={self.accumulation}",
        ]


def shapes(processes: int) -> list[JobShape]:
    """All layouts that fit the batch, the heads and the experts of the victims."""
    found = []
    for devices in DEVICES:
        if devices % processes:
            continue
        for data, context, expert, tensor in itertools.product(
            (1, 2, 4, 8), (1, 2), (1, 4), (1, 2)
        ):
            fsdp, rest = divmod(devices, data * context * expert * tensor)
            if rest or not fsdp:
                continue
            for accumulation in ACCUMULATIONS:
                if ROWS % (data * fsdp * expert * accumulation) == 0:
                    shape = JobShape(processes, data, fsdp, context, expert, tensor, accumulation)
                    found.append(shape)
    return found


class MeshJob:
    """The processes of an attempt."""

    def __init__(self, scene: Scene, name: str, shape: JobShape):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        self.members: list[ForkedProcess | subprocess.Popen] = []
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


def unlike(left: RunFiles, reference: RunFiles) -> tuple[list[str], float]:
    """Return how a run differs from the reference, and the largest relative difference of a
    loss.
    """
    problems = []
    largest = 0.0
    if left.steps != list(range(1, left.last + 1)):
        problems.append(f"the records have not every step up to {left.last} once, in order")
    expected = dict(zip(reference.keys(), reference.records, strict=True))
    for key, record in zip(left.keys(), left.records, strict=True):
        other = expected.get(key)
        if other is None:
            problems.append(f"there is a record that the reference has not: {key}")
            continue
        step = record["step"]
        for name in SAME:
            ours = record.get(name)
            theirs = other.get(name)
            if ours != theirs:
                problems.append(f"{name} differs at step {step}: {ours}, {theirs}")
        if record["kind"] == "train" and not record.get("batch_hash"):
            problems.append(f"step {step} has no digest of its batch")
        loss = "nll"
        if record["kind"] == "train":
            loss = "loss"
        difference = abs(record[loss] - other[loss]) / abs(other[loss])
        largest = max(largest, difference)
        if not difference <= TOLERANCE:
            problems.append(f"loss differs by {difference:.1e} of itself at step {step}")
    del problems[5:]
    problems += [f"not whole: {what}" for what in left.bad]
    problems += [f"put aside: {name}" for name in left.aside()]
    return problems, largest


def meshes(folder: Path, tally: Tally, args: argparse.Namespace) -> None:
    """Make attempts, each with another layout than the one before it; the last attempt of a run
    reaches its end, most others are stopped.
    """
    scene = Scene(folder / "meshes", **CHANGES)
    rng = random.Random(args.seed)
    # Nearly every layout is compiled anew, which must not take long.
    scene.environment["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    reference = scene.reference()
    counts = collections.Counter[str]()
    largest = 0.0
    runs = 0
    while not tally.done():
        name = f"{tally.name}-{runs}"
        problems: list[str] = []
        codes: list[int | str] = []
        before: JobShape | None = None
        while not problems and codes != [0] * max(1, len(codes)):
            shape = _another_shape(before, rng)
            last = tally.done()
            codes, by = _attempt(scene, name, shape, rng, last)
            left = RunFiles(scene.runs / name)
            problems, difference = unlike(left, reference)
            largest = max(largest, difference)
            if not set(codes) <= ALLOWED_CODES[by]:
                problems.append(f"ended with {codes} after {by}")
            if before and not last:
                kind = "one process, or as many"
                if before.processes != shape.processes:
                    kind = "other processes"
                counts[kind] += 1
                where = f"{name}, from {before} to {shape}"
                tally.count(failure(where, problems), f"step {left.last}, {shape}")
            elif problems:
                # The first attempt of a run, or the one that ends the last run.
                tally.fail(failure(f"{name}, {shape}", problems))
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
        f"{runs} runs of {scene.steps} steps: {kinds}. Batches are the same bit for bit; losses "
        f"differ by at most {largest:.1e} of themselves, {TOLERANCE:.0e} are allowed."
    )


def _another_shape(before: JobShape | None, rng: random.Random) -> JobShape:
    """A layout that is not the one before."""
    processes = 1
    if rng.random() < 0.2 or (before and before.processes == 2 and rng.random() < 0.3):
        processes = 2
    return rng.choice([shape for shape in shapes(processes) if shape != before])


def _attempt(
    scene: Scene, name: str, shape: JobShape, rng: random.Random, last: bool
) -> tuple[list[int | str], str]:
    """Starts a job, and stops it some steps later, unless it is the last.

    Returns:
        The exit codes, and how it was stopped.
    """
    newest = RunFiles(scene.runs / name).newest
    progress = AttemptProgress(scene.runs / name, newest + rng.randrange(3, 25))
    job = MeshJob(scene, name, shape)
    by = "nothing"
    if not last:
        by = rng.choice(list(SIGNALS))
        if wait_for(progress.has_made_a_step, job.members[0]):
            time.sleep(rng.uniform(0, 0.05))
        job.send_signal(SIGNALS[by])
    return job.end(PATIENCE), by
