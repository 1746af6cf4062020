"""Ten steps on meshes of eight devices, against the same steps on one: losses, norms of gradients,
and every gradient of the first step.

    python -m benchmarks.meshes [--only fsdp4-tensor2] [--processes 1] [--write]

Devices are simulated: by one process all eight, and some meshes by two processes that have four
each, and by four that have two. Rows have several documents and padding. A mesh fails if it is
further than 1e-5 from one device, relative to the loss, to the norm, or to the largest gradient of
the array.
"""

import argparse
import dataclasses
import functools
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.families import FLOAT32, PLAIN, Training, training
from benchmarks.mesh_cases import CASES, DENSE, MeshCase, T
from benchmarks.one_core import processor
from maxtrain.commands.launch.processes import SETTLE, Processes, addresses, start_process
from maxtrain.config.schema import InitConfig, MeshConfig, ModelConfig
from maxtrain.config.sections.rules import RulesConfig
from maxtrain.models.registry import build_model
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel import distributed
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import stored_rules
from maxtrain.train_step.state import abstract_model
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from

RESULTS = Path(__file__).parent / "results" / "meshes.md"
DEVICES = 8
STEPS = 10
B = 16
TOLERANCE = 1e-5
# Numbers of processes that share the devices.
SEVERAL = (2, 4)
# Characters of the output of processes that are shown if one fails.
_MOST_SAID = 4000


class MeshResult(NamedTuple):
    """Results of a mesh; gradients by the path of their array."""

    losses: np.ndarray
    norms: np.ndarray
    gradients: dict[str, np.ndarray]
    seconds: float

    def write(self, file: Path) -> None:
        scalars = {"losses": self.losses, "norms": self.norms, "seconds": np.array(self.seconds)}
        np.savez(file, **scalars, **self.gradients)

    @classmethod
    def read(cls, file: Path) -> "MeshResult":
        with np.load(file) as stored:
            arrays = dict(stored)
        seconds = float(arrays.pop("seconds"))
        return cls(arrays.pop("losses"), arrays.pop("norms"), arrays, seconds)


