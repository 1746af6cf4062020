"""Cost of a training step on a fixed workload, in bfloat16 and float32, with activations of either
type, without remat and with full remat.

    python -m benchmarks.train_step [--write] [--steps 8] [--where]

The workload never changes, so that figures can be compared over time: vocabulary 32,000, width 512,
8 layers, 8 heads of 64, SwiGLU 1,376, batch 8 x 512, AdamW, float32 masters. The variants of one
call take turns step by step: machines drift, ratios within a call do not. `--where` adds a table of
the kinds of work that fill a bfloat16 step, from XLA's own profile.
"""

import argparse
import collections
import dataclasses
import glob
import gzip
import json
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import one_core
from maxtrain.config.schema import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from maxtrain.models.cost import token_flops
from maxtrain.objectives.next_token import next_token
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.distributed import accelerator_present, keep_host_memory
from maxtrain.parallel.hardware import measure_matmul
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import abstract_model, abstract_state, create_state
from maxtrain.train_step.step import make_train_step

RESULTS = Path(__file__).parent / "results"
ROWS = 8
LENGTH = 512
MODEL = ModelConfig(
    vocab_size=32_000,
    num_layers=8,
    embed_dim=512,
    mlp_dim=1376,
    num_heads=8,
    num_kv_heads=8,
    scan_layers=False,
    loss_chunk=512,
)
# Types of the inputs of products and of the activations between them, and the remat policy.
VARIANTS = (
    ("bfloat16", "float32", "none"),
    ("float32", "float32", "none"),
    ("bfloat16", "bfloat16", "none"),
    ("bfloat16", "float32", "full"),
    ("float32", "float32", "full"),
    ("bfloat16", "bfloat16", "full"),
)


class Variant:
    """The step of two number formats and a remat policy, compiled, with its state and batch."""

    def __init__(self, compute: str, activations: str, remat: Any, norms_interval: int = 0):
        model = dataclasses.replace(MODEL, remat=remat)
        precision = PrecisionConfig(compute=compute, activations=activations)  # type: ignore[arg-type]
        self.compute = compute
        self.activations = activations
        self.remat = remat
        mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
        with jax.set_mesh(mesh):
            graphdef, params = abstract_model(model, precision, mesh)
            config = OptimizerConfig()
            shape = ScheduleConfig()
            optimizer = make_optimizer(config, shape, 1000, params)
            schedule = make_schedule(shape, config.learning_rate, 1000)
            abstract = abstract_state(params, optimizer, mesh)
            self.state = create_state(abstract, model, precision, optimizer, 0)
            ids = np.random.default_rng(0).integers(0, 32_000, (ROWS, LENGTH + 1)).astype(np.int32)
            ones = np.ones((ROWS, LENGTH), np.int32)
            arrays = {
                "inputs": ids[:, :-1],
                "targets": ids[:, 1:],
                "segment_ids": ones,
                "loss_mask": ones.astype(np.float32),
            }
            arrays["positions"] = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), (ROWS, LENGTH))
            self.batch = BatchLayout(mesh, ROWS, LENGTH).to_global(arrays)
            step = make_train_step(
                abstract,
                {"policy": graphdef},
                next_token(),
                optimizer,
                schedule,
                1,
                norms_interval=norms_interval,
            )
            start = time.perf_counter()
            self.compiled = step.lower(self.state, self.batch).compile()
            self.compile_seconds = time.perf_counter() - start
        self.temp_bytes = self.compiled.memory_analysis().temp_size_in_bytes
        self.seconds: list[float] = []

    def run(self) -> float:
        """Seconds of one step, result waited for."""
        start = time.perf_counter()
        self.state, metrics = self.compiled(self.state, self.batch)
        metrics["loss"].block_until_ready()
        return time.perf_counter() - start


