"""Compute, memory and traffic of a device as devices are added, each with rows of its own: the
training step of one small model, compiled for 8 to 512 devices that are not here.

    python -m benchmarks.weak_scaling [--only WORD] [--write]

prints the rows of benchmarks/results/weak_scaling.md; --write puts them there, keeping rows that
--only leaves out. Compiling takes seconds to minutes a row; nothing is executed.
"""

import argparse
import importlib.metadata
import sys
from pathlib import Path
from typing import NamedTuple

from maxtrain.commands.fit.estimate import FitEstimate, fit_step
from maxtrain.config import RunConfig, load_config
from maxtrain.parallel.memory import memory_limit
from maxtrain.parallel.topologies import described_devices

RESULTS = Path(__file__).parent / "results" / "weak_scaling.md"
TPUS = {
    8: "v5p:2x2x2",
    16: "v5p:2x2x4",
    32: "v5p:2x4x4",
    64: "v5p:4x4x4",
    128: "v5p:4x4x8",
    256: "v5p:4x8x8",
    512: "v5p:8x8x8",
}
GPUS = {
    8: "h100:8",
    16: "h100:2x8",
    32: "h100:4x8",
    64: "h100:8x8",
    128: "h100:16x8",
    256: "h100:32x8",
    512: "h100:64x8",
}
# 14.7 M weights: four layers that are scanned, embedding and head.
MODEL = (
    "config=llama3_8b",
    "model.vocab_size=4096",
    "model.num_layers=4",
    "model.scan_layers=true",
    "model.embed_dim=512",
    "model.mlp_dim=1024",
    "model.num_heads=4",
    "model.num_kv_heads=4",
    "model.head_dim=128",
    "model.max_length=512",
    "data.seq_length=512",
)
ROWS_OF_A_DEVICE = 2
_TENSOR = 4
_MIB = 1 << 20
_REPLICA = 64
_KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute")
_COLUMNS = (
    "mesh",
    "devices",
    "FLOPs of the model",
    "FLOPs of the program",
    "memory",
    *_KINDS,
    "network, ms",
    "a step, ms",
)
HEAD = """# Weak scaling, by compilation

`python -m benchmarks.weak_scaling --write`: one step of {weights:.1f} M weights ({layers} layers of {width:,}, a vocabulary of {vocab:,}),
with {rows} rows of {length:,} tokens for each device, `model.remat=full`, compiled for devices that are not here (jax {jax},
libtpu {libtpu}; `maxtrain fit`, [devices](../../docs/devices.md#devices-that-are-not-here)). Nothing was executed.

All numbers are those of one device: GFLOP, MiB of memory, and MiB that it sends in a step by kind of collective. **Times are
estimates** from data sheets, for the network alone and for the longest of products, memory and network.

"""


class ScalingCase(NamedTuple):
    """A row: axes of the mesh beside `mesh.fsdp`, which has the devices that are left."""

    topology: str
    num_devices: int
    axes: tuple[str, ...] = ()

    @property
    def mesh(self) -> str:
        """The axes, for people."""
        others = [axis.removeprefix("mesh.") for axis in self.axes]
        return " ".join(["fsdp", *others])

    def config(self, model: tuple[str, ...]) -> RunConfig:
        rows = f"data.batch_size={ROWS_OF_A_DEVICE * self.num_devices}"
        return load_config([*model, "mesh.fsdp=-1", *self.axes, rows])


def cases() -> list[ScalingCase]:
    """All rows, in their order."""
    found = []
    for topologies in (TPUS, GPUS):
        found += [ScalingCase(name, count) for count, name in topologies.items()]
    for topologies in (TPUS, GPUS):
        split = (f"mesh.tensor={_TENSOR}",)
        found += [ScalingCase(topologies[count], count, split) for count in (8, 64, 512)]
    # A slice is one network; replicas are parts of it.
    for count in (128, 512):
        found.append(ScalingCase(TPUS[count], count, (f"mesh.data={count // _REPLICA}",)))
    # A host is a replica; between hosts there are gradients alone.
    for count in (16, 64, 128, 512):
        found.append(ScalingCase(GPUS[count], count, (f"mesh.dcn_data={count // 8}",)))
    return found


def measure(case: ScalingCase, model: tuple[str, ...] = MODEL) -> FitEstimate:
    """The compiled step."""
    devices = described_devices(case.topology)
    limit = memory_limit(devices[0], described=True)
    return fit_step(case.config(model), devices, limit)


def row(case: ScalingCase, found: FitEstimate) -> str:
    """Return a row of the table."""
    sent: dict[str, float] = dict.fromkeys(_KINDS, 0.0)
    for line in found.lines:
        sent[line.kind] += line.num_bytes
    assert found.total is not None
    assert found.times is not None
    cells = [
        case.mesh,
        case.topology,
        f"{found.model_share / 1e9:.1f}",
        f"{found.flops / 1e9:.1f}",
        f"{found.total / _MIB:.2f}",
        *(f"{count / _MIB:.2f}" for count in sent.values()),
        f"{1e3 * found.times.network:.3f}",
        f"{1e3 * found.times.seconds:.3f}",
    ]
    return f"| {' | '.join(cells)} |"


def kept_rows(text: str) -> dict[tuple[str, ...], str]:
    """The rows of a written table, by mesh and devices."""
    found = {}
    for line in text.splitlines():
        if line.startswith("| ") and ":" in line:
            cells = [cell.strip() for cell in line.split("|")]
            found[cells[1], cells[2]] = line
    return found


def document(rows: dict[tuple[str, ...], str], text: str) -> str:
    """The whole text: head, table, and what is written behind it by hand."""
    versions = {name: importlib.metadata.version(name) for name in ("jax", "libtpu")}
    config = load_config(list(MODEL))
    model = config.model
    assert model.vocab_size is not None
    head_size = model.num_heads * 128
    of_layer = model.embed_dim * (4 * head_size + 3 * model.mlp_dim)
    weights = model.num_layers * of_layer + 2 * model.vocab_size * model.embed_dim
    head = HEAD.format(
        weights=weights / 1e6,
        layers=model.num_layers,
        width=model.embed_dim,
        vocab=model.vocab_size,
        rows=ROWS_OF_A_DEVICE,
        length=config.data.seq_length,
        **versions,
    )
    table = [f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for case in cases():
        key = (case.mesh, case.topology)
        if key in rows:
            table.append(rows[key])
    behind = ""
    _, mark, rest = text.partition("\n## ")
    if mark:
        behind = f"{mark}{rest}"
    return head + "\n".join(table) + "\n" + behind


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weak_scaling")
    parser.add_argument("--only", default="", help="rows of which 'MESH on DEVICES ' has this")
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    args = parser.parse_args(argv)
    text = RESULTS.read_text() if RESULTS.exists() else ""
    rows = kept_rows(text)
    print(f"| {' | '.join(_COLUMNS)} |")
    for case in cases():
        if args.only not in f"{case.mesh} on {case.topology} ":
            continue
        found = measure(case)
        rows[case.mesh, case.topology] = row(case, found)
        print(rows[case.mesh, case.topology], f"{found.compile_seconds:.0f} s", flush=True)
        for warning in found.warnings:
            print(f"XLA gathers an array whole: {warning}", file=sys.stderr)
        if args.write:
            RESULTS.write_text(document(rows, text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
