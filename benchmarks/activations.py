"""Memory of a training step with float32 and with bfloat16 activations, compiled from shapes alone.

    python -m benchmarks.activations [--topology v5p:2x2x1] config=NAME [key=value ...]

Nothing is executed. Without --topology the devices are those of this machine; with it, TPUs that
need not be here (libtpu's compiler).
"""

import argparse
import dataclasses
import sys

import jax

from maxtrain.config import from_command_line
from maxtrain.parallel.batches import abstract_batch
from maxtrain.parallel.topologies import described_devices
from maxtrain.trainer.abstract_step import StepMemory

MIB = 1 << 20


def temporary_bytes(memory: StepMemory, rows: int, length: int) -> int:
    """Return the bytes on one device, beside the state and the batch."""
    batch = abstract_batch(memory.parts.mesh, rows, length)
    with jax.set_mesh(memory.parts.mesh):
        compiled = memory.step.lower(memory.parts.abstract, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.activations")
    parser.add_argument("--topology", help="TPUs to compile for, such as v5p:2x2x1")
    parser.add_argument("--rows", type=int, default=1, help="of each device")
    args, words = parser.parse_known_args(argv)
    config = from_command_line(words, "python -m benchmarks.activations")
    devices = jax.devices()
    if args.topology:
        devices = described_devices(args.topology)
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    found = {}
    for activations in ("float32", "bfloat16"):
        precision = dataclasses.replace(config.precision, activations=activations)
        memory = StepMemory(dataclasses.replace(config, precision=precision), devices)
        rows = args.rows * memory.unit
        found[activations] = temporary_bytes(memory, rows, config.data.seq_length)
        print(f"{activations}: {found[activations] / MIB:,.0f} MiB temporary", flush=True)
    print(f"bfloat16 needs {found['bfloat16'] / found['float32']:.2f} of float32's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