class MeshDifference(NamedTuple):
    """Relative distance of a mesh from one device."""

    losses: float
    norms: float
    gradients: float
    seconds: float

    def is_close(self) -> bool:
        return max(self.losses, self.norms, self.gradients) <= TOLERANCE


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Rows of three documents, the last of which is padding in every third row."""
    rng = np.random.default_rng([1, step])
    tokens = rng.integers(0, DENSE.vocab_size or 0, (B, T + 1), np.int32)
    starts = np.sort(rng.integers(3, T - 3, (B, 2)), axis=1)
    columns = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    second = columns >= starts[:, :1]
    third = columns >= starts[:, 1:]
    segments = 1 + second + third
    begins = np.where(third, starts[:, 1:], np.where(second, starts[:, :1], 0))
    segments[::3] = np.where(third[::3], 0, segments[::3])
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": segments.astype(np.int32),
        "positions": (columns - begins).astype(np.int32),
        "loss_mask": (segments > 0).astype(np.float32),
    }


def computed(case: MeshCase) -> MeshResult:
    """The steps of a case on its mesh, of the devices of all processes."""
    began = time.perf_counter()
    config = dataclasses.replace(case.model, **case.changes)
    mesh_config = MeshConfig(**{"fsdp": 1} | dict(case.axes))
    count = math.prod(case.axes.values())
    mesh = make_mesh(mesh_config, jax.devices()[:count])
    with jax.set_mesh(mesh):
        model = _model(config, mesh, case.rules)
        rules = stored_rules(case.rules)
        parts = training(model, mesh, (STEPS, B, T + 1), case.accumulation, rules=rules)
        first = _placed(parts, 0)
        grads = _first_gradients(parts, first, case.accumulation)
        state = parts.state
        losses = []
        norms = []
        for step in range(STEPS):
            state, metrics = parts.step(state, _placed(parts, step))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    seconds = time.perf_counter() - began
    return MeshResult(np.array(losses), np.array(norms), grads, seconds)


def _placed(parts: Training, step: int) -> dict[str, jax.Array]:
    """The batch of a step on its mesh."""
    return parts.layout.to_global(parts.layout.own_part(batch_of(step)))


def _model(config: ModelConfig, mesh: jax.sharding.Mesh, rules: RulesConfig) -> Any:
    """The same weights on every mesh."""
    graphdef, abstract = abstract_model(config, FLOAT32, mesh, stored_rules(rules))
    plain = dataclasses.replace(config, scan_layers=True)

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
    def draw() -> nnx.State:
        return nnx.state(build_model(plain, FLOAT32, 0, InitConfig()))

    return nnx.merge(graphdef, draw())


def _first_gradients(
    parts: Training, batch: dict[str, jax.Array], accumulation: int
) -> dict[str, np.ndarray]:
    models = models_from({POLICY: parts.graphdef}, buffers=parts.state.buffers)

    @jax.jit
    def compute(params: nnx.State, batch: dict[str, jax.Array]) -> nnx.State:
        return gradients(models, params, batch, PLAIN, PLAIN.scales(batch), accumulation)[1]

    grads = compute(parts.state.trainable, batch)
    # Whole on each device, so that every process can read them.
    grads = jax.jit(lambda tree: tree, out_shardings=NamedSharding(parts.mesh, PartitionSpec()))(
        grads
    )
    found = {}
    for path, variable in nnx.to_flat_state(grads):
        found[".".join(map(str, path))] = np.asarray(variable.get_value())
    return found


def on_processes(cases: Sequence[MeshCase], count: int) -> Iterator[MeshResult]:
    """The steps of cases on the devices of several processes, one case after the other.

    RuntimeError: a process failed; with the end of their output.
    """
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.meshes", "--worker", folder]
        for case in cases:
            command += ["--only", case.name]
        log = Path(folder, "log")
        job = Processes()
        with log.open("wb") as output:
            try:
                for index, address in enumerate(addresses(count)):
                    job.add(index, start_process(command, address, output.fileno()))
                ended = job.wait(SETTLE, lambda: math.inf)
            finally:
                job.end_all()
        if ended.code:
            said = log.read_text(errors="replace")[-_MOST_SAID:]
            raise RuntimeError(f"of {count} processes, some ended with {ended.failed}:\n{said}")
        for case in cases:
            yield MeshResult.read(Path(folder, f"{case.name}.npz"))


def work(cases: Sequence[MeshCase], folder: Path) -> None:
    """Run the work of each process of a job; the first one writes the results."""
    count = int(os.environ["JAX_NUM_PROCESSES"])
    mesh = MeshConfig(platform="cpu", simulated_devices=DEVICES // count)
    distributed.start(mesh, compilation_cache=None)
    for case in cases:
        found = computed(case)
        if jax.process_index() == 0:
            found.write(folder / f"{case.name}.npz")


@functools.cache
def on_one_device(model: ModelConfig) -> MeshResult:
    """The steps that all meshes of a model are held to."""
    return computed(MeshCase(model, {"fsdp": 1}))


def apart(case: MeshCase, found: MeshResult) -> MeshDifference:
    """Return what a mesh has found for a case, against one device."""
    expected = on_one_device(case.model)
    worst = 0.0
    for path, gradient in expected.gradients.items():
        difference = np.abs(found.gradients[path] - gradient).max()
        worst = max(worst, float(difference / np.abs(gradient).max()))
    return MeshDifference(
        _relative(found.losses, expected.losses),
        _relative(found.norms, expected.norms),
        worst,
        found.seconds,
    )


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.max(np.abs(found / expected - 1)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.meshes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, action="append", help="this mesh; may be repeated")
    parser.add_argument(
        "--processes",
        type=int,
        choices=(1, *SEVERAL),
        action="append",
        help="number of processes; may be repeated (default: 1, 2 and 4)",
    )
    parser.add_argument("--write", action="store_true", help=f"also to {RESULTS.name}")
    # What the processes of a job are started with: the folder for what they find.
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints the table; 1: a mesh is too far from one device."""
    args = _parse(argv)
    cases = [case for case in CASES if not args.only or case.name in args.only]
    if args.worker:
        work(cases, args.worker)
        return 0
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    lines = [
        "| mesh | processes | loss | norm | gradients | s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    print("\n".join(lines), flush=True)
    failed = []
    for count in args.processes or (1, *SEVERAL):
        some = cases
        found_of = map(computed, some)
        if count > 1:
            some = [case for case in cases if case.is_shared]
            found_of = on_processes(some, count)
        for case, result in zip(some, found_of, strict=True):
            found = apart(case, result)
            cells = [f"{number:.1e}" for number in found[:3]]
            cells = [case.name, f"{count}", *cells, f"{found.seconds:.0f}"]
            lines.append(f"| {' | '.join(cells)} |")
            print(lines[-1], flush=True)
            if not found.is_close():
                failed.append(f"{case.name} of {count}")
    if failed:
        print(f"further than {TOLERANCE:.0e} from one device: {', '.join(failed)}", file=sys.stderr)
    if args.write:
        RESULTS.write_text(report(lines))
    return int(bool(failed))


def report(lines: Sequence[str]) -> str:
    about = (
        f"`python -m benchmarks.meshes --write` on {DEVICES} simulated devices of "
        f"{os.cpu_count()} cores of {processor()}; Python {platform.python_version()}, jax "
        f"{version('jax')}."
    )
    what = (
        f"{STEPS} AdamW steps in float32 of {B} rows of {T} tokens, packed, with a dense model of "
        "4 layers (8 for stage8) and one with experts (`moe`), against the same steps on one "
        "device: the largest relative difference of a loss, of a gradient's norm, and of a "
        "gradient of the first step, relative to the largest of its array. With several "
        "processes, each has its share of the devices, and they talk through gloo. "
        "`stored-elsewhere`: with `mesh.rules` of all that is split. Seconds have compilation."
    )
    return "\n\n".join(["# Meshes", about, what, "\n".join(lines)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
