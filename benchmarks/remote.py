"""Speed of storage behind a URL: reading shards with an empty cache and with a full one, compared
with the same shards on disk; saving and restoring checkpoints, compared with the plain upload and
download of as many bytes; and saves with an upload and between uploads.

    python -m benchmarks.remote shards [URL]
    python -m benchmarks.remote checkpoints [URL] [--mib 256] [--rounds 3]
    python -m benchmarks.remote between [URL] [--mib 256] [--rounds 3]

URL is a folder to write to, such as s3://bucket/bench or file:///tmp/bench; without one, it is in a
bucket of moto's server, in a process of its own on this machine. Prints a table of Markdown.
"""

import argparse
import functools
import hashlib
import os
import shutil
import statistics
import tempfile
import time
from pathlib import Path

import jax
import numpy as np

from benchmarks.checkpoint import Times, make_state
from benchmarks.faulty_s3 import BUCKET, FaultyS3Process
from data_pipeline.base.remote import RemotePath, place
from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader.loader import TrainingData, open_training
from data_pipeline.shards import Manifest, ShardWriter, token_dtype
from maxtrain.checkpoint import at_url
from maxtrain.checkpoint.local import LocalSteps
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig

_BATCHES = 200
_REPEATS = 5
_ROWS = 8
_LENGTH = 4096
# Bytes of records that are uploaded before a checkpoint counts.
_RECORDS = 100_000


def make(folder: Path, shards: int = 8, documents: int = 8000) -> Path:
    """Shards of about 16 MB."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(shards):
        writer = ShardWriter(folder, f"tokens-{number:05d}", 32_000)
        lengths = rng.integers(100, 1900, documents)
        writer.append(rng.integers(0, 32_000, lengths.sum()), lengths)
        entries.append(writer.close())
    (folder / "tokenizer.json").write_text("{}")
    sha256 = hashlib.sha256(b"{}").hexdigest()
    identity = {"name": "none", "sha256": sha256, "vocab_size": 32_000, "special_ids": {"eod": 0}}
    Manifest(identity, token_dtype(32_000).name, "append", 1, tuple(entries)).save(folder)
    return folder


def measure(data: TrainingData, first: int) -> float:
    """Millions of targets a second, by wall clock."""
    started = time.perf_counter()
    for step in range(first, first + _BATCHES):
        data.batch(step)
    seconds = time.perf_counter() - started
    return _BATCHES * _ROWS * _LENGTH / seconds / 1e6


def open_data(source: str, cache: str) -> TrainingData:
    """The shards at a path or a URL."""
    sources = {"a": SourceConfig(source, epochs=None)}
    config = DataConfig(sources, seq_length=_LENGTH, batch_size=_ROWS, cache=cache)
    return open_training(config, 0, 2000)


def shards(url: str) -> None:
    """Measure reading, and print."""
    with tempfile.TemporaryDirectory() as name:
        folder = make(Path(name))
        for file in folder.iterdir():
            (place(url) / file.name).upload(file)
        found: dict[str, list[float]] = {"local": [], "cold cache": [], "warm cache": []}
        for _ in range(_REPEATS):
            with tempfile.TemporaryDirectory() as cache:
                local = open_data(str(folder), cache)
                remote = open_data(url, cache)
                found["cold cache"].append(measure(remote, 0))
                # A block is compared with its crc32 when it is first read, which is not counted.
                measure(remote, 0)
                measure(local, 0)
                found["local"].append(measure(local, 0))
                found["warm cache"].append(measure(remote, 0))
    scheme, _, _ = url.partition("://")
    print(f"| {scheme}://, rows of {_ROWS} x {_LENGTH:,} | M targets/s |")
    print("| --- | ---: |")
    for name, rates in found.items():
        print(f"| {name} | {statistics.median(rates):.1f} |")


def checkpoints(url: str, mib: int, rounds: int) -> None:
    """Measure saving and restoring, and print; each round does everything once, in turns."""
    state = make_state(mib)
    times = Times()
    config = CheckpointConfig(asynchronous=False, keep=1)
    home = RemotePath(url) / "run" / "checkpoints"
    plain = RemotePath(url) / "plain"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        one = folder / "one"
        one.write_bytes(b"".join(np.asarray(x).tobytes() for x in state.values()))
        here = folder / "here"
        saving = Checkpoints(here, config, home=home)
        for number in range(rounds):
            times.note("one file, uploaded", functools.partial(plain.upload, one))
            times.note("save", functools.partial(saving.save, number, state, {}))
            times.note("one file, downloaded", functools.partial(plain.download, folder / "back"))
            empty = folder / f"empty-{number}"
            restore = functools.partial(_restore, empty, config, home, state)
            times.note("restore to an empty disk", restore)
            shutil.rmtree(empty)
        saving.close()
    home.parent.remove()
    plain.remove()
    print("\n".join(times.table(mib)))


def between(url: str, mib: int, rounds: int) -> None:
    """Measure saves that are uploaded and those that are not, in turns, and print.

    The loop of a run waits until the state may change, and before its next save until this one
    counts.
    """
    state = make_state(mib)
    times = Times()
    home = RemotePath(url) / "run" / "checkpoints"
    records = RemotePath(url) / "run" / "metrics.jsonl"
    publish = functools.partial(records.write_bytes, b"x" * _RECORDS)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "fast").mkdir()
        local = LocalSteps(Path(name, "fast"), 2, publish)
        config = CheckpointConfig(keep=1)
        saving = Checkpoints(Path(name, "here"), config, None, None, home, publish, local)
        for number in range(rounds):
            for what, uploaded in (("uploaded", True), ("on the disk", False)):
                step = 2 * number + (not uploaded)
                save = functools.partial(saving.save, step, state, {}, None, uploaded)
                times.note(f"{what}: until the state may change", save)
                times.note(f"{what}: from there until it counts", saving.wait)
        saving.close()
    home.parent.remove()
    print("\n".join(times.table(mib)))


def _restore(
    directory: Path, config: CheckpointConfig, home: RemotePath, state: dict[str, jax.Array]
) -> dict[str, jax.Array]:
    """The newest step at a URL, as a launch reads it; all of it is checked."""
    at_url.pull(home, directory)
    reading = Checkpoints(directory, config, home=home)
    arrays, _ = reading.restore(state)
    reading.close()
    return arrays


def main() -> None:
    parser = argparse.ArgumentParser("python -m benchmarks.remote", description=__doc__)
    parser.add_argument("what", choices=["shards", "checkpoints", "between"])
    parser.add_argument("url", nargs="?", help="a folder to write to")
    parser.add_argument("--mib", type=int, default=256, help="of the state (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of checkpoints (%(default)s)")
    args = parser.parse_args()
    url = args.url
    if url is None:
        server = FaultyS3Process()
        os.environ.update(server.environment)
        url = f"s3://{BUCKET}/bench"
    if args.what == "shards":
        shards(url)
    else:
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, jax {jax.__version__}\n")
        measured = checkpoints
        if args.what == "between":
            measured = between
        measured(url, args.mib, args.rounds)


if __name__ == "__main__":
    main()
