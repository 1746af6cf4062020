"""Memory of training adapters when the weights below them are kept as they are, in eight bits, and
in four, compiled from shapes alone.

    python -m benchmarks.quantized [--topology v5p:1x1x1] config=NAME [key=value ...]

Nothing is executed. Without --topology the devices are those of this machine; with it, TPUs that
need not be here (libtpu's compiler). Prints a table.
"""

import argparse
import dataclasses
import sys
from typing import Any

import jax

from benchmarks.activations import MIB, temporary_bytes
from maxtrain.config import from_command_line
from maxtrain.config.schema import LoraConfig, RunConfig
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.parallel.topologies import described_devices
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import policy_params
from maxtrain.trainer.abstract_step import StepMemory


def bytes_of_products(memory: StepMemory) -> int:
    """Return the bytes of the kernels of products with adapters on one device, or of what takes
    their place.
    """
    found = 0
    params = paths(policy_params(memory.parts.abstract))
    adapted = {name.partition(".adapter.")[0] for name in params if ".adapter." in name}
    for name, variable in params.items():
        product, is_kernel, _ = name.partition(".kernel")
        if is_kernel and product in adapted:
            found += bytes_on_device(variable.get_value())
    return found


def with_base(config: RunConfig, base: Any) -> RunConfig:
    """The config with another base of its adapters."""
    block = config.model.lora.base_block
    if base == "full":
        block = LoraConfig().base_block
    lora = dataclasses.replace(config.model.lora, base=base, base_block=block)
    return dataclasses.replace(config, model=dataclasses.replace(config.model, lora=lora))


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.quantized")
    parser.add_argument("--topology", help="TPUs to compile for, such as v5p:1x1x1")
    parser.add_argument("--rows", type=int, default=1, help="of each device")
    args, words = parser.parse_known_args(argv)
    words = ["model.lora.rank=16", *words]
    config = from_command_line(words, "python -m benchmarks.quantized")
    devices = jax.devices()
    if args.topology:
        devices = described_devices(args.topology)
    print(f"{len(devices)} x {devices[0].device_kind}, jax {jax.__version__}")
    print("| base | products with adapters | all parameters | optimizer | temporary |")
    print("|---|--:|--:|--:|--:|")
    for base in ("full", "int8", "nf4"):
        memory = StepMemory(with_base(config, base), devices)
        abstract = memory.parts.abstract
        params = [abstract.trainable, abstract.frozen[POLICY]]
        sizes = [
            bytes_of_products(memory),
            bytes_on_device(params),
            bytes_on_device(abstract.opt_state),
            temporary_bytes(memory, args.rows * memory.unit, config.data.seq_length),
        ]
        cells = " | ".join(f"{size / MIB:,.1f}" for size in sizes)
        print(f"| {base} | {cells} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