def processor() -> str:
    """Name of the accelerator, or of the CPU with the cores that this process may use."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cores = f"{len(os.sched_getaffinity(0))} cores"
    info = Path("/proc/cpuinfo")
    if info.exists() and "amx_bf16" in info.read_text():
        cores += ", AMX"
    return f"{one_core.processor()}, {cores}"


def table(variants: list[Variant], peaks: dict[str, float]) -> str:
    """Markdown, a row a variant."""
    flops = token_flops(MODEL, LENGTH).causal * ROWS * LENGTH
    lines = [
        "| inputs | activations | remat | ms/step | tokens/s | GFLOP/s | share of matmul rate "
        "| compile s | temporary MiB |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for variant in variants:
        seconds = statistics.median(variant.seconds)
        rate = flops / seconds
        cells = [
            variant.compute,
            variant.activations,
            variant.remat,
            f"{seconds * 1e3:,.0f}",
            f"{ROWS * LENGTH / seconds:,.0f}",
            f"{rate / 1e9:,.0f}",
            f"{rate / peaks[variant.compute]:.0%}",
            f"{variant.compile_seconds:.1f}",
            f"{variant.temp_bytes >> 20:,}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def where(variant: Variant) -> str:
    """A table of the kinds of work in a step: thread milliseconds by kind of XLA operation."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            variant.run()
        (path,) = glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True)
        with gzip.open(path) as file:
            events = json.load(file)["traceEvents"]
    instruction = re.compile(
        r"^\s*(?:ROOT )?%?([\w.\-]+) = \S+ .*op_name=\"([^\"]*)\"", re.MULTILINE
    )
    known = {}
    for name, op in instruction.findall(variant.compiled.as_text()):
        if "while" not in name:
            known[name] = op
    milliseconds: collections.Counter[str] = collections.Counter()
    for event in events:
        name = event.get("name")
        if event.get("ph") == "X" and name in known:
            milliseconds[kind(name, known[name])] += event["dur"] / 1e3
    total = sum(milliseconds.values())
    lines = ["| work in a bfloat16 step | thread ms | share |", "|---|---|---|"]
    for work, spent in milliseconds.most_common():
        lines.append(f"| {work} | {spent:,.0f} | {spent / total:.0%} |")
    return "\n".join(lines)


def kind(name: str, op: str) -> str:
    """Return what an XLA operation belongs to, from its place in the model."""
    is_product = "dot_general" in op
    if "while/body" in op:
        if is_product:
            return "head and loss: products"
        return "head and loss: everything else"
    if re.search(r"bk[mhs]+,bk[mhs]+->bk", op):
        return "attention: products"
    if is_product:
        return "layers: products with weights"
    if "exp" in name or "/exp" in op:
        return "softmax"
    return "norms, rope, silu, casts, copies, AdamW"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train_step", description=__doc__.splitlines()[0]
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write train_step.md in benchmarks/results; on an accelerator, train_step_gpu.md or _tpu",
    )
    parser.add_argument(
        "--steps", type=int, default=8, help="counted steps of each variant, after two that are not"
    )
    parser.add_argument(
        "--where", action="store_true", help="also say where the time of a bfloat16 step goes (CPU)"
    )
    options = parser.parse_args(argv)
    if options.where:
        # XLA reads it when it first compiles.
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_enable_xprof_traceme=true"
    if not accelerator_present():
        keep_host_memory()
    variants = []
    for compute, activations, remat in VARIANTS:
        print(f"compiling {compute}, activations {activations}, remat {remat}", file=sys.stderr)
        variants.append(Variant(compute, activations, remat))
    peaks = {compute: [measure_matmul(compute)] for compute in ("bfloat16", "float32")}
    for step in range(options.steps + 2):
        for variant in variants:
            seconds = variant.run()
            # The first two warm up.
            if step >= 2:
                variant.seconds.append(seconds)
        for compute, found in peaks.items():
            found.append(measure_matmul(compute, 0.1))
        print(f"step {step + 1} of {options.steps + 2}", file=sys.stderr)
    rates = {compute: statistics.median(found) for compute, found in peaks.items()}
    bfloat16, float32, *_ = (statistics.median(variant.seconds) for variant in variants)
    words = ""
    if options.where:
        words = " --where"
    peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    lines = [
        "# Training step, fixed workload",
        "",
        f"`python -m benchmarks.train_step{words} --write` on {processor()}; "
        f"Python {platform.python_version()}, jax {jax.__version__}. "
        f"Medians of {options.steps} steps that took turns. "
        "Vocabulary 32,000, width 512, 8 layers, 8 heads of 64, SwiGLU 1,376, batch 8 x 512, "
        "AdamW, float32 masters. GFLOP/s count causal attention, and no recomputation.",
        "",
        table(variants, rates),
        "",
        f"bfloat16 is {float32 / bfloat16:.2f} times as fast as float32. "
        "Products alone (4096 x 512 x 1376, float32 accumulation, measured between the steps): "
        f"{rates['bfloat16'] / 1e9:,.0f} GFLOP/s in bfloat16, "
        f"{rates['float32'] / 1e9:,.0f} in float32. "
        f"Peak memory of the process with all states: {peak_bytes / 2**30:.1f} GiB.",
    ]
    if options.where:
        lines += ["", where(variants[0])]
    lines.append("")
    text = "\n".join(lines)
    print(text)
    if options.write:
        platform_name = jax.devices()[0].platform
        suffix = "" if platform_name == "cpu" else f"_{platform_name}"
        (RESULTS / f"train_step{suffix}.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
