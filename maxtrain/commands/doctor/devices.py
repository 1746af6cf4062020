"""Measurements of devices: products, memory, sums over the mesh; and checks that they compute
correctly.

All factors are whole numbers so small that every sum is exact in float32, in any order: so each
device of each kind must give the same bits, and a few rows are compared with NumPy's.
"""

import collections
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from maxtrain.parallel.agreement import gather, losing_others
from maxtrain.parallel.memory import memory_limit

# Rows and columns of the factors; bytes that are read and written on each device, more than its
# caches hold; and bytes that are summed.
_SIZE = {"cpu": 512, "gpu": 8192, "tpu": 8192}
_COPIED = {"cpu": 64 << 20, "gpu": 1 << 30, "tpu": 1 << 30}
_SUMMED = {"cpu": 1 << 20, "gpu": 256 << 20, "tpu": 256 << 20}
# Factors are whole numbers from -_LARGEST to _LARGEST, as bfloat16 has them exactly.
_LARGEST = 8
# Rows that are compared with NumPy's.
_ROWS = 4
_LEAST_REPEATS = 5
# Looks at the clocks.
_LOOKS = 5
DTYPES = ("bfloat16", "float32")


class AllReduceCheck(NamedTuple):
    """Sums over an axis of the mesh."""

    axis: str
    # Devices that are summed over.
    size: int
    # What each sends and receives at least, per second: 2 (n - 1) / n of its bytes.
    bytes_per_second: float
    # Least number of these devices with a fast network between them: in one slice, or on one host.
    near: int
    # The first of the processes that this one sums with, or that these sum with, and so on.
    group: int
    # Numbers of the devices of this process whose sums are wrong.
    wrong: list[int]


def median_seconds(call: Callable[[], Any], seconds: float) -> float:
    """The median of several measurements, of at least five, for about so long."""
    times = []
    end = time.perf_counter() + seconds
    while len(times) < _LEAST_REPEATS or time.perf_counter() < end:
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def measure(
    device: Any, seconds: float, size: int | None = None, copied: int | None = None
) -> dict[str, Any]:
    """Return what one device of this process can do.

    Args:
        device: which one.
        seconds: for each type of numbers, and for its memory.
        size: of the factors; None: as large as its platform needs.
        copied: bytes that are read and written; None: as many as its platform needs.

    Returns:
        `id`, `kind`, `platform`, `memory_bytes`, for each type of DTYPES the FLOP/s, and
        `memory_bytes_per_second`, read and written; `wrong`: a description of what it has
        computed wrongly; `digest`: of all products.
    """
    size = size or _SIZE.get(device.platform, 8192)
    copied = copied or _COPIED.get(device.platform, 1 << 30)
    found: dict[str, Any] = {
        "id": device.id,
        "kind": device.device_kind,
        "platform": device.platform,
        "memory_bytes": memory_limit(device),
    }
    wrong = []
    digests = []
    for dtype in DTYPES:
        a, b = factors(size)
        on_device = [jax.device_put(x, device).astype(dtype) for x in (a, b)]
        multiply = functools.partial(_product, *on_device)
        product = multiply()
        digest = int(_digest(product))
        expected = a[:_ROWS].astype(np.float32) @ b.astype(np.float32)
        if not np.array_equal(np.asarray(product[:_ROWS]), expected):
            wrong.append(f"{dtype} products")
        taken = median_seconds(multiply, seconds)
        found[dtype] = 2 * size**3 / taken
        if int(_digest(multiply())) != digest:
            wrong.append(f"{dtype} products that differ from time to time")
        digests.append(digest)
    found["memory_bytes_per_second"], is_right = _measure_memory(device, seconds, copied)
    if not is_right:
        wrong.append("sums of one in its memory")
    return found | {"wrong": wrong, "digest": digests}


