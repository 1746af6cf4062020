"""Speed of devices: their products, their memory and their network."""

import math
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from data_pipeline.base.errors import ConfigError
from maxtrain.config.across.attention_choice import Hardware

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


class Links(NamedTuple):
    """Memory and network of one device as jax counts devices, as the makers' pages have them.

    Attributes:
        memory: bytes a second of its memory.
        link: bytes a second in one direction; of a TPU, of one link to a neighbour; of a GPU, to
            all others of its host together.
        beyond: bytes a second in one direction to other hosts of GPUs, or to other slices of TPUs;
            None: it is not known.
        ring: of a TPU: a dim of the torus whose size this divides is closed to a ring.
        ports: links of a TPU.
    """

    memory: float
    link: float
    beyond: float | None
    ring: int = 1
    ports: int = 1

    @property
    def is_torus(self) -> bool:
        """Return whether devices are wired to their neighbours alone, as TPUs are."""
        return self.ports > 1

    @property
    def near(self) -> float:
        """Bytes a second in one direction over all links of a device."""
        return self.link * self.ports


# TPUs: https://cloud.google.com/tpu/docs/v5e, v5p, v6e and tpu7x. "Bidirectional bandwidth per
# chip" is divided by both directions and by the links: 4 of a chip of v5e and v6e (400 and 800
# GB/s), 6 of v5p and tpu7x (1,200 and 2,400 GB/s). A device of tpu7x is half of a chip. Dims of 16
# of v5e and v6e, and multiples of 4 of the others, are closed to rings.
# Between slices, the pages have 50 Gbit/s of a chip of v5p, and network cards of 2 x 100 and of 4 x
# 200 Gbit/s for the 8 chips of a host of v5e and of v6e.
# GPUs: the data sheets of A100, H100, H200 and HGX B200. NVLink of SXM has 600, 900 and 1,800 GB/s
# in both directions; DGX systems have one port of 200 or 400 Gbit/s for each GPU. First match
# counts.
LINKS = (
    ("gb200", Links(8e12, 900e9, 50e9)),
    ("b200", Links(8e12, 900e9, 50e9)),
    ("h200", Links(4.8e12, 450e9, 50e9)),
    ("h100 pcie", Links(2e12, 64e9, 50e9)),
    ("h100 nvl", Links(3.9e12, 300e9, 50e9)),
    ("h100", Links(3.35e12, 450e9, 50e9)),
    ("a100-pcie", Links(1.935e12, 32e9, 25e9)),
    ("a100", Links(2.039e12, 300e9, 25e9)),
    ("tpu7x", Links(3.69e12, 100e9, None, ring=4, ports=3)),
    ("tpu v6", Links(1.64e12, 100e9, 12.5e9, ring=16, ports=4)),
    ("tpu v5 lite", Links(819e9, 50e9, 3.125e9, ring=16, ports=4)),
    ("tpu v5e", Links(819e9, 50e9, 3.125e9, ring=16, ports=4)),
    ("tpu v5", Links(2.765e12, 100e9, 6.25e9, ring=4, ports=6)),
    ("tpu v4", Links(1.228e12, 25e9, None, ring=4, ports=6)),
)

# Measurements of a CPU's peak in one run, 0.3 s each.
_MOST_MEASUREMENTS = 4


def hardware_of(device: Any) -> Hardware:
    """Return what a device is, whether it is here or only described."""
    if device.platform == "cpu":
        return Hardware("cpu", "CPUs")
    capability = None
    if device.platform == "gpu":
        capability = _compute_capability(getattr(device, "compute_capability", None))
    return Hardware(device.platform, device.device_kind, capability)


def _compute_capability(said: str | None) -> tuple[int, int] | None:
    """Parse a compute capability such as 9.0; (0, 0) for a card with a name such as gfx942; None if
    it is missing.
    """
    if said is None:
        return None
    found = re.fullmatch(r"(\d+)\.(\d+)", said)
    if found is None:
        return 0, 0
    return int(found[1]), int(found[2])


def compiler_options(platform: str) -> dict[str, int]:
    """Return the compiler options of large programs.

    XLA uses the 512-bit vectors of a CPU only with this option; that saves a tenth of a step.

    Among 64 and more TPUs, the compiler writes each all-gather as an all-reduce of arrays that are
    zero but for a part, which sends twice as much, unless gathers may overlap with other work. On
    chips that have SparseCores, these must make them for that.
    """
    if platform == "cpu":
        return {"xla_cpu_prefer_vector_width": 512}
    if platform == "tpu":
        return {
            "xla_tpu_prefer_async_allgather_to_allreduce": True,
            "xla_tpu_enable_sparse_core_collective_offload_all_gather": True,
        }
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


def peak_or(tflops: float | None, device: Any, dtype: str) -> float:
    """FLOP/s that one device can reach: those that the config says, in TFLOP/s; None: as
    `peak_flops` finds, which raises."""
    if tflops:
        return tflops * 1e12
    return peak_flops(device, dtype)


def peak_from_table(kind: str) -> float | None:
    """FLOP/s of products of bfloat16 on one device of this kind; None: it is not known."""
    tflops = _first(PEAK_TFLOPS, kind)
    if tflops is None:
        return None
    return tflops * 1e12


def known_links(kind: str) -> Links | None:
    """Memory and network of one device of this kind; None: the table doesn't know it."""
    return _first(LINKS, kind)


def memory_bandwidth(kind: str) -> float | None:
    """Bytes per second of the memory of one device of this kind; None: it is not known."""
    found = known_links(kind)
    if found is None:
        return None
    return found.memory


def slice_of(device: Any) -> int:
    """The number of its slice; described devices of one slice have none."""
    return getattr(device, "slice_index", None) or 0


def links(device: Any) -> Links:
    """Memory and network of a device.

    Raises:
        ConfigError: the table doesn't know it.
    """
    found = known_links(device.device_kind)
    if found is None:
        known = "v5e, v5p, v6e, tpu7x, h100, h200 or b200"
        raise ConfigError(
            f"topology: no bandwidths are known for {device.device_kind!r}. Use one of {known}."
        )
    return found


def _first[T](table: Sequence[tuple[str, T]], kind: str) -> T | None:
    """The first row whose name is a part of the kind of a device."""
    for name, value in table:
        if name in kind.lower():
            return value
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
        self._flops = peak_or(tflops, device, dtype)

    def share(self, flops: float) -> float | None:
        """Return which share of the peak these FLOP/s of one device are.

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
