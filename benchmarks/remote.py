"""How fast shards behind a URL are read, with an empty cache and with a full one, compared with the
same shards on disk.

    python -m benchmarks.remote URL

URL is a folder to write to, such as s3://bucket/bench or file:///tmp/bench. Prints a table of
Markdown.
"""

import hashlib
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from data_pipeline.config import DataConfig, SourceConfig
from data_pipeline.loader import TrainingData, open_training
from data_pipeline.remote import place
from data_pipeline.shards import Manifest, ShardWriter, token_dtype

_BATCHES = 200
_REPEATS = 5
_ROWS = 8
_LENGTH = 4096


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


def main(url: str) -> None:
    """Measure and print."""
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


if __name__ == "__main__":
    main(sys.argv[1])
