"""Ten steps on meshes of eight devices, against the same steps on one: losses, norms of gradients,
and every gradient of the first step.

    python -m benchmarks.meshes [--only fsdp4-tensor2 ...] [--write]

Devices are simulated. Rows have several documents and padding. A mesh fails if it is further than
1e-5 from one device, relative to the loss, to the norm, or to the largest gradient of the array.
"""

import argparse
import dataclasses
import functools
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from benchmarks.families import FLOAT32, PLAIN, Training, training
from benchmarks.one_core import processor
from maxtrain.config.schema import (
    InitConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    PipelineConfig,
    RoutingConfig,
)
from maxtrain.models.registry import build_model
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.mesh import make_mesh
from maxtrain.training.partition import models_from
from maxtrain.training.state import abstract_model
from maxtrain.training.step import gradients

RESULTS = Path(__file__).parent / "results" / "meshes.md"
DEVICES = 8
STEPS = 10
B = 16
T = 32
TOLERANCE = 1e-5

DENSE = ModelConfig(
    vocab_size=128,
    num_layers=4,
    embed_dim=64,
    mlp_dim=96,
    num_heads=16,
    num_kv_heads=8,
    head_dim=4,
    max_length=T,
)
EXPERTS = dataclasses.replace(
    DENSE,
    family="mixtral",
    mlp_dim=32,
    moe=MoeConfig(num_experts=8, experts_per_token=2),
    routing=RoutingConfig(balance=0.01, balance_scope="global"),
)
RING = {"attention": "ring"}


class Case(NamedTuple):
    """A mesh, and what else is asked for.

    Attributes:
        model: whose layers are split.
        axes: sizes of axes other than 1.
        changes: keys of the model.
        accumulation: micro-batches of a step.
    """

    model: ModelConfig
    axes: Mapping[str, int]
    changes: Mapping[str, Any] = {}
    accumulation: int = 1

    @property
    def name(self) -> str:
        parts = [f"{axis}{size}" for axis, size in self.axes.items()]
        if self.model is EXPERTS:
            parts.insert(0, "moe")
        if self.accumulation > 1:
            parts.append(f"accumulation{self.accumulation}")
        if self.changes.get("attention") == "ring":
            parts.append("ring")
        if "pipeline" in self.changes:
            parts.append(f"rounds{self.changes['pipeline'].rounds}")
        return "-".join(parts)


CASES = (
    Case(DENSE, {"data": 8}),
    Case(DENSE, {"fsdp": 8}),
    Case(DENSE, {"tensor": 8}),
    Case(DENSE, {"context": 8}, RING),
    Case(DENSE, {"context": 8}),
    Case(DENSE, {"stage": 4, "data": 2}),
    Case(DENSE, {"data": 2, "fsdp": 4}, {"remat": "full"}),
    Case(DENSE, {"fsdp": 4, "tensor": 2}),
    Case(DENSE, {"fsdp": 2, "tensor": 4}, {"scan_layers": False}),
    Case(DENSE, {"data": 2, "fsdp": 2, "tensor": 2}, accumulation=2),
    Case(DENSE, {"fsdp": 4, "context": 2}, RING),
    Case(DENSE, {"fsdp": 2, "context": 2, "tensor": 2}),
    Case(DENSE, {"data": 2, "context": 2, "tensor": 2}, RING, 2),
    Case(DENSE, {"stage": 2, "fsdp": 4}),
    Case(DENSE, {"stage": 2, "fsdp": 2, "tensor": 2}, {"remat": "full"}, 2),
    Case(DENSE, {"stage": 2, "fsdp": 2, "context": 2}, RING),
    Case(DENSE, {"stage": 2, "tensor": 4}),
    Case(DENSE, {"stage": 2, "data": 4}, {"pipeline": PipelineConfig(rounds=2)}),
    Case(EXPERTS, {"fsdp": 8}),
    Case(EXPERTS, {"expert": 8}),
    Case(EXPERTS, {"fsdp": 2, "expert": 4}),
    Case(EXPERTS, {"data": 2, "expert": 4}, accumulation=2),
    Case(EXPERTS, {"fsdp": 2, "expert": 2, "tensor": 2}),
    Case(EXPERTS, {"fsdp": 2, "context": 2, "expert": 2}, RING),
    Case(EXPERTS, {"fsdp": 4, "tensor": 2}),
    Case(EXPERTS, {"stage": 2, "fsdp": 4}),
)


class Found(NamedTuple):
    """What a mesh computes; gradients by the path of their array."""

    losses: list[float]
    norms: list[float]
    gradients: dict[tuple, np.ndarray]


class Apart(NamedTuple):
    """How far a mesh is from one device, relative."""

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


