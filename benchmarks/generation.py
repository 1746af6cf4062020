"""Decoding, in tokens per second, beside the bound that the memory sets.

    python -m benchmarks.generation [--torch-python PYTHON] [--write]

Each token of a small batch needs every weight once, so that no machine decodes faster than it reads
the weights. The bound is measured: how fast this machine reads an array that no cache holds. Beside
it is llama.cpp with the same weights, if the package xllamacpp is installed, and transformers with
random weights of the same shape, if a Python that has torch is named.
"""

import argparse
import concurrent.futures
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.imports import write_model
from benchmarks.train_step import processor
from data_pipeline.tokenizer import train_bpe
from maxtrain.commands.export.gguf import export_gguf
from maxtrain.config.schema import ModelConfig, PrecisionConfig
from maxtrain.inference.engine import Engine
from maxtrain.inference.sampling import Sampling
from maxtrain.models.decoder import Decoder
from maxtrain.models.registry import build_model
from maxtrain.models.unstack import unstacked
from maxtrain.parallel.distributed import accelerator_present, keep_host_memory

RESULTS = Path(__file__).parent / "results" / "generation.md"
# 124 million parameters, 25 million of them in each of the tables.
MODEL = ModelConfig(
    vocab_size=32_000,
    num_layers=12,
    embed_dim=768,
    mlp_dim=2048,
    num_heads=12,
    num_kv_heads=12,
    max_length=1024,
)
PROMPT = 64
CHUNK = 16
CHUNKS = 5
GREEDY = Sampling(temperature=0.0)
PRECISIONS = (
    PrecisionConfig(params="float32", compute="float32"),
    PrecisionConfig(params="bfloat16", compute="bfloat16"),
)


def read_rate(repeats: int = 7) -> float:
    """Bytes per second at which an array of 512 MiB is read by all cores; the fastest of several
    readings."""
    array = jnp.ones((1 << 27,), jnp.float32)
    total = jax.jit(lambda x: x.max())
    total(array).block_until_ready()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        total(array).block_until_ready()
        times.append(time.perf_counter() - begin)
    return array.nbytes / min(times)


def make_model(precision: PrecisionConfig, scan: bool) -> Decoder:
    model = jax.jit(lambda: build_model(MODEL, precision, 0))()
    if scan:
        return model
    return unstacked(model)


def read_bytes(model: Decoder) -> int:
    """Return the bytes of the weights that each step of decoding reads: all but the table of
    embeddings.
    """
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(nnx.state(model)))
    return whole - model.embedding.nbytes


def decode_rate(model: Decoder, rows: int) -> float:
    """Tokens per second, of all rows together: the median of several chunks."""
    engine = Engine(model, slots=rows, chunk=CHUNK, sharing=False)
    rng = np.random.default_rng(0)
    for row in range(rows):
        prompt = rng.integers(0, MODEL.vocab_size or 0, PROMPT).tolist()
        engine.submit(prompt, CHUNK * (CHUNKS + 2), GREEDY, row=row)
    engine.step()
    times = []
    for _ in range(CHUNKS):
        begin = time.perf_counter()
        engine.step()
        times.append(time.perf_counter() - begin)
    return rows * CHUNK / statistics.median(times)


def prefill_rate(model: Decoder, length: int = 512) -> float:
    """Tokens of a prompt per second."""
    engine = Engine(model, slots=1, chunk=1, sharing=False)
    rng = np.random.default_rng(1)
    times = []
    for _ in range(4):
        prompt = rng.integers(0, MODEL.vocab_size or 0, length).tolist()
        generation = engine.submit(prompt, 1, GREEDY)
        begin = time.perf_counter()
        engine.step()
        assert generation.reason == "length"
        times.append(time.perf_counter() - begin)
    return length / min(times[1:])


def llama_cpp_rates(precision: PrecisionConfig) -> dict[int, float]:
    """Tokens per second that llama.cpp decodes, of all rows together, by the number of rows."""
    import xllamacpp  # noqa: PLC0415

    quant = {"float32": "f32", "bfloat16": "bf16"}[precision.params]
    rates = {}
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = train_bpe(["some text"], 300)
        tokenizer.save(Path(folder))
        path = Path(folder) / "model.gguf"
        export_gguf(make_model(precision, True), tokenizer, folder, path, quant)
        for rows in (1, 8):
            params = xllamacpp.CommonParams()
            params.model.path = str(path)
            params.n_parallel = rows
            params.n_ctx = rows * 512
            params.n_gpu_layers = 0
            params.verbosity = 0
            params.cpuparams.n_threads = os.cpu_count() or 1
            params.cpuparams_batch.n_threads = os.cpu_count() or 1
            server = xllamacpp.Server(params)
            rates[rows] = statistics.median(_llama_cpp_rate(server, rows) for _ in range(3))
            del server
    return rates


