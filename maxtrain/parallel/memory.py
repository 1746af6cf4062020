"""How much memory a device has and a program needs, whether it will do, and the largest size that
fits. Executes nothing."""

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from data_pipeline.errors import ConfigError, OutOfMemoryError

GIB = 1 << 30
# GiB that programs may use of one TPU device of a described topology: what libtpu 0.0.50 says that
# there are when it refuses more ("available HBM"). A v4 is described as two devices a chip. First
# match counts.
_V5 = (("tpu v5 lite", 15.75), ("tpu v5e", 15.75), ("tpu v5", 95.73))
TPU_GIB = (("tpu7x", 94.74), ("tpu v6", 31.24), *_V5, ("tpu v4", 15.25), ("tpu v3", 15.48))
_SPLIT = "split it over more devices (mesh.fsdp, mesh.tensor)"
# Which keys need less memory, for a program and for what is kept between steps.
STEP_MEND = (
    "Lower data.batch_size or data.seq_length, raise optimizer.accumulation, set model.remat=full, lower model.loss_chunk, or "
    f"{_SPLIT}. `maxtrain probe` finds the largest batch that fits"
)
STATE_MEND = f"Take a smaller model, set precision.params=bfloat16, or {_SPLIT}"
# Of a control group, in its second and first version: files with its limit, what it uses, and what
# that is made of.
_GROUPS = (
    ("memory.max", "memory.current", "memory.stat"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "memory/memory.stat"),
)
# Pages of files, which are given up when others need them; the first version counts those of groups
# below apart, as totals.
_CACHES = re.compile(r"^(total_)?(?:in)?active_file (\d+)$", re.MULTILINE)


def memory_limit(device: Any, described: bool = False) -> int:
    """Bytes that programs may use on a device; `described`: it is one of a topology, not of this
    machine.

    CPU devices share what the host has available. ConfigError: a described device that the table
    does not know.
    """
    if described:
        kind = device.device_kind.lower()
        if gib := next((gib for name, gib in TPU_GIB if name in kind), None):
            return int(gib * GIB)
        raise ConfigError(
            f"topology: no memory is known for {device.device_kind!r}. Give it with --memory BYTES."
        )
    stats = device.memory_stats() if device.platform != "cpu" else None
    return stats["bytes_limit"] if stats else available_memory() // jax.local_device_count()


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take from the host: what is free, and what its control
    group leaves."""
    info = root / "proc/meminfo"
    if not info.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    assert found is not None
    free = 1024 * int(found[1])
    for limit, used, stat in (
        [root / "sys/fs/cgroup" / name for name in group] for group in _GROUPS
    ):
        if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
            caches = _CACHES.findall(stat.read_text()) if stat.exists() else []
            totals = [count for count in caches if count[0]] or caches
            taken = max(0, int(used.read_text()) - sum(int(pages) for _, pages in totals))
            free = min(free, max(0, int(text) - taken))
    return free


def free_memory(device: Any) -> int:
    """Bytes that programs may still take on a device of this machine; CPU devices share what the
    host has available."""
    stats = device.memory_stats() if device.platform != "cpu" else None
    return (
        stats["bytes_limit"] - stats["bytes_in_use"]
        if stats
        else available_memory() // jax.local_device_count()
    )


def bytes_on_device(tree: Any) -> int:
    """Bytes on each device of arrays with shardings, real ones or described."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)


def require_memory(needed: int, what: str, mend: str) -> None:
    """ConfigError: a device of this process has fewer bytes free than `what` needs."""
    device = min(jax.local_devices(), key=free_memory)
    free = free_memory(device)
    if needed > free:
        whose = f"of {device.device_kind}" if device.platform != "cpu" else "of this host's memory"
        shared = (
            f", shared by {jax.local_device_count()} CPU devices"
            if device.platform == "cpu"
            else ""
        )
        raise ConfigError(
            f"{what} needs {size(needed)} on each device, where {size(free)} {whose} are free{shared}. {mend}."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the runtime, the compiler or Python says that there is not enough memory.

    Where a program is called, jax raises the runtime's errors as ValueErrors that begin with their
    status.
    """
    runtime = isinstance(error, jax.errors.JaxRuntimeError) or type(error) is ValueError
    return isinstance(error, MemoryError) or (
        runtime and str(error).startswith("RESOURCE_EXHAUSTED")
    )


def out_of_memory(error: BaseException, where: str) -> OutOfMemoryError:
    """The error to raise instead, with what was asked for and what is free."""
    said = (str(error).strip() or "MemoryError").splitlines()[0][:300].rstrip(".")
    free = " and ".join(sorted({size(free_memory(device)) for device in jax.local_devices()}))
    host = f"{size(available_memory())} of the host's memory are free"
    devices = "" if jax.default_backend() == "cpu" else f", and {free} on each device"
    mend = "See whether another program uses it. " + STEP_MEND
    return OutOfMemoryError(f"out of memory {where}: {said}. Now {host}{devices}. {mend}.")


def size(num_bytes: float) -> str:
    """Bytes in GiB, or in MiB if they are few."""
    return (
        f"{num_bytes / GIB:,.2f} GiB"
        if num_bytes >= GIB / 4
        else f"{num_bytes / (1 << 20):,.2f} MiB"
    )


def compile_for_bytes(lowered: jax.stages.Lowered) -> int | None:
    """Bytes on each device that a program needs: arguments, results that are not in their place,
    and temporary ones.

    None: the compiler itself finds that they are more than there are.
    """
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if is_out_of_memory(error):
            return None
        raise
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes + bytes_beside_arguments(compiled)


def bytes_beside_arguments(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device that a program needs beside its arguments: new results, temporary ones,
    and its code."""
    memory = compiled.memory_analysis()
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def largest(
    measure: Callable[[int], int | None], limit: int, most: int, within: float = 0.0
) -> int:
    """The largest n of 1 ... most whose measure is at most `limit`, provided that all below it are,
    too; 0 if there is none.

    `within`: the share of n by which the answer may be too small, to spare tries.
    A measure takes its time, and is nearly linear: each try is where the line through the two
    largest that are known meets the limit, between 2 and 16 times what fits; every third one inside
    a bracket is its middle. None: beyond any limit.
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
