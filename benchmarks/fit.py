"""Table of configs that fit onto devices, with what the devices send each other and the least time
of a step: `maxtrain fit` for each row, with nothing executed.

    python -m benchmarks.fit [--only WORD] [--write]

prints the tables of benchmarks/results/fit.md; --write puts them there, keeping rows that --only
leaves out. Compiling takes seconds to minutes a row.
"""

import argparse
import importlib.metadata
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from maxtrain.parallel.compiled.roofline import CollectiveTime
from maxtrain.parallel.memory import GIB

RESULTS = Path(__file__).parent / "results" / "fit.md"
_ROOT = Path(__file__).parents[1]
HEAD = """# What fits where

`python -m benchmarks.fit --write`: the real training step of each config, compiled for devices that are not here
(jax {jax}, libtpu {libtpu}; `maxtrain fit`, [devices](../../docs/devices.md#devices-that-are-not-here)). Nothing was executed.
Memory and collectives are those of the compiled program; **times are estimates** from data sheets, which no device
reaches: the longest of products, memory and network, and in brackets their sum. Slices are named by their chips: v5p:4x4x4
has 64, and is v5p-128 where their cores are counted; v5p:2x4x4 is v5p-64, and v5p:4x8x8 is v5p-512.
"""
# By hand, of the records of the rows that it names.
BEYOND = """## Beyond what is compiled here

Compilers took as many devices as they were given here: 512 TPUs and 2,048 GPUs. More were not tried, and no limit was met: layers are one
loop, so that for GPUs `llama3_405b` takes about a minute of one core on 512 as on 2,048. libtpu takes the slices that it
knows by name. What a device of `llama3_405b` needs, with 4,096 tokens of its own
(the three rows on h100 above), in GiB:

| GPUs | parameters | optimizer | gradients, activations and other temporaries | needed | |
|---|---|---|---|---|---|
| 512 | 2.97 | 5.94 | 40.67 | 49.58 | compiled |
| 1,024 | 1.49 | 2.98 | 38.03 | 42.51 | compiled |
| 2,048 | 0.75 | 1.51 | 36.93 | 39.19 | compiled |
| 4,096 | 0.38 | 0.77 | 36.05 | 37.20 | extrapolated |

Parameters and optimizer are split over N devices, all but norms, and so are gradients, 5.28 GiB of the temporaries on 512; the other
35.39 GiB are of a device's own tokens and of the weights of one layer, whatever N is: for 2,048, that said 38.97 GiB before it was
compiled. Of weights that are gathered and of gradients that are summed, a device sends (N - 1) / N: 2,047.4 GiB gathered on 512,
2,049.4 on 1,024, 2,050.4 on 2,048, and at most 2,051.4 on any number. What goes over `context` stays the same.
"""
_MEMORY = "| run | devices | mesh | step | memory, GiB | of limit | limited by | a step, s |"
_COLLECTIVES = "| run | devices | collective | over | count | a device sends, GiB | at least, s |"


class MemoryCase(NamedTuple):
    """A row: a config with overrides, and devices."""

    name: str
    topology: str
    words: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The name of the run with what it overrides."""
        return " ".join([self.name, *self.words])


_FLASH = ("model.attention=flash",)
_XLA = ("model.attention=xla",)
_PARTED = ("mesh.context=4",)
# Two devices share a row, and the state is split over all.
_LARGEST = (
    "precision.activations=bfloat16",
    "mesh.context=2",
    "model.attention=xla",
    "mesh.rules.embed=[fsdp, context]",
)
CASES = (
    MemoryCase("sft_qwen2_5_0_5b", "h200:1"),
    MemoryCase("sft_lora_qwen2_5_1_5b", "h200:1"),
    MemoryCase("grpo_qwen2_5_1_5b", "h200:1"),
    MemoryCase("llama3_8b", "v5e:16x16", (*_FLASH, "data.batch_size=256")),
    MemoryCase("llama3_8b", "v5e:16x16:2", (*_FLASH, "data.batch_size=512", "mesh.dcn_data=2")),
    MemoryCase("llama3_8b", "v5p:2x4x4", _FLASH),
    MemoryCase("llama3_8b", "v5p:4x4x4", _FLASH),
    MemoryCase("llama3_8b", "h100:8", ("optimizer.accumulation=16",)),
    MemoryCase("llama3_8b", "b200:8", ("optimizer.accumulation=4",)),
    MemoryCase("llama3_8b", "h100:8x8"),
    MemoryCase("llama3_8b", "h100:8x8", ("model.attention=triton",)),
    MemoryCase("llama3_8b", "v5p:4x4x4", (*_PARTED, "model.attention=ring")),
    MemoryCase("llama3_8b", "v5p:4x4x4", (*_PARTED, *_FLASH)),
    MemoryCase("llama3_8b", "h100:8x8", (*_PARTED, "model.attention=ring")),
    MemoryCase("llama3_8b", "h100:8x8", (*_PARTED, *_XLA)),
    MemoryCase("llama3_70b", "v5p:4x8x8", _FLASH),
    MemoryCase("llama3_70b", "v5p:8x8x8", _FLASH),
    MemoryCase("llama3_70b", "v5p:8x8x8:2", (*_FLASH, "data.batch_size=1024", "mesh.dcn_data=2")),
    MemoryCase(
        "llama3_70b",
        "v6e:16x16",
        (*_FLASH, "precision.activations=bfloat16", "data.batch_size=256"),
    ),
    MemoryCase("llama3_70b", "h100:32x8", ("optimizer.accumulation=2",)),
    MemoryCase("llama3_405b", "v5p:8x8x8", (*_FLASH, "precision.activations=bfloat16")),
    MemoryCase("llama3_405b", "h100:64x8", (*_LARGEST, "data.batch_size=256")),
    MemoryCase("llama3_405b", "h100:128x8", _LARGEST),
    MemoryCase("llama3_405b", "h100:256x8", (*_LARGEST, "data.batch_size=1024")),
    MemoryCase("mixtral_8x7b", "v5p:4x4x4", _FLASH),
    MemoryCase("mixtral_8x7b", "h100:8x8"),
    MemoryCase("qwen3_30b_a3b", "v5p:4x4x4", _FLASH),
    MemoryCase("qwen3_30b_a3b", "h100:8x8"),
    MemoryCase("deepseek_v3", "v5p:8x8x8", _XLA),
    MemoryCase("deepseek_v3", "h200:64x8"),
    MemoryCase("deepseek_v3", "h100:64x8"),
    MemoryCase("deepseek_v3", "h100:64x8", ("precision.activations=bfloat16",)),
)


def measure(case: MemoryCase) -> dict[str, Any]:
    """The record of `maxtrain fit`.

    Raises:
        RuntimeError: the command failed for another reason than that the step does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable,
            "-m",
            "maxtrain",
            "fit",
            f"config={case.name}",
            *case.words,
        ]
        command += [f"topology={case.topology}", f"output_dir={folder}", "run_name=run"]
        result = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
        written = Path(folder, "run", "fit.json")
        if not written.exists():
            raise RuntimeError(f"{' '.join(command)} failed:\n{result.stderr[-2000:]}")
        return json.loads(written.read_text())


