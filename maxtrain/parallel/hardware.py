"""How fast devices are, for model FLOPs utilisation."""

import math
import time
from typing import Any

import jax
import jax.numpy as jnp

from data_pipeline.errors import ConfigError

# Dense bf16 TFLOP/s of one device as jax counts devices, from the makers' data sheets (no
# sparsity). First match counts.
PEAK_TFLOPS = (
    ("gb200", 2500.0),
    ("b200", 2250.0),
    ("h200", 989.5),
    ("h100 pcie", 756.5),
    ("h100 nvl", 835.5),
    ("h100", 989.5),
    ("a100", 312.0),
    ("tpu7x", 1153.5),  # a device is one of the chip's two chiplets
    ("tpu v6", 918.0),
    ("tpu v5p", 459.0),
    ("tpu v5 lite", 197.0),
    ("tpu v5e", 197.0),
    ("tpu v5", 459.0),
    ("tpu v4", 275.0),
)
# GB/s of the links of one device to others, both directions together, from the makers' data sheets:
# NVLink, or PCIe where there is none; a TPU's inter-chip interconnect. First match counts.
LINK_GBPS = (
    ("gb200", 1800.0),
    ("b200", 1800.0),
    ("h200", 900.0),
    ("h100 pcie", 128.0),
    ("h100 nvl", 600.0),
    ("h100", 900.0),
    ("a100-pcie", 64.0),
    ("a100", 600.0),
    ("tpu7x", 600.0),  # half of the chip's
    ("tpu v6", 800.0),
    ("tpu v5p", 1200.0),
    ("tpu v5 lite", 400.0),
    ("tpu v5e", 400.0),
    ("tpu v5", 1200.0),
    ("tpu v4", 300.0),
)

# Measurements of a CPU's peak in one run, 0.3 s each.
_MOST_MEASUREMENTS = 4


def compiler_options(platform: str) -> dict[str, int]:
    """What the large programs are compiled with.

    CPUs with 512-bit vectors use them only if told to; that saves a tenth of a step.
    """
    if platform == "cpu":
        return {"xla_cpu_prefer_vector_width": 512}
    return {}


def peak_flops(device: Any, dtype: str) -> float:
    """FLOP/s that one device can reach in matrix products.

    It is from the table, or on a CPU measured with inputs of `dtype`.

    Raises:
        ConfigError: an accelerator that the table doesn't know.
    """
    if device.platform == "cpu":
        return measure_matmul(dtype) / jax.local_device_count()
    peak = peak_from_table(device.device_kind)
    if peak is None:
        rule = f"no peak is known for {device.device_kind!r}"
        raise ConfigError(f"observe.peak_tflops=null: {rule}. Set it from the data sheet.")
    return peak


def peak_from_table(kind: str) -> float | None:
    """FLOP/s of products of bfloat16 on one device of this kind; None: it is not known."""
    for name, tflops in PEAK_TFLOPS:
        if name in kind.lower():
            return tflops * 1e12
    return None


def link_bytes(kind: str) -> float | None:
    """Bytes per second that one device of this kind can send to others, over all of its links;
    None: it is not known."""
    for name, gbps in LINK_GBPS:
        if name in kind.lower():
            return gbps * 1e9 / 2
    return None


class Peak:
    """The FLOP/s that one device can reach, which the speed of a run is held against.

    Args:
        tflops: of the device in TFLOP/s, as the config says; None: as `peak_flops` finds.
        device: of this process.
        dtype: of the inputs of matrix products.

    Raises:
        ConfigError: an accelerator that the table doesn't know.
    """

    def __init__(self, tflops: float | None, device: Any, dtype: str):
        self._device = device
        self._dtype = dtype
        self._is_measured = tflops is None and device.platform == "cpu"
        self._measurements = 1
        if tflops:
            self._flops = tflops * 1e12
        else:
            self._flops = peak_flops(device, dtype)

    def share(self, flops: float) -> float | None:
        """Which share of the peak these FLOP/s of one device are.

        More than a measured peak means that it was measured while the machine was busy: it is
        measured again. None: still more.
        """
        while self._is_measured and flops > self._flops and self._measurements < _MOST_MEASUREMENTS:
            self._measurements += 1
            self._flops = max(self._flops, peak_flops(self._device, self._dtype))
        if not math.isfinite(flops) or (self._is_measured and flops > self._flops):
            return None
        return flops / self._flops


def measure_matmul(dtype: str, seconds: float = 0.3) -> float:
    """FLOP/s of this machine in the best of several 4096 x 512 x 1376 matrix products.

    They accumulate in float32.
    """

    @jax.jit
    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            "mk,kn->mn", a, b, precision="highest", preferred_element_type=jnp.float32
        )

    m, k, n = 4096, 512, 1376
    a = jnp.ones((m, k), dtype)
    b = jnp.ones((k, n), dtype)
    dot(a, b).block_until_ready()
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        dot(a, b).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return 2 * m * k * n / best
