"""Comparison of the counts of `maxtrain fit` with the measured step, where that can run: on this
machine's CPU, or on its first GPU.

    python -m benchmarks.fit_here [--steps 7] [--write]
    python -m benchmarks.fit_here --gpu [--steps 7] [--write]

On a CPU, two tables. Times: the products and the memory traffic that fit counts in the compiled
step, at the rates that this CPU reaches in one product and in one copy, beside the measured step.
Memory: how far from the compiled step the straight line through two smaller ones is, by which
`maxtrain probe` chooses what to compile next. `maxtrain fit` draws no line: it compiles each
requested shape.

On a GPU, one: steps of a model of 1.2 B parameters with several kernels of attention, and of one
with experts, by the rates of the data sheet, as `fit` does it, and the most bytes that the process
had, from initial weights on. Each is a process of its own, since a peak is never forgotten.
"""

import argparse
import concurrent.futures
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import one_core
from data_pipeline.base.errors import UserError
from maxtrain.commands.fit.estimate import RowBatchShape, kernel_flops
from maxtrain.config import RunConfig, load_config
from maxtrain.models.cost import token_flops
from maxtrain.parallel.compiled.hlo import parse
from maxtrain.parallel.compiled.roofline import Roofline, roofline
from maxtrain.parallel.compiled.work import work_of
from maxtrain.parallel.hardware import Links, links, measure_matmul, peak_flops
from maxtrain.parallel.memory import GIB, program_bytes
from maxtrain.trainer.abstract_step import StepPrograms

RESULTS = Path(__file__).parent / "results"
MIB = 1 << 20
_COPIED_BYTES = 256 * MIB
# Of the smallest number of rows.
UNITS = (1, 2, 4, 8)
# Through which two, and where it is held against the compiled step.
LINES = ((1, 2, 4), (1, 2, 8), (2, 4, 8))
# Of the same model, so that the tables speak of shapes and kinds and not of sizes alone.
_SMALL = (
    "config=llama3_8b",
    "model.vocab_size=4096",
    "model.num_layers=4",
    "model.embed_dim=256",
    "model.mlp_dim=768",
    "model.num_heads=4",
    "model.num_kv_heads=2",
    "model.head_dim=64",
    "model.remat=none",
    "precision.compute=float32",
    "mesh.fsdp=1",
)
_EXPERTS = (
    "model.family=qwen3_moe",
    "model.moe.num_experts=8",
    "model.moe.experts_per_token=2",
    "model.moe.expert_dim=256",
)


_ABOUT_MEMORY = """Memory of compiled steps, and how far from them the straight line through two
smaller ones is. `maxtrain fit` draws no line: it compiles each requested shape, so
that its bytes are those of the compiler. `maxtrain probe` compiles, too, and only chooses by such a
line, always through the two largest steps that it knows, what to compile next. Through larger steps
the line is mostly nearer: what a step needs is no line where another part of it becomes the one
that needs most, as with few tokens, or with a large vocabulary."""


class StepCase(NamedTuple):
    """A step."""

    name: str
    words: tuple[str, ...]
    batch: RowBatchShape
    base: tuple[str, ...] = _SMALL

    @property
    def config(self) -> RunConfig:
        rows, length = self.batch
        shape = (f"data.batch_size={rows}", f"data.seq_length={length}")
        # The last word counts.
        words = {word.partition("=")[0]: word for word in (*self.base, *self.words, *shape)}
        return load_config(list(words.values()))

    def with_rows(self, rows: int) -> "StepCase":
        return self._replace(batch=self.batch._replace(rows=rows))


CASES = (
    StepCase("dense", (), RowBatchShape(8, 512)),
    StepCase("dense, wide", ("model.embed_dim=512", "model.mlp_dim=2048"), RowBatchShape(8, 512)),
    StepCase("dense, long rows", (), RowBatchShape(2, 2048)),
    StepCase("dense, few tokens", (), RowBatchShape(1, 64)),
    StepCase("remat=full", ("model.remat=full",), RowBatchShape(8, 512)),
    StepCase("accumulation=4", ("optimizer.accumulation=4",), RowBatchShape(16, 512)),
    StepCase("large vocabulary", ("model.vocab_size=32768",), RowBatchShape(4, 512)),
    StepCase("experts", _EXPERTS, RowBatchShape(8, 512)),
)

_LLAMA = ("config=llama3_1b", "precision.activations=bfloat16", "mesh.fsdp=1")
_CUDNN = ("model.attention=cudnn", "data.packing=pad")
_FEW_EXPERTS = (
    "config=qwen3_30b_a3b",
    "model.num_layers=4",
    "precision.activations=bfloat16",
    "mesh.fsdp=1",
    "mesh.expert=1",
)
GPU_CASES = (
    StepCase("xla", ("model.attention=xla",), RowBatchShape(4, 4096), _LLAMA),
    StepCase("triton", ("model.attention=triton",), RowBatchShape(4, 4096), _LLAMA),
    StepCase("mosaic", ("model.attention=mosaic",), RowBatchShape(4, 4096), _LLAMA),
    StepCase("cudnn", _CUDNN, RowBatchShape(4, 4096), _LLAMA),
    StepCase(
        "triton, remat=none",
        ("model.attention=triton", "model.remat=none"),
        RowBatchShape(4, 4096),
        _LLAMA,
    ),
    StepCase("cudnn, remat=none", (*_CUDNN, "model.remat=none"), RowBatchShape(4, 4096), _LLAMA),
    StepCase("triton, 16 rows", ("model.attention=triton",), RowBatchShape(16, 4096), _LLAMA),
    StepCase("experts, triton", ("model.attention=triton",), RowBatchShape(4, 4096), _FEW_EXPERTS),
)


