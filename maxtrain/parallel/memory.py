"""How much memory a device has and a compiled program needs, and the largest size of it that fits. Executes nothing."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from data_pipeline.errors import ConfigError

# GiB that programs may use of one TPU device of a described topology: what libtpu 0.0.50 says that there are when it refuses
# more ("available HBM"). A v4 is described as two devices a chip. First match counts.
_V5 = (("tpu v5 lite", 15.75), ("tpu v5e", 15.75), ("tpu v5", 95.73))
TPU_GIB = (("tpu7x", 94.74), ("tpu v6", 31.24), *_V5, ("tpu v4", 15.25), ("tpu v3", 15.48))
_GROUPS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def memory_limit(device: Any, described: bool = False) -> int:
    """Bytes that programs may use on a device; `described`: it is one of a topology, not of this machine.

    CPU devices share what the host has available. ConfigError: a described device that the table does not know.
    """
    if described:
        kind = device.device_kind.lower()
        if gib := next((gib for name, gib in TPU_GIB if name in kind), None):
            return int(gib * (1 << 30))
        raise ConfigError(f"topology: no memory is known for {device.device_kind!r}. Give it with --memory BYTES.")
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else available_memory() // jax.local_device_count()


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take from the host: what is free, and what its control group leaves."""
    info = root / "proc/meminfo"
    if not info.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    assert found is not None
    free = 1024 * int(found[1])
    for limit, used in ((root / "sys/fs/cgroup" / a, root / "sys/fs/cgroup" / b) for a, b in _GROUPS):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def compile_for_bytes(lowered: jax.stages.Lowered) -> int | None:
    """Bytes on each device that a program needs: arguments, results that are not in their place, and temporary ones.

    None: the compiler itself finds that they are more than there are.
    """
    try:
        memory = lowered.compile().memory_analysis()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" in str(error):
            return None
        raise
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def largest(measure: Callable[[int], int | None], limit: int, most: int, within: float = 0.0) -> int:
    """The largest n of 1 ... most whose measure is at most `limit`, provided that all below it are, too; 0 if there is none.

    `within`: the share of n by which the answer may be too small, to spare tries.
    A measure takes its time, and is nearly linear: each try is where the line through the two largest that are known meets
    the limit, between 2 and 16 times what fits; every third one inside a bracket is its middle. None: beyond any limit.
    """
    low, high, tries = 0, most + 1, 0  # the answer is at least `low`, and less than `high`
    known: list[tuple[int, int]] = []
    while high - low > max(1, within * low):
        at = max(1, 2 * low)
        if len(known) > 1:
            (n, needed), (m, more) = sorted(known)[-2:]
            slope = max(1e-9, (more - needed) / (m - n))
            at = int(min(m + (limit - more) // slope, 16 * m))
            at = max(at, 2 * low if high > most else low + 1)
        if high <= most and (tries := tries + 1) % 3 == 0:
            at = (low + high) // 2
        at = min(max(at, low + 1), high - 1)
        found = measure(at)
        if found is not None:
            known.append((at, found))
        low, high = (at, high) if found is not None and found <= limit else (low, at)
    return low
