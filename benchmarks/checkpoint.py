"""Speed of saving and restoring checkpoints, compared with the disk's own speed, with checks and
without; and the number of damaged files that are not noticed.

    python -m benchmarks.checkpoint [--mib 1024] [--rounds 3] [--pairs 20] [--flips 1000]
    [--memory] [--directory DIR]

prints the tables of benchmarks/results/checkpoint.md.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import multiprocessing
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from data_pipeline.base.errors import StorageError
from maxtrain.checkpoint import reading, writing, zarr_reader
from maxtrain.checkpoint.integrity import Files
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests

# Bytes that are read or written at a time.
CHUNK = 8 << 20


def no_digests(tree: dict[str, Any]) -> jax.Array:
    """Replace digests by zeros, without reading an array."""
    return jnp.zeros((len(tree), 2), jnp.uint32)


def no_crc32(*args: Any) -> int:
    """Replace checksums by 0, without reading a byte."""
    return 0


def no_damage(*args: Any) -> str:
    """Report that all checksums are right."""
    return ""


def nothing_plain(*args: Any) -> tuple[None, str]:
    """Report that no array can be read without Orbax."""
    return None, ""


def sizes_only(path: Path, names: list[str]) -> Files:
    return {name: {"bytes": (path / name).stat().st_size, "crc32": []} for name in names}


def forget(path: Path) -> None:
    """Empties the kernel's cache of the files below a directory, so that the next read comes from
    the disk."""
    for file in path.rglob("*"):
        if not file.is_file():
            continue
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_one(path: Path, content: memoryview) -> None:
    """One large sequential write, on the disk when it returns."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), CHUNK):
            file.write(content[start : start + CHUNK])
        os.fsync(file.fileno())


def read_in_chunks(path: Path) -> None:
    """One large sequential read, into a small buffer that is used again and again."""
    buffer = memoryview(bytearray(CHUNK))
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass


