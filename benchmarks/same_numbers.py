"""Does a change of the code leave the numbers of training alone?

    python -m benchmarks.same_numbers --write FILE      before the change
    python -m benchmarks.same_numbers --compare FILE    after it

It trains tiny models for three steps on eight simulated devices, in set-ups that differ in mesh,
types, remat, kernels, optimizer and family. It compares losses and norms of gradients exactly, and
a hash of the parameters that does not depend on their names.
"""

import argparse
import dataclasses
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from maxtrain.config.schema import (
    InitConfig,
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RegularizationConfig,
    ScheduleConfig,
)
from maxtrain.models.init import learning_rate_factors
from maxtrain.objectives.next_token import next_token
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import abstract_model, abstract_state, create_state
from maxtrain.train_step.step import make_train_step

MODEL = ModelConfig(
    vocab_size=96,
    num_layers=3,
    embed_dim=32,
    mlp_dim=56,
    num_heads=8,
    num_kv_heads=4,
    head_dim=6,
    loss_chunk=64,
    max_length=64,
)
SCHEDULE = ScheduleConfig(min_learning_rate=1e-3, warmup_steps=2)
ROWS = 8
LENGTH = 24
STEPS = 3


@dataclasses.dataclass(frozen=True)
class TrainSetup:
    """One way to train the tiny model."""

    mesh: tuple[int, int, int] = (1, 1, 1)
    accumulation: int = 1
    params: str = "float32"
    compute: str = "float32"
    optimizer: str = "adamw"
    init: InitConfig = InitConfig()
    regularization: RegularizationConfig | None = None
    # Of the optimizer.
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    model: dict[str, Any] = dataclasses.field(default_factory=dict)


SET_UPS: dict[str, TrainSetup] = {
    "plain": TrainSetup(),
    "bfloat16": TrainSetup(compute="bfloat16"),
    "unrolled": TrainSetup(compute="bfloat16", model={"scan_layers": False}),
    "unrolled, remat": TrainSetup(model={"scan_layers": False, "remat": "dots"}),
    "remat full": TrainSetup(compute="bfloat16", model={"remat": "full"}),
    "remat dots_no_batch": TrainSetup(mesh=(2, 2, 2), model={"remat": "dots_no_batch"}),
    "data and fsdp": TrainSetup(mesh=(2, 4, 1), compute="bfloat16"),
    "fsdp and tensor, accumulation": TrainSetup(mesh=(1, 2, 4), accumulation=2),
    "eager": TrainSetup(mesh=(2, 1, 2), model={"attention": "eager"}),
    "tied": TrainSetup(compute="bfloat16", model={"tie_embeddings": True}),
    "qwen3": TrainSetup(mesh=(1, 4, 1), model={"family": "qwen3"}),
    "muon with an average": TrainSetup(
        mesh=(2, 2, 1), optimizer="muon", options={"ema_decay": 0.9}, model={"family": "qwen3"}
    ),
    "adafactor, float16, tied": TrainSetup(
        mesh=(1, 8, 1), compute="float16", optimizer="adafactor", model={"tie_embeddings": True}
    ),
    "bfloat16 parameters": TrainSetup(
        params="bfloat16", compute="bfloat16", options={"stochastic_rounding": True}
    ),
    "dropout": TrainSetup(
        mesh=(4, 1, 1),
        regularization=RegularizationConfig(
            residual_dropout=0.1,
            embedding_dropout=0.1,
            stochastic_depth=0.2,
        ),
    ),
    "muP": TrainSetup(
        init=InitConfig(mup_base_width=16, mup_base_head_dim=3, mup_base_depth=1),
        options={"weight_decay": 0.1, "no_decay": ("mlp",)},
    ),
    "zero 3": TrainSetup(mesh=(4, 2, 1), options={"zero": 3}),
}


