"""Memory of a device and waiting of stages in a step with its layers in stages, as rows come in
more micro-batches, in more passes or in more rounds, and by both schedules.

    python -m benchmarks.stages [--topology v5p:2x2x1]

prints the table of benchmarks/results/stages.md. The step is compiled for four devices that this
machine's CPU pretends to have, or for those of a topology; nothing is executed.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from maxtrain.config import RunConfig, load_config
from maxtrain.models.pipeline import PipelineLayout
from maxtrain.parallel.topologies import described_devices
from maxtrain.trainer.abstract_step import StepPrograms

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


class StageCase(NamedTuple):
    """Rows of a step, each of them a micro-batch.

    Attributes:
        rows: N.
        accumulation: k, passes one after the other, each with N / k micro-batches.
        rounds: R.
        schedule: of micro-batches.
        remat: what the backward pass computes again.
    """

    rows: int
    accumulation: int = 1
    rounds: int = 1
    schedule: str = "gpipe"
    remat: str = "full"

    @property
    def form(self) -> PipelineLayout:
        """Form of one pass."""
        return PipelineLayout(STAGES, self.rounds, self.rows // self.accumulation)

    @property
    def config(self) -> RunConfig:
        words = (
            f"data.batch_size={self.rows}",
            f"optimizer.accumulation={self.accumulation}",
            f"model.pipeline.rounds={self.rounds}",
            f"model.pipeline.schedule={self.schedule}",
            f"model.remat={self.remat}",
        )
        return load_config([*MODEL, *words])

    @property
    def kept(self) -> float:
        """Micro-batches whose layers' inputs a stage keeps, at least.

        With gpipe, of each iteration those of one of its R blocks. With 1f1b, the inputs of the
        stage of 2 S - 1 micro-batches, and those of all its layers of the one that it takes back.
        """
        if self.schedule == "1f1b":
            return 1 + (2 * STAGES - 1) / (LAYERS // STAGES)
        return self.form.iterations() / self.rounds


CASES = (
    StageCase(4, remat="none"),
    StageCase(32, remat="none"),
    StageCase(4),
    StageCase(8),
    StageCase(16),
    StageCase(32),
    StageCase(32, accumulation=2),
    StageCase(32, accumulation=4),
    StageCase(32, accumulation=4, rounds=2),
    StageCase(32, accumulation=8, rounds=4),
    StageCase(4, schedule="1f1b"),
    StageCase(8, schedule="1f1b"),
    StageCase(16, schedule="1f1b"),
    StageCase(32, schedule="1f1b"),
    StageCase(4, schedule="1f1b", remat="none"),
    StageCase(32, schedule="1f1b", remat="none"),
)
HEAD = (
    "| schedule | remat | rows | accumulation | rounds | stages wait | keep | these, MiB "
    "| temporaries, MiB |\n|---|---" + "|--:" * 7 + "|"
)


def temporaries(case: StageCase, devices: Sequence[Any]) -> int:
    """Bytes on each device of the compiled step beside its arguments and results."""
    compiled = StepPrograms(case.config, devices).compile(case.rows, LENGTH)
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


def row(case: StageCase, num_bytes: int) -> str:
    """Return a row of the table."""
    cells = [
        case.schedule,
        case.remat,
        f"{case.rows}",
        f"{case.accumulation}",
        f"{case.rounds}",
        f"{case.form.waiting():.1%}",
        f"{case.kept:.1f}",
        f"{case.kept * UNIT / (1 << 20):,.0f}",
        f"{num_bytes / (1 << 20):,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages")
    parser.add_argument("--topology", help="four devices of another kind, such as v5p:2x2x1")
    args = parser.parse_args(argv)
    if args.topology:
        devices = described_devices(args.topology)
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
