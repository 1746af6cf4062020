"""What a device keeps in a step with its layers in stages, and how long stages wait, as rows come
in more micro-batches, in more passes or in more rounds; and what 1F1B would keep, by arithmetic.

    python -m benchmarks.stages [--topology v5p:2x2x1]

prints the table of benchmarks/results/stages.md. The step is compiled for four devices that this
machine's CPU pretends to have, or for those of a topology; nothing is executed.

1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473, section 2.2) begins the backward pass
of a micro-batch as soon as the last stage has it. In one program for all devices, every iteration
then has room for a forward and a backward part: stage s computes micro-batch i forward in iteration
i + s and backward in iteration i + 2 (S - 1) - s. So N micro-batches take N + 2 (S - 1) iterations,
and the first stage keeps 2 S - 1 of them.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from maxtrain.config import RunConfig, load_config
from maxtrain.models.pipeline import Form
from maxtrain.parallel.topologies import described_devices
from maxtrain.step_memory import StepPrograms

STAGES = 4
LAYERS = 32
LENGTH = 1024
WIDTH = 128
# Narrow beside its rows, so that what is kept of them counts. In float32, which CPUs keep as it is.
MODEL = (
    "config=llama3_8b",
    "model.vocab_size=256",
    f"model.num_layers={LAYERS}",
    "model.scan_layers=true",
    f"model.embed_dim={WIDTH}",
    "model.mlp_dim=128",
    "model.num_heads=2",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    f"model.max_length={LENGTH}",
    f"data.seq_length={LENGTH}",
    "precision.compute=float32",
    "mesh.fsdp=1",
    f"mesh.stage={STAGES}",
)
# The inputs of a stage's layers, of one row.
UNIT = LAYERS // STAGES * LENGTH * WIDTH * 4


class Case(NamedTuple):
    """Rows of a step, each of them a micro-batch.

    Attributes:
        rows: N.
        accumulation: k, passes one after the other, each with N / k micro-batches.
        rounds: R.
    """

    rows: int
    accumulation: int = 1
    rounds: int = 1

    @property
    def form(self) -> Form:
        """Of one pass."""
        return Form(STAGES, self.rounds, self.rows // self.accumulation)

    @property
    def config(self) -> RunConfig:
        words = [f"data.batch_size={self.rows}", f"optimizer.accumulation={self.accumulation}"]
        return load_config([*MODEL, *words, f"model.pipeline.rounds={self.rounds}"])

    @property
    def kept(self) -> float:
        """Micro-batches whose layers' inputs a stage keeps: of each iteration, those of one of its
        R blocks."""
        return self.form.iterations() / self.rounds


CASES = (
    Case(4),
    Case(8),
    Case(16),
    Case(32),
    Case(32, accumulation=2),
    Case(32, accumulation=4),
    Case(32, accumulation=4, rounds=2),
    Case(32, accumulation=8, rounds=4),
)
HEAD = (
    "| rows | accumulation | rounds | stages wait | keep | these, MiB | temporaries, MiB "
    "| 1F1B would wait | and keep |\n|" + "--:|" * 9
)


def waiting_of_1f1b(rows: int) -> float:
    """The share of iterations, each with a forward and a backward part, in which a stage waits."""
    return 2 * (STAGES - 1) / (rows + 2 * (STAGES - 1))


def kept_by_1f1b(rows: int) -> int:
    """Micro-batches whose layers' inputs the first stage keeps."""
    return min(rows, 2 * STAGES - 1)


def temporaries(case: Case, devices: Sequence[Any]) -> int:
    """Bytes on each device of the compiled step beside its arguments and results."""
    compiled = StepPrograms(case.config, devices).compile(case.rows, LENGTH)
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def row(case: Case, num_bytes: int) -> str:
    """Of the table."""
    cells = [
        f"{case.rows}",
        f"{case.accumulation}",
        f"{case.rounds}",
        f"{case.form.waiting():.1%}",
        f"{case.kept:.1f}",
        f"{case.kept * UNIT / (1 << 20):,.0f}",
        f"{num_bytes / (1 << 20):,.0f}",
        f"{waiting_of_1f1b(case.rows):.1%}",
        f"{kept_by_1f1b(case.rows)}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages")
    parser.add_argument("--topology", help="four devices of another kind, such as v5p:2x2x1")
    asked = parser.parse_args(argv)
    if asked.topology:
        devices = described_devices(asked.topology)
    else:
        devices = jax.devices()[:STAGES]
    print(HEAD)
    for case in CASES:
        print(row(case, temporaries(case, devices)), flush=True)
    return 0


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", STAGES)
    sys.exit(main())
