"""What digests and hashes add to saving and restoring, with and without in turns; and flipped bits: how many are silent.

    python -m benchmarks.checkpoint [--mib 1024] [--rounds 3] [--flips 1000] [--directory DIR]

prints the tables of benchmarks/results/checkpoint.md.
"""

import argparse
import functools
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

from data_pipeline.errors import StorageError
from maxtrain.checkpoint import manager
from maxtrain.checkpoint.integrity import Files, find_damage, hash_files, read_commit
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import tree_digests


def seconds(job: Callable[[], object]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(job())
    return time.perf_counter() - begin


def sizes_only(path: Path, names: list[str]) -> Files:
    return {name: {"bytes": (path / name).stat().st_size, "crc32": []} for name in names}


def costs(directory: Path, mib: int, rounds: int) -> None:
    """Medians over rounds, each of which does everything with and without checks."""
    state = {f"w{i:02d}": jax.random.normal(jax.random.key(i), (mib // 16 << 8, 1024)) for i in range(16)}
    given = {"digests": tree_digests(state)}
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep=1))
    times: dict[str, list[float]] = {}

    def note(what: str, job: Callable[[], object]) -> None:
        times.setdefault(what, []).append(seconds(job))

    for number in range(rounds):
        with mock.patch.object(manager, "hash_files", sizes_only):
            note("save, bare", functools.partial(checkpoints.save, 2 * number, state, given))
        note("restore, bare", functools.partial(checkpoints.restore, state, check=False))
        note("save", functools.partial(checkpoints.save, 2 * number + 1, state, {}))
        note("restore", functools.partial(checkpoints.restore, state))
        path = directory / f"{2 * number + 1:08d}"
        files = read_commit(path)["files"]
        note("digests", functools.partial(tree_digests, state))
        note("hashes", functools.partial(hash_files, path, files))
        note("hashes again", functools.partial(find_damage, path, files))
    checkpoints.close()
    print(f"| what | s, median of {rounds} | GB/s | more than bare |\n|:--|--:|--:|--:|")
    for what, all_times in times.items():
        median = statistics.median(all_times)
        bare = statistics.median(times[f"{what}, bare"]) if f"{what}, bare" in times else None
        more = f"{median / bare - 1:+.1%}" if bare else ""
        print(f"| {what} | {median:.2f} | {mib / 1024 * 1.0737 / median:.2f} | {more} |")


def damage(directory: Path, count: int) -> None:
    """Flips, truncations and removals of one file at a time."""
    rng, told = random.Random(1), {"flipped bit": [0, 0], "truncated": [0, 0], "removed": [0, 0]}
    state = {"w": jax.random.normal(jax.random.key(0), (64, 96)), "zeros": jnp.zeros((256, 64)), "step": jnp.int32(1)}
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False))
    checkpoints.save(1, state, {"cursor": list(range(50))})
    files = sorted(file for file in (directory / "00000001").rglob("*") if file.is_file() and file.stat().st_size)
    sizes = [file.stat().st_size for file in files]
    for number in range(count):
        for what, tally in told.items():
            if what != "flipped bit" and number >= count // 5:
                continue
            file = rng.choice(files) if number % 2 else rng.choices(files, sizes)[0]
            whole = file.read_bytes()
            at = rng.randrange(len(whole))
            if what == "flipped bit":
                file.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
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
        print(f"| {what} | {trials:,} | {noticed:,} | {silent} | {f'{3 / trials:.2%}' if not silent else ''} |")


def main() -> int:
    parser = argparse.ArgumentParser("python -m benchmarks.checkpoint", description=__doc__)
    parser.add_argument("--mib", type=int, default=1024, help="size of the state, a multiple of 16 (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flips", type=int, default=1000)
    parser.add_argument("--directory", help="where to write (default: the system's temporary directory)")
    asked = parser.parse_args()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}; {asked.mib:,} MiB\n")
    with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
        costs(Path(folder, "costs"), asked.mib, asked.rounds)
        damage(Path(folder, "damage"), asked.flips)
    print(f"\nload at the end {os.getloadavg()[0]:.1f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
