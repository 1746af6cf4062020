"""Memory of devices and programs, and the largest size that fits.

Executes nothing.
"""

import argparse
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from data_pipeline.base.errors import ConfigError, OutOfMemoryError
from maxtrain.parallel import topologies
from maxtrain.parallel.host_memory import is_on_host

GIB = 1 << 30
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": GIB}
# GiB that programs may use of one TPU device of a described topology: what libtpu 0.0.50 says that
# there are when it refuses more ("available HBM"). A v4 is described as two devices a chip. First
# match counts.
_V5 = (("tpu v5 lite", 15.75), ("tpu v5e", 15.75), ("tpu v5", 95.73))
TPU_GIB = (("tpu7x", 94.74), ("tpu v6", 31.24), *_V5, ("tpu v4", 15.25), ("tpu v3", 15.48))
_SPLIT = "split it over more devices (mesh.fsdp, mesh.tensor)"
# Which keys need less memory, for a program and for what is kept between steps.
STEP_MEND = (
    "Lower data.batch_size or data.seq_length, raise optimizer.accumulation, "
    f"set model.remat=full, lower model.loss_chunk, or {_SPLIT}. `maxtrain probe` finds the "
    "largest batch that fits"
)
# Where the rows at a time are chosen to fit.
FITTING_MEND = f"Set model.remat=full, lower data.seq_length or model.loss_chunk, or {_SPLIT}"
ON_HOST = "what lies in the memory of hosts (optimizer.on_host, train.on_host)"
HOST_MEND = (
    "Set optimizer.on_host=false and train.on_host=none, or split the state over more hosts "
    "(mesh.fsdp)"
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
    """Bytes that programs may use on a device. CPU devices share what the host has available.

    Args:
        described: the device is one of a topology, not of this machine.

    Raises:
        ConfigError: a described device that the table does not know.
    """
    if described:
        return _described_limit(device)
    stats = _memory_stats(device)
    if stats:
        return stats["bytes_limit"]
    return available_memory() // jax.local_device_count()


def _described_limit(device: Any) -> int:
    kind = device.device_kind.lower()
    for name, gib in TPU_GIB:
        if name in kind:
            return int(gib * GIB)
    of_gpu = topologies.gpu_memory(device.device_kind)
    if of_gpu is not None:
        return of_gpu
    raise ConfigError(
        f"topology: no memory is known for {device.device_kind!r}. Give it with --memory BYTES."
    )


def _memory_stats(device: Any) -> dict[str, int] | None:
    """Return the memory statistics of a device; None for a CPU, or if it reports none."""
    if device.platform == "cpu":
        return None
    return device.memory_stats()


def available_memory(root: Path = Path("/")) -> int:
    """Bytes that this process may still take from the host.

    It is what is free, and what the process's control group leaves.
    """
    info = root / "proc/meminfo"
    if not info.exists():
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = re.search(r"MemAvailable:\s+(\d+) kB", info.read_text())
    assert found is not None
    free = 1024 * int(found[1])
    for group in _GROUPS:
        limit, used, stat = (root / "sys/fs/cgroup" / name for name in group)
        if not limit.exists() or not used.exists():
            continue
        text = limit.read_text().strip()
        if text == "max":
            continue
        taken = max(0, int(used.read_text()) - _cached_bytes(stat))
        free = min(free, max(0, int(text) - taken))
    return free


def _cached_bytes(stat: Path) -> int:
    """Bytes of a control group's pages of files, by its memory.stat, if that is there."""
    if not stat.exists():
        return 0
    caches = _CACHES.findall(stat.read_text())
    totals = [(prefix, count) for prefix, count in caches if prefix]
    return sum(int(count) for _, count in totals or caches)


def free_memory(device: Any) -> int:
    """Bytes that programs may still take on a device of this machine.

    CPU devices share what the host has available.
    """
    stats = _memory_stats(device)
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return available_memory() // jax.local_device_count()


def memory_in_use(devices: Sequence[Any], root: Path = Path("/")) -> dict[str, int]:
    """Bytes in use, by the names that records give them. What the platform does not say is left
    out.

    device_bytes: now, on the device that has most in use. device_peak_bytes: the most that any
    device has had in use since the process began. host_bytes: of this process, resident.

    Args:
        devices: of this process.
        root: where `proc` is.
    """
    found = {}
    stats = [one for one in map(_memory_stats, devices) if one]
    for name, key in (("device_bytes", "bytes_in_use"), ("device_peak_bytes", "peak_bytes_in_use")):
        numbers = [one[key] for one in stats if key in one]
        if numbers:
            found[name] = max(numbers)
    pages = root / "proc/self/statm"
    if pages.exists():
        _, resident, *_ = pages.read_text().split()
        found["host_bytes"] = int(resident) * os.sysconf("SC_PAGE_SIZE")
    return found


def bytes_on_device(tree: Any) -> int:
    """Bytes on each device of arrays with shardings, real ones or described; what lies in the
    memory of hosts does not count."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if not is_on_host(x))


def bytes_on_host(tree: Any) -> int:
    """Bytes in the memory of a host of arrays that lie there, for each of its devices."""
    return sum(_shard_bytes(x) for x in jax.tree.leaves(tree) if is_on_host(x))


def _shard_bytes(x: Any) -> int:
    return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def require_memory(needed: int, what: str, fix: str) -> None:
    """ConfigError: a device of this process has fewer bytes free than `what` needs."""
    device = min(jax.local_devices(), key=free_memory)
    free = free_memory(device)
    if needed <= free:
        return
    there = f"{size(free)} of {device.device_kind} are free"
    if device.platform == "cpu":
        count = jax.local_device_count()
        there = f"{size(free)} of this host's memory are free, shared by {count} CPU devices"
    raise ConfigError(f"{what} needs {size(needed)} on each device, where {there}. {fix}.")


def require_memory_of_host(needed: int, what: str, fix: str) -> None:
    """ConfigError: this process may take fewer bytes of its host than `what` needs."""
    free = available_memory()
    if needed > free:
        raise ConfigError(
            f"{what} needs {size(needed)} of this host's memory, of which {size(free)} are free. "
            f"{fix}."
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the runtime, the compiler or Python says that there is not enough memory.

    Where a program is called, jax raises the runtime's errors as ValueErrors that begin with their
    status.
    """
    if isinstance(error, MemoryError):
        return True
    by_runtime = isinstance(error, jax.errors.JaxRuntimeError) or type(error) is ValueError
    return by_runtime and str(error).startswith("RESOURCE_EXHAUSTED")


def out_of_memory(error: BaseException, where: str) -> OutOfMemoryError:
    """Return the error to raise instead, with what was requested and what is free."""
    message = (str(error).strip() or "MemoryError").splitlines()[0][:300].rstrip(".")
    free = " and ".join(sorted({size(free_memory(device)) for device in jax.local_devices()}))
    now = f"{size(available_memory())} of the host's memory are free"
    if jax.default_backend() != "cpu":
        now += f", and {free} on each device"
    fix = f"See whether another program uses it. {STEP_MEND}"
    return OutOfMemoryError(f"out of memory {where}: {message}. Now {now}. {fix}.")


def size(num_bytes: float) -> str:
    """Bytes in GiB, or in MiB if they are few."""
    if num_bytes >= GIB / 4:
        return f"{num_bytes / GIB:,.2f} GiB"
    return f"{num_bytes / (1 << 20):,.2f} MiB"


def parse_bytes(text: str) -> int:
    """A number of bytes of a command line; ArgumentTypeError: it is none."""
    parts = re.fullmatch(r"([\d.]+(?:e\d+)?) ?([KMG]?)(i?B)?", text, re.IGNORECASE)
    if parts:
        number = float(parts[1])
        if number > 0:
            return int(number * _UNITS[parts[2].upper()])
    fix = "Write for example 16e9, 16000000000 or 15.5GiB"
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes. {fix}")


def program_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device that a program needs.

    They are those of its arguments, of results that are not in their place, and temporary ones.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes + bytes_beside_arguments(compiled)


def bytes_beside_arguments(compiled: jax.stages.Compiled) -> int:
    """Bytes on each device that a program needs beside its arguments.

    They are those of new results, temporary ones, and its code.
    """
    memory = compiled.memory_analysis()
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return results + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes


def largest(
    measure: Callable[[int], int | None], limit: int, most: int, within: float = 0.0
) -> int:
    """The largest n of 1 ... most whose measure is at most `limit`; 0 if there is none.

    All below it must be within the limit, too. A measure takes its time, and is nearly linear: each
    try is where the line through the two largest that are known meets the limit, between 2 and 16
    times what fits; every third one inside a bracket is its middle.

    Args:
        measure: the measure of n; None is beyond any limit.
        within: the share of n by which the answer may be too small, to spare tries.
    """
    # The answer is at least `low`, and less than `high`.
    low = 0
    high = most + 1
    tries_in_bracket = 0
    known: list[tuple[int, int]] = []
    while high - low > max(1, within * low):
        is_bracket = high <= most
        if is_bracket:
            tries_in_bracket += 1
        if is_bracket and tries_in_bracket % 3 == 0:
            at = (low + high) // 2
        else:
            at = _where_line_meets(known, limit, low, low + 1 if is_bracket else 2 * low)
        at = min(max(at, low + 1), high - 1)
        found = measure(at)
        if found is not None:
            known.append((at, found))
        if found is not None and found <= limit:
            low = at
        else:
            high = at
    return low


def _where_line_meets(known: list[tuple[int, int]], limit: int, low: int, least: int) -> int:
    """Return where the line through the two largest n that are known meets the limit, but `least`
    or more; twice what fits while there are no two.
    """
    if len(known) < 2:
        return max(1, 2 * low)
    (n, needed), (m, more) = sorted(known)[-2:]
    slope = max(1e-9, (more - needed) / (m - n))
    at = int(min(m + (limit - more) // slope, 16 * m))
    return max(at, least)


class MemoryNeed(NamedTuple):
    """Memory that a number of parts needs.

    Attributes:
        count: the parts.
        num_bytes: None: more than the compiler allows.
        is_bound: it needs at least that; it was not measured.
    """

    count: int
    num_bytes: int | None
    is_bound: bool

    def words(self) -> str:
        """The bytes for people."""
        if self.num_bytes is None:
            return "more than the compiler allows"
        if self.is_bound:
            return f"at least {size(self.num_bytes)}"
        return size(self.num_bytes)


class FewestParts(NamedTuple):
    """Result of `fewest`.

    Attributes:
        count: the fewest parts that fit; None: no choice does.
        needed: what they need.
        before: the last choice that does not fit; None: the first one fits.
    """

    count: int | None
    needed: int | None
    before: MemoryNeed | None


def fewest(
    choices: Sequence[int], measure: Callable[[int], int | None], fixed: int, limit: int
) -> FewestParts:
    """Find the first of `choices`, in their order, whose measure is at most `limit`.

    A measure takes its time. Of n parts it is `fixed` and something that shrinks with n, at most as
    1/n: so choices that can't fit, by the measure of one before them, are not measured.

    Args:
        choices: numbers of parts, ascending.
        measure: bytes of a number of parts; None is beyond any limit.
    """
    before = None
    # Of the last choice that was measured: its count, times what it needs beside `fixed`.
    shrinking = 0
    for count in choices:
        least = fixed + shrinking // count
        if least > limit:
            before = MemoryNeed(count, least, is_bound=True)
            continue
        needed = measure(count)
        if needed is not None and needed <= limit:
            return FewestParts(count, needed, before)
        before = MemoryNeed(count, needed, is_bound=False)
        if needed is not None:
            shrinking = (needed - fixed) * count
    return FewestParts(None, None, before)
