"""Time of attention on this device, forward and backward, with each kernel that it has.

    python -m benchmarks.attention [--rows 4] [--length 4096] [--repeats 10] [--write]

Rows are one document, or packed documents of 512 tokens in the mean, or one document with a window
of 1,024 tokens. FLOPs are those of the pairs of queries and keys that see each other, a backward
pass counting two and a half times a forward one (five products instead of two), so that a kernel
that computes what is masked has fewer per second. Kernels of one row take turns, and the median
counts. A kernel that does not look at documents has no figure for packed rows.
"""

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import one_core
from data_pipeline.base.errors import UserError
from maxtrain.config.across.attention_choice import device_problems
from maxtrain.config.kernels import ATTENTION
from maxtrain.ops.attention import attention
from maxtrain.ops.attention.mask import Mask
from maxtrain.parallel.hardware import hardware_of

RESULTS = Path(__file__).parent / "results" / "attention.md"
_MEAN_DOCUMENT = 512
_WINDOW = 1024
# Query heads, key heads, numbers of a head: of llama3_8b, llama3_1b and qwen2_5_0_5b.
HEADS = ((32, 8, 128), (32, 8, 64), (14, 2, 64))


class AttentionCase(NamedTuple):
    """Rows of a measurement."""

    name: str
    segments: np.ndarray
    window: int | None

    @property
    def is_packed(self) -> bool:
        return bool(self.segments.max() > 1)

    @property
    def pairs(self) -> int:
        """Pairs of queries and keys that see each other."""
        total = 0
        for row in self.segments:
            for length in np.unique(row, return_counts=True)[1]:
                seen = np.arange(1, length + 1)
                if self.window is not None:
                    seen = np.minimum(seen, self.window)
                total += int(seen.sum())
        return total


def kinds_of_rows(rows: int, length: int) -> list[AttentionCase]:
    whole = np.ones((rows, length), np.int32)
    rng = np.random.default_rng(0)
    begins = rng.random((rows, length)) < 1 / _MEAN_DOCUMENT
    packed = 1 + np.cumsum(begins, axis=1).astype(np.int32)
    return [
        AttentionCase("one document", whole, None),
        AttentionCase(f"documents of {_MEAN_DOCUMENT}", packed, None),
        AttentionCase(f"a window of {_WINDOW:,}", whole, _WINDOW),
    ]


def kernels_here() -> list[str]:
    """Return the kernels of this device for rows that are not split."""
    here = hardware_of(jax.devices()[0])
    found = []
    for name, can in ATTENTION.items():
        if not can.context and next(device_problems(name, here), None) is None:
            found.append(name)
    return found


def step_of(kernel: str, window: int | None) -> Callable[..., Any]:
    """The output and the gradients, compiled when it is first called."""

    def step(q: Any, k: Any, v: Any, g: Any, segments: Any) -> Any:
        mask = Mask.of_rows(segments).within(window)
        call = functools.partial(attention, mask=mask, kernel=kernel, dtype="bfloat16")
        out, vjp = jax.vjp(call, q, k, v)
        return out.astype(q.dtype), *vjp(g)

    return jax.jit(step)


def seconds_of(step: Callable[..., Any], arrays: tuple[Any, ...]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    return time.perf_counter() - start


def table(rows: int, length: int, repeats: int) -> Iterator[str]:
    """Lines of Markdown."""
    kernels = kernels_here()
    named = "".join(f" {kernel}, ms | TFLOP/s |" for kernel in kernels)
    yield f"| heads | rows |{named}"
    yield "|:--|:--|" + "--:|--:|" * len(kernels)
    for N, K, H in HEADS:
        rng = np.random.default_rng(0)
        shapes = ((N, H), (K, H), (K, H), (N, H))
        q, k, v, g = (
            jnp.asarray(rng.normal(size=(rows, length, *shape)), jnp.bfloat16) for shape in shapes
        )
        for kind in kinds_of_rows(rows, length):
            arrays = (q, k, v, g.astype(jnp.float32), jnp.asarray(kind.segments))
            cells = cells_of(kernels, kind, arrays, repeats, flops=14 * kind.pairs * N * H)
            yield f"| {N} and {K} of {H} | {kind.name} | {' | '.join(cells)} |"


def cells_of(
    kernels: list[str], kind: AttentionCase, arrays: tuple[Any, ...], repeats: int, flops: float
) -> list[str]:
    """Milliseconds and TFLOP/s of each kernel."""
    steps = {}
    problems = {}
    for kernel in kernels:
        if kind.is_packed and not ATTENTION[kernel].segments:
            problems[kernel] = "-"
            continue
        step = step_of(kernel, kind.window)
        try:
            seconds_of(step, arrays)
        except (UserError, jax.errors.JaxRuntimeError) as error:
            problems[kernel] = "out of memory" if "RESOURCE_EXHAUSTED" in str(error) else "refused"
            print(f"{kernel}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        steps[kernel] = step
    seconds: dict[str, list[float]] = {kernel: [] for kernel in steps}
    for _ in range(repeats):
        for kernel, step in steps.items():
            seconds[kernel].append(seconds_of(step, arrays))
    cells = []
    for kernel in kernels:
        if kernel in problems:
            cells += [problems[kernel], ""]
            continue
        median = statistics.median(seconds[kernel])
        cells += [f"{1e3 * median:,.2f}", f"{flops / median / 1e12:,.1f}"]
    return cells


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.attention")
    parser.add_argument("--rows", type=int, default=4, help="of a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=10, help="measured (default: %(default)s)")
    parser.add_argument("--write", action="store_true", help="write results/attention.md")
    args = parser.parse_args(argv)
    device = jax.devices()[0]
    name = one_core.processor() if device.platform == "cpu" else device.device_kind
    head = (
        "# Kernels of attention\n\n"
        f"`python -m benchmarks.attention --write` on {name}, jax {jax.__version__}: forward "
        f"and backward, {args.rows} rows of {args.length:,} tokens, inputs in bfloat16, "
        f"medians of {args.repeats} that took turns. FLOPs are those of the pairs that see "
        "each other. The kernel of tokamax (mosaic) is not tuned for these shapes.\n"
    )
    lines = [head]
    for line in table(args.rows, args.length, args.repeats):
        print(line, flush=True)
        lines.append(line)
        if args.write:
            RESULTS.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