def batch_of(seed: int) -> dict[str, np.ndarray]:
    """Rows of two documents and padding, of random tokens."""
    rng = np.random.default_rng(seed)
    column = np.arange(LENGTH)[None]
    lengths = rng.integers(8, LENGTH + 1, (ROWS, 1))
    first = lengths // 3
    real = column < lengths
    positions = np.where(column >= first, column - first, column) * real
    return {
        "inputs": np.where(real, rng.integers(2, 96, (ROWS, LENGTH)), 0).astype(np.int32),
        "targets": rng.integers(2, 96, (ROWS, LENGTH)).astype(np.int32),
        "segment_ids": np.where(real, 1 + (column >= first), 0).astype(np.int32),
        "positions": positions.astype(np.int32),
        "loss_mask": real.astype(np.float32),
    }


def content_hash(tree: Any) -> str:
    """A hash of the arrays of a tree, whatever their names and whatever their order."""
    hashes = []
    for leaf in jax.tree.leaves(tree):
        array = np.asarray(jax.device_get(leaf))
        hashes.append(hashlib.sha256(array.tobytes()).hexdigest())
    return hashlib.sha256(" ".join(sorted(hashes)).encode()).hexdigest()[:16]


def numbers_of(set_up: TrainSetup) -> dict[str, Any]:
    """Return what training gives."""
    model = dataclasses.replace(MODEL, **set_up.model)
    precision = PrecisionConfig(params=set_up.params, compute=set_up.compute)
    config = OptimizerConfig(
        name=set_up.optimizer, learning_rate=1e-2, clip_norm=0.5, **set_up.options
    )
    mesh = make_mesh(MeshConfig(*set_up.mesh), jax.devices()[: np.prod(set_up.mesh)])
    loss_scale = None
    if set_up.compute == "float16":
        loss_scale = LossScaleConfig(initial=256.0, window=2)
    graphdef, params = abstract_model(model, precision, mesh)
    factors = learning_rate_factors(params, set_up.init, model)
    rule = make_optimizer(config, SCHEDULE, STEPS, params, factors)
    abstract = abstract_state(params, rule, mesh, loss_scale, config.zero)
    state = create_state(abstract, model, precision, rule, 5, loss_scale, set_up.init)
    step = make_train_step(
        abstract,
        {"policy": graphdef},
        next_token(regularization=set_up.regularization or RegularizationConfig()),
        rule,
        make_schedule(SCHEDULE, config.learning_rate, STEPS),
        set_up.accumulation,
        loss_scale=loss_scale,
        stochastic_rounding=config.stochastic_rounding,
        zero=config.zero,
    )
    put = BatchLayout(mesh, ROWS, LENGTH).to_global
    first = content_hash(state.trainable)
    losses = []
    norms = []
    with jax.set_mesh(mesh):
        for number in range(STEPS):
            state, metrics = step(state, put(batch_of(number)))
            losses.append(float(metrics["loss"]).hex())
            norms.append(float(metrics["grad_norm"]).hex())
    return {
        "initial_params": first,
        "losses": losses,
        "grad_norms": norms,
        "params": content_hash(state.trainable),
    }


def main() -> int:
    """Runs the command; 0, or 1 if a number differs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", type=Path, help="file for the numbers")
    parser.add_argument("--compare", type=Path, help="file with earlier numbers")
    parser.add_argument("--only", help="a part of the names of the set-ups to run")
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", 8)
    found = {}
    for name, set_up in SET_UPS.items():
        if args.only is None or args.only in name:
            found[name] = numbers_of(set_up)
            print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
    if args.write:
        args.write.write_text(json.dumps(found, indent=1) + "\n")
    different = []
    if args.compare:
        earlier = json.loads(args.compare.read_text())
        different = [name for name in found if earlier.get(name) != found[name]]
        for name in different:
            print(f"{name}:\n  then {earlier.get(name)}\n  now  {found[name]}")
        print(f"{len(found) - len(different)} of {len(found)} set-ups are the same bit for bit")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