def _llama_cpp_rate(server: Any, rows: int) -> float:
    """Return the rate of one run, without the time for prompts."""
    rng = np.random.default_rng(0)
    count = CHUNK * CHUNKS

    def ask(row: int) -> float:
        prompt = rng.integers(0, 300, PROMPT).tolist()
        request = {"prompt": prompt, "n_predict": count, "temperature": 0, "ignore_eos": True}
        answer = server.handle_completions(request | {"cache_prompt": False, "seed": row})
        assert answer["timings"]["predicted_n"] >= count - 1
        return answer["timings"]["predicted_ms"] / 1000

    with concurrent.futures.ThreadPoolExecutor(rows) as threads:
        seconds = max(threads.map(ask, range(rows)))
    return rows * count / seconds


def transformers_rates(python: str, precision: PrecisionConfig) -> dict[int, float]:
    """Return rates as `llama_cpp_rates` does, for transformers in another environment."""
    script = Path(__file__).with_name("transformers_decode.py")
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_model(directory, MODEL, precision.params, 1)
        sizes = [str(size) for size in (PROMPT, CHUNK * CHUNKS, 1, 8)]
        command = [python, str(script), str(directory), precision.params, *sizes]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    return {int(rows): rate for rows, rate in found.items()}


def measure(torch_python: str | None) -> list[str]:
    rate = read_rate()
    lines = [
        f"This machine reads {rate / 1e9:.1f} GB/s.",
        "",
        "| weights | layers | rows | tokens/s | bound by memory | of the bound | prompt tokens/s |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for precision in PRECISIONS:
        for scan in (True, False):
            model = make_model(precision, scan)
            prompt = prefill_rate(model)
            for rows in (1, 8):
                tokens = decode_rate(model, rows)
                bound = rows * rate / read_bytes(model)
                layers = "stacked" if scan else "apart"
                lines.append(
                    f"| {precision.params} | {layers} | {rows} | {tokens:,.1f} | {bound:,.1f} | "
                    f"{tokens / bound:.0%} | {prompt:,.0f} |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
            del model
        others = {}
        if importlib.util.find_spec("xllamacpp") is not None:
            others["llama.cpp"] = llama_cpp_rates(precision)
        if torch_python is not None:
            others["transformers"] = transformers_rates(torch_python, precision)
        weight_bytes = read_bytes(make_model(precision, True))
        for name, rates in others.items():
            for rows, tokens in rates.items():
                bound = rows * rate / weight_bytes
                lines.append(
                    f"| {precision.params} | {name} | {rows} | {tokens:,.1f} | {bound:,.1f} | "
                    f"{tokens / bound:.0%} | |"
                )
                print(lines[-1], file=sys.stderr, flush=True)
    return lines


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.generation", description="Decoding, in tokens per second."
    )
    parser.add_argument("--torch-python", metavar="PYTHON", help="that has torch and transformers")
    parser.add_argument("--write", action="store_true", help=f"write results/{RESULTS.name}")
    args = parser.parse_args(argv)
    if not accelerator_present():
        keep_host_memory()
    parameters = sum(
        leaf.size for leaf in jax.tree.leaves(nnx.state(make_model(PRECISIONS[1], True)))
    )
    text = "\n".join(
        [
            "# Decoding",
            "",
            f"`python -m benchmarks.generation --write` on {processor()}; Python "
            f"{platform.python_version()}, jax {jax.__version__}. {parameters / 1e6:.0f} million "
            f"parameters: {MODEL.num_layers} layers of {MODEL.embed_dim}, vocabulary "
            f"{MODEL.vocab_size:,}. Prompts of {PROMPT} tokens, then {CHUNK * CHUNKS} more; "
            f"medians of {CHUNKS} chunks of {CHUNK}.",
            "",
            *measure(args.torch_python),
            "",
        ]
    )
    print(text)
    if args.write:
        RESULTS.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
