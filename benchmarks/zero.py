"""Bytes on each of 8 devices for each stage of ZeRO, as the compiler counts them; nothing is
computed.

    python -m benchmarks.zero

prints the table of benchmarks/results/zero.md.
"""

from typing import Any

import jax
import numpy as np

from maxtrain.config.schema import MeshConfig, ModelConfig, OptimizerConfig, RunConfig
from maxtrain.parallel.sharding import named_sharding
from maxtrain.trainer.job import make_parts

ROWS = 16
LENGTH = 512
MODEL = ModelConfig(
    vocab_size=8192,
    num_layers=8,
    embed_dim=512,
    mlp_dim=1536,
    num_heads=8,
    num_kv_heads=8,
    remat="full",
    loss_chunk=512,
)


def measure(zero: int, devices: list[Any]) -> Any:
    """The memory analysis of the step, of two micro-batches, at one stage."""
    mesh = MeshConfig(data=len(devices), fsdp=1)
    config = RunConfig(model=MODEL, mesh=mesh, optimizer=OptimizerConfig(zero=zero, accumulation=2))
    parts = make_parts(config, devices, 100, 1)
    rows = named_sharding(parts.mesh, ("activation_batch", "activation_length"), (ROWS, LENGTH))
    ids = jax.ShapeDtypeStruct((ROWS, LENGTH), np.int32, sharding=rows)
    batch = {
        "inputs": ids,
        "targets": ids,
        "segment_ids": ids,
        "positions": ids,
        "loss_mask": jax.ShapeDtypeStruct((ROWS, LENGTH), np.float32, sharding=rows),
    }
    with jax.set_mesh(parts.mesh):
        compiled = parts.make_step().lower(parts.abstract, batch).compile()
    return compiled.memory_analysis()


def main() -> int:
    devices = jax.devices()[:8]
    print(f"8 x {devices[0].device_kind}, mesh.data=8; MB a device\n")
    print("| optimizer.zero | state | temporary | together |\n|--:|--:|--:|--:|")
    for zero in range(4):
        memory = measure(zero, devices)
        state = memory.argument_size_in_bytes / 1e6
        temporary = memory.temp_size_in_bytes / 1e6
        together = state + temporary
        print(f"| {zero} | {state:,.1f} | {temporary:,.1f} | {together:,.1f} |", flush=True)
    return 0


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)
    raise SystemExit(main())
