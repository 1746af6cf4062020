"""Time of steps with layers in stages, as there are more micro-batches or more rounds, beside the
share of waiting that a run prints.

    python -m benchmarks.stage_seconds [--steps 7]

prints the last two tables of benchmarks/results/stages.md: how long steps take, and what both
schedules compute again. Four stages are four devices that this
machine's CPU pretends to have. A stage that waits computes all the same, on rows that are used
nowhere, and simulated devices share the cores. So what a step takes is the work of all stages
together, with waiting in it: (R M + S - 1) / R times that of a micro-batch. On real devices, stages
work at the same time, and the same factor is that of the time.

Micro-batches are of one size, so that the products in them are, too. Steps of all forms take turns,
so that what else the machine does falls on all of them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.fit_here import random_batch
from benchmarks.one_core import processor
from benchmarks.stages import STAGES
from maxtrain.commands.fit.estimate import RowBatchShape
from maxtrain.config import load_config
from maxtrain.models.pipeline import PipelineLayout
from maxtrain.trainer.abstract_step import StepPrograms

# Of a micro-batch.
ROWS = 4
LENGTH = 64
MODEL = (
    "config=llama3_8b",
    "model.vocab_size=256",
    "model.num_layers=8",
    "model.embed_dim=256",
    "model.mlp_dim=512",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=64",
    "precision.compute=float32",
    "optimizer.accumulation=1",
    f"data.seq_length={LENGTH}",
    "mesh.fsdp=1",
    f"mesh.stage={STAGES}",
)
FORMS = (
    PipelineLayout(STAGES, 1, 1),
    PipelineLayout(STAGES, 1, 2),
    PipelineLayout(STAGES, 1, 4),
    PipelineLayout(STAGES, 1, 8),
    PipelineLayout(STAGES, 2, 4),
    PipelineLayout(STAGES, 2, 8),
)
HEAD = (
    "| micro-batches | rounds | stages wait, as printed | CPU s of a step | wait, by CPU s | s "
    "| wait, by s |\n|" + "--:|" * 7
)
HEAD_OF_SCHEDULES = (
    "| schedule | remat | temporaries, MiB | CPU s of a step | of gpipe with none | s |\n"
    "|---|---" + "|--:" * 4 + "|"
)


class StepTime(NamedTuple):
    """Time of one step: wall time, and that of all cores together."""

    seconds: float
    cpu_seconds: float


class PipelineSchedule(NamedTuple):
    """Schedule of micro-batches, and what the backward pass computes again."""

    name: str = "gpipe"
    remat: str = "none"


# Of these, steps of the form with most micro-batches are compared.
SCHEDULES = (
    PipelineSchedule("gpipe", "none"),
    PipelineSchedule("gpipe", "full"),
    PipelineSchedule("1f1b", "none"),
    PipelineSchedule("1f1b", "full"),
)
MOST = FORMS[3]


class CompiledStep:
    """The compiled step of a form, with its state."""

    def __init__(
        self,
        form: PipelineLayout,
        devices: Sequence[Any],
        schedule: PipelineSchedule = SCHEDULES[0],
    ):
        batch = RowBatchShape(ROWS * form.micro_batches, LENGTH)
        words = (
            f"data.batch_size={batch.rows}",
            f"model.pipeline.micro_batches={form.micro_batches}",
            f"model.pipeline.rounds={form.rounds}",
            f"model.pipeline.schedule={schedule.name}",
            f"model.remat={schedule.remat}",
        )
        programs = StepPrograms(load_config([*MODEL, *words]), devices)
        self._mesh = programs.parts.mesh
        self._compiled = programs.compile(*batch)
        memory = self._compiled.memory_analysis()
        assert memory is not None
        self.temporaries: int = memory.temp_size_in_bytes
        with jax.set_mesh(self._mesh):
            self._state = programs.parts.initial_state()
            self._batch = random_batch(programs, batch)

    def step(self) -> StepTime:
        with jax.set_mesh(self._mesh):
            start = time.perf_counter()
            cpu = time.process_time()
            self._state, metrics = self._compiled(self._state, self._batch)
            jax.block_until_ready((self._state, metrics))
            return StepTime(time.perf_counter() - start, time.process_time() - cpu)


def measured(made: Sequence[CompiledStep], steps: int) -> list[StepTime]:
    """The medians of each of them, after one step that does not count."""
    for one in made:
        took = one.step()
        print(f"the first step took {took.seconds:.1f} s", file=sys.stderr, flush=True)
    rounds = [[one.step() for one in made] for _ in range(steps)]
    medians = []
    for of_form in zip(*rounds, strict=True):
        times = zip(*of_form, strict=True)
        medians.append(StepTime(*(statistics.median(each) for each in times)))
    return medians


def waiting(forms: Sequence[PipelineLayout], times: Sequence[float]) -> list[float]:
    """The share of a step that is more than its micro-batches need.

    What one needs is the slope of the straight line through the times of one round by the number of
    micro-batches: each of them adds as much, and stages wait as long for few as for many.
    """
    took = list(zip(forms, times, strict=True))
    counts = [form.micro_batches for form in forms if form.rounds == 1]
    of_one, _ = np.polyfit(counts, [each for form, each in took if form.rounds == 1], 1)
    return [float(1 - of_one * form.micro_batches / each) for form, each in took]


def rows(forms: Sequence[PipelineLayout], found: Sequence[StepTime]) -> list[str]:
    """Return the rows of the table."""
    by_seconds = waiting(forms, [each.seconds for each in found])
    by_cpu = waiting(forms, [each.cpu_seconds for each in found])
    lines = []
    for form, each, of_seconds, of_cpu in zip(forms, found, by_seconds, by_cpu, strict=True):
        cells = [
            f"{form.micro_batches}",
            f"{form.rounds}",
            f"{form.waiting():.0%}",
            f"{each.cpu_seconds:.2f}",
            f"{of_cpu:.0%}",
            f"{each.seconds:.2f}",
            f"{of_seconds:.0%}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def rows_of_schedules(made: Sequence[CompiledStep], found: Sequence[StepTime]) -> list[str]:
    """Return the rows of the table of schedules."""
    least = found[0].cpu_seconds
    lines = []
    for schedule, steps, each in zip(SCHEDULES, made, found, strict=True):
        cells = [
            schedule.name,
            schedule.remat,
            f"{steps.temporaries / (1 << 20):,.0f}",
            f"{each.cpu_seconds:.2f}",
            f"{each.cpu_seconds / least:.2f}",
            f"{each.seconds:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stage_seconds")
    parser.add_argument("--steps", type=int, default=7, help="of each form")
    args = parser.parse_args(argv)
    devices = jax.devices()[:STAGES]
    print(processor())
    found = measured([CompiledStep(form, devices) for form in FORMS], args.steps)
    print(HEAD)
    print("\n".join(rows(FORMS, found)), flush=True)
    of_schedules = [CompiledStep(MOST, devices, schedule) for schedule in SCHEDULES]
    found = measured(of_schedules, args.steps)
    print(HEAD_OF_SCHEDULES)
    print("\n".join(rows_of_schedules(of_schedules, found)))
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    sys.exit(main())
