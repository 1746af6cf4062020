"""Saving and restoring beside the disk's own speed, with and without checks, in turns; and flipped
bits: how many are silent.

    python -m benchmarks.checkpoint [--mib 1024] [--rounds 3] [--pairs 20] [--flips 1000]
    [--directory DIR]

prints the tables of benchmarks/results/checkpoint.md.
"""

import argparse
import contextlib
import functools
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from data_pipeline.errors import StorageError
from maxtrain.checkpoint import manager, plain
from maxtrain.checkpoint.integrity import Files
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests


def sizes_only(path: Path, names: list[str]) -> Files:
    return {name: {"bytes": (path / name).stat().st_size, "crc32": []} for name in names}


def forget(path: Path) -> None:
    """Has the kernel drop what it keeps in memory of the files below a directory, so that they are
    read from the disk."""
    for file in [file for file in path.rglob("*") if file.is_file()]:
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def write_one(path: Path, content: memoryview) -> None:
    """One large sequential write, on the disk when it returns."""
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(content), 8 << 20):
            file.write(content[start : start + (8 << 20)])
        os.fsync(file.fileno())


def read_one(path: Path, into: memoryview | None) -> None:
    """One large sequential read, to a buffer that is used again (None), or to memory of that
    size."""
    again = memoryview(bytearray(8 << 20))
    with path.open("rb", buffering=0) as file:
        at = 0
        while count := file.readinto(again if into is None else into[at : at + (8 << 20)]):
            at += count


@contextlib.contextmanager
def without_checks() -> Iterator[None]:
    """Nothing is hashed or compared."""
    patches = [
        (manager, "hash_files", sizes_only),
        (manager, "digests", lambda tree: jnp.zeros((len(tree), 2), jnp.uint32)),
        (plain, "crc32", lambda *args: 0),
        (plain, "describe_damage", lambda *args: ""),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in patches:
            stack.enter_context(mock.patch.object(module, name, value))
        yield


@contextlib.contextmanager
def by_orbax() -> Iterator[None]:
    """Files are hashed first, and then read by Orbax."""
    with mock.patch.object(manager, "read_plain", lambda *args: (None, "")):
        yield


def make_state(mib: int) -> dict[str, jax.Array]:
    return {
        f"w{i:02d}": jax.random.normal(jax.random.key(i), (mib // 16 << 8, 1024)) for i in range(16)
    }


class Times:
    """Seconds, and those of the processors, of everything that is done more than once."""

    def __init__(self) -> None:
        self.all: dict[str, list[tuple[float, float]]] = {}

    def note(self, what: str, job: Callable[[], object], cold: Path | None = None) -> None:
        if cold:
            forget(cold)
        begin, cpu = time.perf_counter(), time.process_time()
        jax.block_until_ready(job())
        self.all.setdefault(what, []).append(
            (time.perf_counter() - begin, time.process_time() - cpu)
        )
        print(f"{what}: {self.all[what][-1][0]:.2f} s", file=sys.stderr, flush=True)

    def table(self, mib: int) -> Iterator[str]:
        yield "| what | times | s, median | quarter below | least | GB/s | s of processors |\n|:--|--:|--:|--:|--:|--:|--:|"
        for what, times in self.all.items():
            walls, cpu = (
                sorted(wall for wall, _ in times),
                statistics.median(cpu for _, cpu in times),
            )
            wall, quarter, least = statistics.median(walls), walls[len(walls) // 4], walls[0]
            speed = mib / 1024 * 1.0737 / wall
            yield f"| {what} | {len(times)} | {wall:.2f} | {quarter:.2f} | {least:.2f} | {speed:.2f} | {cpu:.2f} |"


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
    packed._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())  # compressed, in few files
    times = Times()
    one, restore = (
        directory.with_name("one") / "file",
        functools.partial(checkpoints.restore, state),
    )
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
            functools.partial(read_one, one, None),
            one.parent,
        )
        fresh = "one sequential read, to memory of that size"
        times.note(fresh, lambda: read_one(one, memoryview(bytearray(mib << 20))), one.parent)
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
    """Each job with checks and without in turns, and nothing else between them: the first pair
    warms up."""
    state, times = make_state(mib), Times()
    for job in ("save", "asynchronous save", "restore"):
        config = CheckpointConfig(asynchronous=job == "asynchronous save", keep=1)
        places = [Checkpoints(directory / f"{what}-{job}", config) for what in ("bare", "checked")]
        for number in range(1 + pairs):
            noted = times if number else Times()
            for turn in (number % 2, 1 - number % 2):
                checkpoints, what = places[turn], f"{job} {('without', 'with')[turn]} checks"
                with contextlib.nullcontext() if turn else without_checks():
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


def damage(directory: Path, count: int) -> None:
    """Flips, truncations and removals of one file at a time."""
    rng, told = random.Random(1), {"flipped bit": [0, 0], "truncated": [0, 0], "removed": [0, 0]}
    state = {
        "w": jax.random.normal(jax.random.key(0), (64, 96)),
        "zeros": jnp.zeros((256, 64)),
        "step": jnp.int32(1),
    }
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state, {"cursor": list(range(50))})
    files = sorted(
        file
        for file in (directory / "00000001").rglob("*")
        if file.is_file() and file.stat().st_size
    )
    sizes = [file.stat().st_size for file in files]
    for number in range(count):
        for what, tally in told.items():
            if what != "flipped bit" and number >= count // 5:
                continue
            file = rng.choice(files) if number % 2 else rng.choices(files, sizes)[0]
            whole = file.read_bytes()
            at = rng.randrange(len(whole))
            if what == "flipped bit":
                file.write_bytes(
                    whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :]
                )
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
    for what, (trials, noticed) in told.items():
        silent = trials - noticed
        print(
            f"| {what} | {trials:,} | {noticed:,} | {silent} | {f'{3 / trials:.2%}' if not silent else ''} |"
        )


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
    parser.add_argument(
        "--directory", help="where to write (default: the system's temporary directory)"
    )
    asked = parser.parse_args()
    print(
        f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}; {asked.mib:,} MiB\n"
    )
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        if asked.rounds:
            costs(Path(folder, "costs"), asked.mib, asked.rounds)
        if asked.pairs:
            checks(Path(folder, "checks"), asked.mib, asked.pairs)
        if asked.flips:
            damage(Path(folder, "damage"), asked.flips)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