def _measure_memory(device: Any, seconds: float, copied: int) -> tuple[float, bool]:
    """Bytes per second that are read and written where one is added to numbers that lie in memory,
    and whether each result is what it must be."""
    with jax.default_device(device):
        numbers = jnp.arange(copied // 4, dtype=jnp.uint32)
        is_right = bool(_are_counted(_plus_one(numbers)))
        taken = median_seconds(lambda: _plus_one(numbers), seconds)
    return 2 * numbers.nbytes / taken, is_right


@jax.jit
def _plus_one(numbers: jax.Array) -> jax.Array:
    return numbers + jnp.uint32(1)


@jax.jit
def _are_counted(numbers: jax.Array) -> jax.Array:
    """Return whether they are 1, 2, 3, ..."""
    return jnp.all(numbers == jnp.arange(1, numbers.size + 1, dtype=jnp.uint32))


@functools.lru_cache(maxsize=1)
def factors(size: int) -> tuple[np.ndarray, np.ndarray]:
    """Two int8 [size, size] of small whole numbers, the same everywhere."""
    # Any sum is then exact in float32.
    assert size * _LARGEST**2 < 1 << 24, size
    rng = np.random.Generator(np.random.PCG64(size))
    shape = (2, size, size)
    a, b = rng.integers(-_LARGEST, _LARGEST, shape, dtype=np.int8, endpoint=True)
    return a, b


@jax.jit
def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """float32 [m, n] of [m, k] and [k, n]."""
    return jnp.einsum("mk,kn->mn", a, b, precision="highest", preferred_element_type=jnp.float32)


@jax.jit
def _digest(product: jax.Array) -> jax.Array:
    """A number that changes with any bit."""
    bits = jax.lax.bitcast_convert_type(product, jnp.uint32).reshape(-1)
    weights = 2 * jnp.arange(bits.size, dtype=jnp.uint32) + 1
    return jnp.sum(bits * weights, dtype=jnp.uint32)


def measure_sums(mesh: Mesh, seconds: float, summed: int | None = None) -> list[AllReduceCheck]:
    """Return how fast devices sum over each axis of the mesh.

    All processes call it together. LostProcessError: one does not come.

    Args:
        mesh: of all devices.
        seconds: for each axis.
        summed: bytes on each device; None: as many as its platform needs.
    """
    platform = mesh.devices.flat[0].platform
    summed = summed or _SUMMED.get(platform, 256 << 20)
    return [
        _over_axis(mesh, axis, size, seconds, summed)
        for axis, size in mesh.shape.items()
        if size > 1
    ]


def _over_axis(mesh: Mesh, axis: str, size: int, seconds: float, summed: int) -> AllReduceCheck:
    everywhere = PartitionSpec(mesh.axis_names)
    sharding = NamedSharding(mesh, everywhere)
    elements = summed // 4

    @functools.partial(jax.jit, out_shardings=sharding)
    def own() -> jax.Array:
        def place() -> jax.Array:
            return jnp.full((elements,), jax.lax.axis_index(axis) + 1, jnp.float32)

        return jax.shard_map(place, mesh=mesh, in_specs=(), out_specs=everywhere, check_vma=False)()

    @jax.jit
    def total(x: jax.Array) -> jax.Array:
        return jax.shard_map(
            lambda part: jax.lax.psum(part, axis),
            mesh=mesh,
            in_specs=everywhere,
            out_specs=everywhere,
            check_vma=False,
        )(x)

    with jax.set_mesh(mesh), losing_others():
        x = own()
        result = jax.block_until_ready(total(x))
        taken = _median_of_all(lambda: total(x), seconds)
    wrong = []
    for shard in result.addressable_shards:
        if not bool(jnp.all(shard.data == size * (size + 1) // 2)):
            wrong.append(shard.device.id)
    place = mesh.axis_names.index(axis)
    moved = 2 * (size - 1) / size * summed
    return AllReduceCheck(axis, size, moved / taken, *_near_and_group(mesh.devices, place), wrong)


def _median_of_all(call: Callable[[], Any], seconds: float) -> float:
    """Return the median time as `median_seconds` does; all processes make the same number of calls,
    as process 0 decides.
    """
    once = median_seconds(call, 0.0)
    repeats = max(_LEAST_REPEATS, min(200, int(seconds / max(once, 1e-6))))
    repeats = gather({"repeats": repeats})[0]["repeats"]
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _near_and_group(placed: np.ndarray, axis: int) -> tuple[int, int]:
    """`near` and `group` of sums over an axis of devices as a mesh has them."""
    size = placed.shape[axis]
    groups = np.moveaxis(placed, axis, 0).reshape(size, -1).T
    near = size
    together: list[set[int]] = []
    for group in groups:
        near = min(near, *collections.Counter(map(_domain, group)).values())
        processes = {device.process_index for device in group}
        apart = []
        for others in together:
            if processes & others:
                processes |= others
            else:
                apart.append(others)
        together = [*apart, processes]
    (ours,) = (processes for processes in together if jax.process_index() in processes)
    return near, min(ours)


def _domain(device: Any) -> tuple[str, int]:
    """Devices with the same one have a fast network between them."""
    if device.platform != "cpu" and hasattr(device, "slice_index"):
        return "slice", device.slice_index
    return "process", device.process_index


def clock_offsets(now: Callable[[], float] = time.time) -> list[float]:
    """Seconds by which the clock of each process is ahead of that of process 0.

    All look at their clocks right after they have met; the median of several looks counts, and is
    as exact as processes leave a meeting together: milliseconds.
    """
    looks = []
    for _ in range(_LOOKS):
        gather({})
        looks.append(now())
    said = gather({"looks": looks}, 512)
    return offsets([theirs["looks"] for theirs in said])


def offsets(looks: Sequence[Sequence[float]]) -> list[float]:
    """Return the clock offsets of `clock_offsets`, from the looks of all processes."""
    first = looks[0]
    return [statistics.median(own - zero for own, zero in zip(theirs, first)) for theirs in looks]
