"""Throughput and latency of clients of `maxtrain serve`: tokens per second, and how long they wait.

    python -m benchmarks.serving [--write]

A small random model is served by a process of its own. Each client requests a stream, and the
next one when it has ended, with prompts that have nothing in common. Clients and server share this
machine. Uncounted requests precede each measurement, so that nothing is compiled in it.
"""

import argparse
import concurrent.futures
import contextlib
import http.client
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import jax
import numpy as np
from flax import nnx

from benchmarks.train_step import processor
from data_pipeline.tokenizer import train_bpe
from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.models.registry import build_model
from maxtrain.weights.hf_export import write_config, write_tokenizer, write_weights

RESULTS = Path(__file__).parent / "results" / "serving.md"
MODEL = ModelConfig(
    vocab_size=4096,
    num_layers=4,
    embed_dim=256,
    mlp_dim=704,
    num_heads=8,
    num_kv_heads=4,
    max_length=1024,
)
PRECISION = PrecisionConfig(params="float32", compute="float32")
# Clients at one time.
STREAMS = (1, 8, 32)
SLOTS = 32
PROMPT = 64
NEW = 128
# Streams of each client that are measured.
ROUNDS = 4
# Prompts that come together are read together, by a program for each of these numbers.
TOGETHER = (1, 2, 4, 8)
# Of Python's own library, which the tokenizer is trained on.
TEXT_FILES = 40
_SHARD_BYTES = 1 << 30
_WAIT_SECONDS = 600


class StreamedAnswer(NamedTuple):
    """One stream, seen by its client."""

    first_seconds: float
    seconds: float
    tokens: int


class LoadResult(NamedTuple):
    """Streams of several clients, and the time from the first request to the last answer."""

    answers: list[StreamedAnswer]
    seconds: float


def write_model(folder: Path) -> int:
    """A random model and its tokenizer, as a Hugging Face directory; its number of parameters."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))[:TEXT_FILES]
    texts = [file.read_text(encoding="utf-8") for file in files]
    tokenizer = train_bpe(texts, MODEL.vocab_size or 0)
    model = jax.jit(lambda: build_model(MODEL, PRECISION, 0))()
    params = nnx.state(model, nnx.Param)
    write_weights(folder, params, MODEL, "float32", _SHARD_BYTES)
    write_config(folder, MODEL, "float32", tokenizer)
    write_tokenizer(folder, "bytes", tokenizer, MODEL)
    return sum(leaf.size for leaf in jax.tree.leaves(params))


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[str]:
    """The address of a server of this model, which ends with the block."""
    command = [sys.executable, "-m", "maxtrain.cli", "serve", "--hf", str(folder)]
    command += ["--name", "small", "--port", "0", "--slots", str(SLOTS)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if "listening on" not in line:
            raise RuntimeError(f"the server does not listen: {line!r}")
        yield line.split()[-1]
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def ask(url: str, prompts: list[list[int]], seed: int) -> StreamedAnswer:
    """A stream of what follows these prompts, read to its end."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.netloc), timeout=_WAIT_SECONDS)
    request = {
        "model": "small",
        "prompt": prompts,
        "max_tokens": NEW,
        "temperature": 1,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    begin = time.perf_counter()
    headers = {"Content-Type": "application/json"}
    connection.request("POST", f"{address.path}/completions", json.dumps(request), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"the server refuses: {response.read().decode()}")
    first_seconds = None
    tokens = 0
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line.removeprefix(b"data: "))
        if "error" in event:
            raise RuntimeError(f"the server failed: {event}")
        if first_seconds is None:
            first_seconds = time.perf_counter() - begin
        if "usage" in event:
            tokens = event["usage"]["completion_tokens"]
    seconds = time.perf_counter() - begin
    connection.close()
    assert first_seconds is not None
    return StreamedAnswer(first_seconds, seconds, tokens)


def some_prompts(rng: np.random.Generator, count: int) -> list[list[int]]:
    """Any ids."""
    return rng.integers(0, 256, (count, PROMPT)).tolist()


def warm_up(url: str) -> None:
    """Lets the server compile what it needs; with the first stream its caches grow."""
    rng = np.random.default_rng(0)
    for count in (1, *TOGETHER):
        ask(url, some_prompts(rng, count), seed=count)


def measure(url: str, streams: int, rounds: int, seed: int) -> LoadResult:
    """Measure clients at one time, each with `rounds` streams, one after the other; with another
    `seed`, other prompts.
    """

    def client(number: int) -> list[StreamedAnswer]:
        rng = np.random.default_rng((number, streams, seed))
        answers = []
        for _ in range(rounds):
            answers.append(ask(url, some_prompts(rng, 1), int(rng.integers(1 << 32))))
        return answers

    begin = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(streams) as clients:
        of_clients = list(clients.map(client, range(streams)))
    seconds = time.perf_counter() - begin
    return LoadResult([answer for answers in of_clients for answer in answers], seconds)


def row(streams: int, measured: LoadResult) -> str:
    """A line of the table."""
    tokens = sum(answer.tokens for answer in measured.answers)
    first = [answer.first_seconds for answer in measured.answers]
    whole = [answer.seconds for answer in measured.answers]
    figures = [f"{tokens / measured.seconds:,.0f}"]
    for times in (first, whole):
        for percent in (50, 95):
            figures.append(f"{1000 * np.percentile(times, percent):,.0f}")
    return f"| {streams} | {' | '.join(figures)} |"


def table(url: str) -> list[str]:
    lines = [
        "| streams | tokens/s | first token, p50, ms | p95 | whole answer, p50, ms | p95 |",
        "|--:|--:|--:|--:|--:|--:|",
    ]
    warm_up(url)
    for streams in STREAMS:
        measure(url, streams, 1, seed=0)
        lines.append(row(streams, measure(url, streams, ROUNDS, seed=1)))
        print(lines[-1], file=sys.stderr, flush=True)
    return lines


def _versions() -> str:
    names = ("jax", "starlette", "uvicorn")
    found = [f"{name} {importlib.metadata.version(name)}" for name in names]
    return ", ".join([f"Python {platform.python_version()}", *found])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.serving", description="What clients of a server get."
    )
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    args: Any = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parameters = write_model(folder)
        with serving(folder) as url:
            lines = table(url)
    text = "\n".join(
        [
            "# Serving",
            "",
            f"`python -m benchmarks.serving --write` on {processor()}, which the clients share; "
            f"{_versions()}. {parameters / 1e6:.1f} million parameters in {PRECISION.params}: "
            f"{MODEL.num_layers} layers of {MODEL.embed_dim}, vocabulary "
            f"{MODEL.vocab_size:,}. `maxtrain serve --slots {SLOTS}`; streams at one time, each "
            f"client with {ROUNDS} of them, one after the other: {NEW} tokens at most after a "
            f"prompt of {PROMPT}. p50 and p95 are percentiles of all streams.",
            "",
            *lines,
            "",
        ]
    )
    print(text)
    if args.write:
        RESULTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