def computed(case: Case) -> Found:
    """The steps of a case on its mesh."""
    config = dataclasses.replace(case.model, **case.changes)
    mesh_config = MeshConfig(**{"fsdp": 1} | dict(case.axes))
    count = math.prod(case.axes.values())
    mesh = make_mesh(mesh_config, jax.devices()[:count])
    with jax.set_mesh(mesh):
        model = _model(config, mesh)
        parts = training(model, mesh, (STEPS, B, T + 1), case.accumulation)
        first = parts.layout.to_global(batch_of(0))
        grads = _first_gradients(parts, first, case.accumulation)
        state = parts.state
        losses = []
        norms = []
        for step in range(STEPS):
            batch = parts.layout.to_global(batch_of(step))
            state, metrics = parts.step(state, batch)
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
    return Found(losses, norms, grads)


def _model(config: ModelConfig, mesh: jax.sharding.Mesh) -> Any:
    """The same weights on every mesh."""
    graphdef, abstract = abstract_model(config, FLOAT32, mesh)
    plain = dataclasses.replace(config, scan_layers=True)

    @functools.partial(jax.jit, out_shardings=jax.tree.map(lambda x: x.sharding, abstract))
    def draw() -> nnx.State:
        return nnx.state(build_model(plain, FLOAT32, 0, InitConfig()))

    return nnx.merge(graphdef, draw())


def _first_gradients(
    parts: Training, batch: dict[str, jax.Array], accumulation: int
) -> dict[tuple, np.ndarray]:
    models = models_from({POLICY: parts.graphdef}, buffers=parts.state.buffers)

    @jax.jit
    def compute(params: nnx.State, batch: dict[str, jax.Array]) -> nnx.State:
        return gradients(models, params, batch, PLAIN, PLAIN.scales(batch), accumulation)[1]

    found = {}
    for path, variable in nnx.to_flat_state(compute(parts.state.trainable, batch)):
        found[path] = np.asarray(variable.get_value())
    return found


@functools.cache
def on_one_device(experts: bool) -> Found:
    """The steps that all meshes are held to."""
    return computed(Case(EXPERTS if experts else DENSE, {"fsdp": 1}))


def apart(case: Case) -> Apart:
    """A case against one device."""
    expected = on_one_device(case.model is EXPERTS)
    began = time.perf_counter()
    found = computed(case)
    seconds = time.perf_counter() - began
    worst = 0.0
    for path, gradient in expected.gradients.items():
        difference = np.abs(found.gradients[path] - gradient).max()
        worst = max(worst, float(difference / np.abs(gradient).max()))
    return Apart(
        _relative(found.losses, expected.losses),
        _relative(found.norms, expected.norms),
        worst,
        seconds,
    )


def _relative(found: Sequence[float], expected: Sequence[float]) -> float:
    return float(np.max(np.abs(np.asarray(found) / np.asarray(expected) - 1)))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints the table; 1: a mesh is too far from one device."""
    parser = argparse.ArgumentParser("python -m benchmarks.meshes", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    names = [case.name for case in CASES]
    parser.add_argument("--only", choices=names, action="append", help="these meshes")
    parser.add_argument("--write", action="store_true", help=f"also to {RESULTS.name}")
    asked = parser.parse_args(argv)
    jax.config.update("jax_num_cpu_devices", DEVICES)
    jax.config.update("jax_platforms", "cpu")
    lines = ["| mesh | loss | norm | gradients | s |", "|---|--:|--:|--:|--:|"]
    print("\n".join(lines), flush=True)
    failed = []
    for case in CASES:
        if asked.only and case.name not in asked.only:
            continue
        found = apart(case)
        cells = [f"{number:.1e}" for number in found[:3]]
        lines.append(f"| {' | '.join([case.name, *cells, f'{found.seconds:.0f}'])} |")
        print(lines[-1], flush=True)
        if not found.is_close():
            failed.append(case.name)
    if failed:
        print(f"further than {TOLERANCE:.0e} from one device: {', '.join(failed)}", file=sys.stderr)
    if asked.write:
        RESULTS.write_text(report(lines))
    return int(bool(failed))


def report(lines: Sequence[str]) -> str:
    about = (
        f"`python -m benchmarks.meshes --write` on {DEVICES} simulated devices of "
        f"{os.cpu_count()} cores of {processor()}; Python {platform.python_version()}, jax "
        f"{version('jax')}."
    )
    what = (
        f"{STEPS} AdamW steps in float32 of {B} rows of {T} tokens, packed, with a dense model and "
        "one with experts (`moe`), against the same steps on one device: the largest relative "
        "difference of a loss, of a gradient's norm, and of a gradient of the first step, relative "
        "to the largest of its array. Seconds have compilation."
    )
    return "\n\n".join(["# Meshes", about, what, "\n".join(lines)]) + "\n"


if __name__ == "__main__":
    sys.exit(main())