def copied_per_second() -> float:
    """Bytes that are read and written in a second by one program that copies a large array."""
    array = jnp.ones(_COPIED_BYTES // 4, jnp.float32)
    # In place: new memory costs more than what is copied.
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)
    seconds = []
    for _ in range(9):
        start = time.perf_counter()
        array = copy(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return 2 * _COPIED_BYTES / min(seconds)


def programs_of(case: StepCase) -> StepPrograms:
    """Return the programs on one device of this CPU."""
    return StepPrograms(case.config, jax.devices()[:1])


def estimate(
    case: StepCase,
    programs: StepPrograms,
    compiled: jax.stages.Compiled,
    peak: float,
    memory: Links,
) -> Roofline:
    """Return the estimate that `maxtrain fit` makes for devices that are not here."""
    work = work_of(parse(compiled.as_text() or ""), has_small_memories=False)
    work.flops += kernel_flops(programs.parts.config, case.batch, 0)
    return roofline(work, model_flops(case, programs), peak, [], memory)


def model_flops(case: StepCase, programs: StepPrograms) -> float:
    """Return the FLOPs of a step, as causal attention needs them."""
    model = token_flops(programs.parts.config.model, case.batch.length, 0).causal
    return model * case.batch.rows * case.batch.length


def measured(
    programs: StepPrograms, compiled: jax.stages.Compiled, batch: RowBatchShape, steps: int
) -> float:
    """The median of the seconds of some steps on random tokens, after one that does not count."""
    with jax.set_mesh(programs.parts.mesh):
        state = programs.parts.initial_state()
        arrays = random_batch(programs, batch)
        seconds = []
        for _ in range(steps + 1):
            start = time.perf_counter()
            state, metrics = compiled(state, arrays)
            jax.block_until_ready(metrics)
            seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def random_batch(programs: StepPrograms, shape: RowBatchShape) -> dict[str, jax.Array]:
    """Rows that are one document each."""
    rng = np.random.default_rng(0)
    vocabulary = programs.parts.config.model.vocab_size
    assert vocabulary is not None
    arrays = {}
    for name, array in programs.batch(*shape).items():
        if name in ("inputs", "targets"):
            values = rng.integers(1, vocabulary, array.shape)
        elif name == "positions":
            values = np.broadcast_to(np.arange(array.shape[-1]), array.shape)
        else:
            values = np.ones(array.shape)
        arrays[name] = jax.device_put(values.astype(array.dtype), array.sharding)
    return arrays


def time_row(case: StepCase, steps: int, peak: float, copied: float) -> str:
    """Return a row of the first table."""
    programs = programs_of(case)
    compiled = programs.compile(*case.batch)
    times = estimate(case, programs, compiled, peak, Links(copied, 1.0, None))
    took = measured(programs, compiled, case.batch, steps)
    cells = [
        case.name,
        f"{case.batch.rows} x {case.batch.length:,}",
        f"{1e3 * times.products:,.0f}",
        f"{1e3 * times.memory:,.0f}",
        f"{1e3 * times.seconds:,.0f}",
        f"{1e3 * times.without_overlap:,.0f}",
        f"{1e3 * took:,.0f}",
        f"{took / times.seconds:.2f}",
        f"{took / times.without_overlap:.2f}",
    ]
    return f"| {' | '.join(cells)} |"


def apart(needed: dict[int, int], one: int, two: int, units: int) -> float:
    """Return by which share the line through the steps of `one` and `two` units of rows is above
    the compiled step of `units`.

    Args:
        needed: bytes of compiled steps, by their units of rows.
    """
    slope = (needed[two] - needed[one]) / (two - one)
    return (needed[one] + (units - one) * slope) / needed[units] - 1


def needed_by_units(case: StepCase, numbers: Sequence[int] = UNITS) -> dict[int, int]:
    """Return the bytes of the compiled steps, by their units of rows."""
    unit = programs_of(case).unit
    needed = {}
    for units in numbers:
        rows = units * unit
        compiled = programs_of(case.with_rows(rows)).compile(rows, case.batch.length)
        needed[units] = program_bytes(compiled)
    return needed


def memory_row(case: StepCase) -> str:
    """Return a row of the second table."""
    needed = needed_by_units(case)
    cells = [case.name, f"{programs_of(case).unit} x {case.batch.length:,}"]
    cells += [f"{needed[units] / MIB:,.0f}" for units in UNITS]
    for one, two, units in LINES:
        cells.append(f"{apart(needed, one, two, units):+.0%}")
    return f"| {' | '.join(cells)} |"


def tables(steps: int) -> Sequence[str]:
    """Lines of Markdown; printed as they come."""
    lines: list[str] = []

    def show(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    peak = measure_matmul("float32", 1.0)
    copied = copied_per_second()
    show(f"Products: {peak / 1e9:,.0f} GFLOP/s; copies: {copied / 1e9:,.1f} GB/s.\n")
    show(
        "| step | rows x tokens | products, ms | memory, ms | if all overlaps | if nothing does "
        "| measured | of the first | of the second |"
    )
    show("|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for case in CASES:
        show(time_row(case, steps, peak, copied))
    show(f"\n{_ABOUT_MEMORY}\n")
    show(
        "| step | unit of rows | 1 unit, MiB | 2 | 4 | 8 | line of 1 and 2, at 4 | at 8 "
        "| of 2 and 4, at 8 |"
    )
    show("|:--|--:|--:|--:|--:|--:|--:|--:|--:|")
    for case in CASES:
        show(memory_row(case))
    return lines


def gpu_row(case: StepCase, steps: int) -> str:
    """Return a row of the table of a GPU; runs in a process of its own."""
    device = jax.devices()[0]
    programs = programs_of(case)
    start = time.perf_counter()
    compiled = programs.compile(*case.batch)
    compile_seconds = time.perf_counter() - start
    peak = peak_flops(device, "bfloat16")
    times = estimate(case, programs, compiled, peak, links(device))
    took = measured(programs, compiled, case.batch, steps)
    had = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    tokens = case.batch.rows * case.batch.length
    cells = [
        case.name,
        f"{case.batch.rows} x {case.batch.length:,}",
        f"{1e3 * times.products:,.0f}",
        f"{1e3 * times.memory:,.0f}",
        f"{1e3 * took:,.0f}",
        f"{took / times.seconds:.2f}",
        f"{took / times.without_overlap:.2f}",
        f"{tokens / took:,.0f}",
        f"{model_flops(case, programs) / took / peak:.0%}",
        f"{program_bytes(compiled) / GIB:.2f}",
        f"{had / GIB:.2f}",
        f"{compile_seconds:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def gpu_table(steps: int) -> Iterator[str]:
    """Lines of Markdown."""
    yield (
        "| step | rows x tokens | products, ms | memory, ms | measured | of the longer | of the sum "
        "| tokens/s | MFU | fit's GiB | peak GiB | compiled in s |"
    )
    yield "|:--|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    spawn = multiprocessing.get_context("spawn")
    for case in GPU_CASES:
        with concurrent.futures.ProcessPoolExecutor(1, spawn) as alone:
            try:
                yield alone.submit(gpu_row, case, steps).result()
            except (UserError, jax.errors.JaxRuntimeError, BrokenProcessPool) as error:
                said = str(error).splitlines() or [type(error).__name__]
                yield f"| {case.name} | {said[0]} |" + " |" * 10


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit_here")
    parser.add_argument("--steps", type=int, default=7, help="measured (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write the table into results/")
    parser.add_argument("--gpu", action="store_true", help="on the first GPU of this machine")
    args = parser.parse_args(argv)
    if args.gpu:
        return _main_on_gpu(args)
    jax.config.update("jax_platforms", "cpu")
    lines = tables(args.steps)
    if args.write:
        head = (
            "# What fit counts, and what a step takes\n\n"
            "`python -m benchmarks.fit_here --write`: float32 steps on one device, "
            f"{one_core.processor()}, jax {jax.__version__}.\n"
        )
        (RESULTS / "fit_here.md").write_text("\n".join([head, *lines]) + "\n")
    return 0


def _main_on_gpu(args: argparse.Namespace) -> int:
    head = (
        "# What fit counts, and what a step takes on a GPU\n\n"
        f"`python -m benchmarks.fit_here --gpu --write` on {_gpu_kind()}, "
        f"jax {jax.__version__}: bfloat16 products and activations, float32 parameters, AdamW, "
        f"medians of {args.steps} steps. Products and memory by the data sheet, as "
        "`maxtrain fit` counts them. MFU: of the FLOPs that causal attention needs. Each is a "
        "process of its own, and the peak is that process's. The model is llama3_1b (1.24 B "
        "parameters), or with experts qwen3_30b_a3b with 4 of its 48 layers; remat=full, unless "
        "nothing else is said.\n"
    )
    lines = [head]
    for line in gpu_table(args.steps):
        print(line, flush=True)
        lines.append(line)
        if args.write:
            (RESULTS / "fit_here_gpu.md").write_text("\n".join(lines) + "\n")
    return 0


def _gpu_kind() -> str:
    """Return the kind of the first GPU. Another process reads it: this one would keep the GPU's
    memory.

    Raises:
        JaxRuntimeError: there is none.
    """
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, spawn) as alone:
        return alone.submit(first_gpu).result()


def first_gpu() -> str:
    """The kind of the first GPU."""
    return jax.devices("gpu")[0].device_kind


if __name__ == "__main__":
    sys.exit(main())