def memory_row(case: MemoryCase, found: dict[str, Any]) -> str:
    """Return a row of the first table."""
    axes = [f"{axis}={count}" for axis, count in found["mesh"].items() if count > 1]
    step = f"{found['rows']:,} x {found['seq_length']:,}"
    if found["accumulation"] > 1:
        step += f" in {found['accumulation']}"
    total = found["total_bytes"] or found["refused_bytes"]
    needed = "too much"
    share = ""
    if total:
        needed = f"{total / GIB:,.2f}"
        share = f"{total / found['limit_bytes']:.0%}"
    if not found["fits"]:
        share = f"**{share}, does not fit**"
    cells = [case.label, case.topology, " ".join(axes) or "1", step, needed, share]
    estimate = found.get("estimate")
    if estimate is None:
        return _row(*cells, "", "")
    seconds = estimate["step_seconds"]
    time = f"{seconds:,.2f} ({estimate['step_seconds_without_overlap']:,.2f})"
    return _row(*cells, estimate["limit"], time)


def collective_rows(case: MemoryCase, found: dict[str, Any]) -> list[str]:
    """Return rows of the second table: collectives of more than a thousandth of what is sent, and
    all that is sent between slices.
    """
    lines = found["collectives"]
    most = sum(line["num_bytes"] for line in lines)
    rows = []
    for line in lines:
        if line["num_bytes"] < most / 1000 and not line["is_between_slices"]:
            continue
        sent = f"{line['num_bytes'] / GIB:,.3f}"
        over = CollectiveTime(**line).over
        count = f"{line['count']:,}"
        where = [case.label, case.topology, line["kind"], over]
        rows.append(_row(*where, count, sent, f"{line['seconds']:.3f}"))
    return rows


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _key(row: str) -> tuple[str, ...]:
    """The run and its devices."""
    return tuple(cell.strip() for cell in row.split("|")[1:3])


def kept_rows(text: str, head: str) -> dict[tuple[str, ...], list[str]]:
    """The rows of a table that is written, by run and devices."""
    found: dict[tuple[str, ...], list[str]] = {}
    if head not in text:
        return found
    for row in text.split(head, 1)[1].splitlines()[2:]:
        if not row.startswith("|"):
            break
        found.setdefault(_key(row), []).append(row)
    return found


def document(
    memory: dict[tuple[str, ...], list[str]], sent: dict[tuple[str, ...], list[str]]
) -> str:
    """The whole text, with rows in the order of the cases."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    parts = [HEAD.format(**versions)]
    about = "Collectives of a step, those of more than a thousandth of the bytes or between slices:"
    for title, head, rows in (("", _MEMORY, memory), (about, _COLLECTIVES, sent)):
        count = head.count("|") - 1
        body = []
        for case in CASES:
            body += rows.get((case.label, case.topology), [])
        lines = [head, "|" + "---|" * count, *body]
        if title:
            lines = [title, "", *lines]
        parts.append("\n".join(lines) + "\n")
    return "\n".join([*parts, BEYOND])


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fit")
    parser.add_argument("--only", default="", help="rows of which RUN on DEVICES has this")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/fit.md")
    args = parser.parse_args(argv)
    text = RESULTS.read_text() if RESULTS.exists() else ""
    memory = kept_rows(text, _MEMORY)
    sent = kept_rows(text, _COLLECTIVES)
    print(_MEMORY)
    for case in CASES:
        if args.only not in f"{case.label} on {case.topology}":
            continue
        found = measure(case)
        key = (case.label, case.topology)
        memory[key] = [memory_row(case, found)]
        sent[key] = collective_rows(case, found)
        print("\n".join([*memory[key], *sent[key]]), flush=True)
        for warning in found["compiler_warnings"]:
            print(f"XLA gathers an array whole: {warning}", file=sys.stderr, flush=True)
        if args.write:
            RESULTS.write_text(document(memory, sent))
    return 0


if __name__ == "__main__":
    sys.exit(main())