def read_whole(path: Path, num_bytes: int) -> None:
    """One large sequential read, into new memory for the whole file."""
    content = memoryview(bytearray(num_bytes))
    position = 0
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(content[position : position + CHUNK]):
            position += count


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Nothing is hashed or compared."""
    patches = [
        (writing, "hash_files", sizes_only),
        (writing, "digests", no_digests),
        (zarr_reader, "crc32", no_crc32),
        (zarr_reader, "describe_damage", no_damage),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextlib.contextmanager
def by_orbax() -> Iterator[None]:
    """Files are hashed first, and then read by Orbax."""
    with mock.patch.object(reading, "read_plain", nothing_plain):
        yield


def make_state(mib: int) -> dict[str, jax.Array]:
    """Make sixteen matrices of random values, `mib` MiB together."""
    shape = (mib // 16 << 8, 1024)
    return {f"w{i:02d}": jax.random.normal(jax.random.key(i), shape) for i in range(16)}


def memory(name: str) -> int:
    """Bytes that the kernel says this process has (VmRSS), or had at most (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return 1024 * int(line.split()[1])
    raise ValueError(name)


class Times:
    """Wall seconds and processor seconds of jobs that are done more than once."""

    def __init__(self) -> None:
        self.all: dict[str, list[tuple[float, float]]] = {}

    def note(self, what: str, job: Callable[[], object], cold: Path | None = None) -> None:
        if cold:
            forget(cold)
        begin = time.perf_counter()
        cpu_begin = time.process_time()
        jax.block_until_ready(job())
        wall = time.perf_counter() - begin
        cpu = time.process_time() - cpu_begin
        self.all.setdefault(what, []).append((wall, cpu))
        print(f"{what}: {wall:.2f} s", file=sys.stderr, flush=True)

    def table(self, mib: int) -> Iterator[str]:
        """Lines of Markdown; each job moved `mib` MiB."""
        yield "| what | times | s, median | quarter below | least | GB/s | s of processors |"
        yield "|:--|--:|--:|--:|--:|--:|--:|"
        for what, times in self.all.items():
            walls = sorted(wall for wall, _ in times)
            median = statistics.median(walls)
            speed = mib / 1024 * 1.0737 / median
            cells = [
                what,
                str(len(times)),
                f"{median:.2f}",
                f"{walls[len(walls) // 4]:.2f}",
                f"{walls[0]:.2f}",
                f"{speed:.2f}",
                f"{statistics.median(cpu for _, cpu in times):.2f}",
            ]
            yield f"| {' | '.join(cells)} |"


def costs(directory: Path, mib: int, rounds: int) -> None:
    """Each round does everything once, one after the other."""
    state = make_state(mib)
    content = memoryview(b"".join(np.asarray(x).tobytes() for x in state.values()))
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep=1))
    behind = Checkpoints(directory.with_name("behind"), CheckpointConfig(asynchronous=True, keep=1))
    packed = Checkpoints(
        directory.with_name("packed"), CheckpointConfig(asynchronous=False, keep=1)
    )
    packed._orbax.close()
    # Compressed, in few files.
    packed._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    times = Times()
    restore = functools.partial(checkpoints.restore, state)
    one = directory.with_name("one") / "file"
    one.parent.mkdir()
    for number in range(rounds):
        times.note("one sequential write, fsync", functools.partial(write_one, one, content))
        times.note("save", functools.partial(checkpoints.save, number, state, {}))
        times.note(
            "save, asynchronous: until training goes on",
            functools.partial(behind.save, number, state, {}),
        )
        times.note("save, asynchronous: the rest, behind", behind.wait)
        times.note("save as before, compressed", functools.partial(packed.save, number, state, {}))
        times.note(
            "one sequential read, 8 MiB at a time",
            functools.partial(read_in_chunks, one),
            one.parent,
        )
        times.note(
            "one sequential read, to memory of that size",
            functools.partial(read_whole, one, mib << 20),
            one.parent,
        )
        times.note("restore", restore, directory)
        with by_orbax():
            times.note("restore by Orbax", restore, directory)
        times.note(
            "restore as before, compressed",
            functools.partial(packed.restore, state),
            packed.directory,
        )
        times.note("digests alone", functools.partial(tree_digests, state))
    for each in (checkpoints, behind, packed):
        each.close()
    print("\n".join(times.table(mib)))


def checks(directory: Path, mib: int, pairs: int) -> None:
    """Each job with checks and without in turns, and nothing else between them.

    The first pair warms up, and is not counted.
    """
    state = make_state(mib)
    times = Times()
    for job in ("save", "asynchronous save", "restore"):
        config = CheckpointConfig(asynchronous=job == "asynchronous save", keep=1)
        places = [Checkpoints(directory / f"{what}-{job}", config) for what in ("bare", "checked")]
        for number in range(1 + pairs):
            noted = times
            if number == 0:
                noted = Times()
            # With checks is turn 1; which comes first changes from pair to pair.
            for turn in (number % 2, 1 - number % 2):
                checkpoints = places[turn]
                what = f"{job} {('without', 'with')[turn]} checks"
                with contextlib.ExitStack() as patches:
                    if turn == 0:
                        patches.enter_context(without_checks())
                    if job != "restore" or not number:
                        noted.note(what, functools.partial(checkpoints.save, number, state, {}))
                        checkpoints.wait()
                    if job == "restore":
                        restore = functools.partial(checkpoints.restore, state, check=bool(turn))
                        noted.note(what, restore, checkpoints.directory)
        for each in places:
            each.close()
            shutil.rmtree(each.directory)
    print("\n" + "\n".join(times.table(mib)))


def peaks(directory: Path, mib: int) -> None:
    """The most memory that a save takes, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    print("\n| save | steps meanwhile | memory, MB | of the state |\n|:--|--:|--:|--:|")
    for kind, steps in (("synchronous", 0), ("asynchronous", 0), ("asynchronous", 3)):
        with concurrent.futures.ProcessPoolExecutor(1, context) as process:
            place = directory / f"{kind}-{steps}"
            most = process.submit(peak, place, mib, kind == "asynchronous", steps).result()
        shutil.rmtree(place)
        print(f"| {kind} | {steps} | {most / 1e6:,.0f} | {most / (mib << 20):.2f} |")


def peak(directory: Path, mib: int, asynchronous: bool, steps: int) -> int:
    """Bytes that this process has at most while a state is saved, beyond what it has before.

    Args:
        steps: that change the state in place while it is being saved, as training does.
    """
    state = make_state(mib)
    change = jax.jit(
        functools.partial(jax.tree.map, lambda x: x * np.float32(0.999)), donate_argnums=0
    )
    state = jax.block_until_ready(change(state))
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=asynchronous, keep=1))
    # What is there once for all saves.
    checkpoints.save(0, {"w": jnp.ones((256, 256))}, {})
    checkpoints.wait()
    jax.block_until_ready(tree_digests(state))
    # The most is counted from here on.
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    checkpoints.save(1, state, {})
    for _ in range(steps):
        state = jax.block_until_ready(change(state))
    checkpoints.wait()
    most = memory("VmHWM")
    checkpoints.close()
    return most - before


def damage(directory: Path, count: int) -> None:
    """Flips, truncations and removals of one file at a time."""
    rng = random.Random(1)
    # Trials, and how many of them were noticed.
    counts = {"flipped bit": [0, 0], "truncated": [0, 0], "removed": [0, 0]}
    state = {
        "w": jax.random.normal(jax.random.key(0), (64, 96)),
        "zeros": jnp.zeros((256, 64)),
        "step": jnp.int32(1),
    }
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state, {"cursor": list(range(50))})
    files = []
    for file in sorted((directory / "00000001").rglob("*")):
        if file.is_file() and file.stat().st_size > 0:
            files.append(file)
    sizes = [file.stat().st_size for file in files]
    for number in range(count):
        for what, tally in counts.items():
            if what != "flipped bit" and number >= count // 5:
                continue
            # Any file, or any byte: else small files, or large ones, are hardly ever hit.
            if number % 2 == 1:
                file = rng.choice(files)
            else:
                file = rng.choices(files, sizes)[0]
            whole = file.read_bytes()
            at = rng.randrange(len(whole))
            if what == "flipped bit":
                flipped = bytearray(whole)
                flipped[at] ^= 1 << rng.randrange(8)
                file.write_bytes(flipped)
            elif what == "truncated":
                os.truncate(file, at)
            else:
                file.unlink()
            tally[0] += 1
            try:
                checkpoints.restore(state, 1)
            except StorageError:
                tally[1] += 1
            file.write_bytes(whole)
    checkpoints.restore(state, 1)
    checkpoints.close()
    print("\n| damage | trials | noticed | silent | 95 % upper bound |\n|:--|--:|--:|--:|--:|")
    for what, (trials, noticed) in counts.items():
        silent = trials - noticed
        bound = ""
        if silent == 0:
            bound = f"{3 / trials:.2%}"
        print(f"| {what} | {trials:,} | {noticed:,} | {silent} | {bound} |")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument(
        "--mib",
        type=int,
        default=1024,
        help="size of the state, a multiple of 16 (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--pairs", type=int, default=20, help="with checks and without (default: %(default)s)"
    )
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--memory", action="store_true", help="also what saves take of it")
    parser.add_argument(
        "--directory", help="where to write (default: the system's temporary directory)"
    )
    args = parser.parse_args()
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} cores, load {load:.1f}, jax {jax.__version__}; {args.mib:,} MiB\n")
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        if args.rounds:
            costs(Path(folder, "costs"), args.mib, args.rounds)
        if args.pairs:
            checks(Path(folder, "checks"), args.mib, args.pairs)
        if args.flips:
            damage(Path(folder, "damage"), args.flips)
        if args.memory:
            peaks(Path(folder, "memory"), args.mib)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
