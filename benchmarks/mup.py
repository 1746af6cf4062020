"""Does the best learning rate stay where it is when the model gets wider? With and without muP, on
a task made of chance.

    python -m benchmarks.mup [--write] [--steps 60] [--widths 64 256]

Tokens follow a random table from the two tokens before, with noise, fresh ones at every step. Two
layers, head_dim 16, heads and mlp_dim in proportion to the width, AdamW without decay at a constant
rate after a short warm-up; base width 64. `sweep` and `growth` are also what
tests/models/test_mup.py looks at.
"""

import argparse
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array

from maxtrain.config.schema import (
    InitConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from maxtrain.models.decoder import Decoder
from maxtrain.models.init import learning_rate_factors
from maxtrain.models.registry import build_model
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.training.optimizer import make_optimizer

RESULTS = Path(__file__).parent / "results" / "mup.md"
BASE, VOCAB, ROWS, LENGTH = 64, 32, 8, 32
GROWTH_WIDTHS, GROWTH_RATE, GROWTH_STEPS = (
    (64, 128, 256, 512),
    2.0**-9,
    5,
)  # before any of them has learned much
RATES = tuple(2.0**-e for e in range(10, 2, -1))
EXACT = PrecisionConfig(params="float32", compute="float32")


def model_of(width: int) -> ModelConfig:
    """Two layers whose every width is in proportion."""
    heads = width // 16
    return ModelConfig(
        vocab_size=VOCAB, num_layers=2, embed_dim=width, mlp_dim=2 * width, num_heads=heads, num_kv_heads=heads, head_dim=16,
        max_length=LENGTH, attention="eager",
    )  # fmt: skip


def make_batches(steps: int, seed: int = 0) -> dict[str, Any]:
    """Batches [steps, ROWS, LENGTH]: each token is the table's entry for the two before it, one in
    ten any token."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(1).integers(0, VOCAB, (VOCAB, VOCAB))
    ids = rng.integers(0, VOCAB, (steps, ROWS, LENGTH + 1))
    for t in range(2, LENGTH + 1):
        follows = rng.random((steps, ROWS)) < 0.9
        ids[..., t] = np.where(follows, table[ids[..., t - 2], ids[..., t - 1] % 4], ids[..., t])
    ones = np.ones((steps, ROWS, LENGTH), np.int32)
    positions = np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape)
    inputs, targets = (np.int32(ids[..., i : i + LENGTH]) for i in (0, 1))
    return {
        "inputs": inputs,
        "targets": targets,
        "segment_ids": ones,
        "positions": positions,
        "loss_mask": np.float32(ones),
    }


def train(
    width: int, base: int | None, rate: Array, batches: dict, seed: Array | int
) -> tuple[Array, Decoder, Decoder]:
    """Loss of each step, the model before and after; to be jitted, with `rate` traced. `base`:
    muP's width; None: no muP."""
    config, init = model_of(width), InitConfig(mup_base_width=base)
    first = build_model(config, EXACT, jax.random.key(seed), init)
    graphdef, params = nnx.split(first)
    steps, objective = len(batches["inputs"]), next_token()
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=1.0, weight_decay=0.0, clip_norm=None),
        ScheduleConfig(name="constant", warmup_steps=min(5, steps)),
        steps,
        params,
        learning_rate_factors(params, init, config),
    )

    def loss(params: nnx.State, batch: dict[str, Array]) -> Array:
        models = {POLICY: nnx.merge(graphdef, params)}
        return objective.forward(models, batch, objective.scales(batch)).loss

    def step(carry: tuple, batch: dict[str, Array]) -> tuple[tuple, Array]:
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return (
            optax.apply_updates(params, jax.tree.map(lambda u: u * rate, updates)),
            state,
        ), value

    (trained, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return losses, first, nnx.merge(graphdef, trained)


def sweep(
    width: int, base: int | None, rates: Sequence[float], steps: int, seeds: int = 1
) -> np.ndarray:
    """Mean loss of the last tenth of the steps for each learning rate, over seeds; infinite where
    it was not finite."""
    batches = jax.tree.map(jnp.asarray, make_batches(steps))
    run = jax.jit(
        lambda rate, seed: train(width, base, rate, batches, seed)[0][-max(1, steps // 10) :].mean()
    )
    losses = [
        [float(run(jnp.float32(rate), jnp.int32(seed))) for seed in range(seeds)] for rate in rates
    ]
    return np.nan_to_num(np.array(losses).mean(axis=1), nan=math.inf)


def growth(width: int, base: int | None) -> tuple[float, float]:
    """How far last hidden states and logits moved on one batch in a few steps (root mean
    square)."""
    batches = jax.tree.map(jnp.asarray, make_batches(GROWTH_STEPS))

    def moved(rate: Array) -> tuple[Array, Array]:
        _, first, last = train(width, base, rate, batches, 0)
        before, after = (model.hidden(batches["inputs"][0]) for model in (first, last))
        return jnp.std(after - before), jnp.std(last.logits(after) - first.logits(before))

    hidden, logits = jax.jit(moved)(jnp.float32(GROWTH_RATE))
    return float(hidden), float(logits)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables; with --write also to results/mup.md."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"also write {RESULTS.name}")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[64, 256], help="embed_dim of the models"
    )
    args = parser.parse_args(argv)
    begin = time.perf_counter()
    head = (
        "| parametrisation | width | "
        + " | ".join(f"2^{math.log2(rate):.0f}" for rate in RATES)
        + " |"
    )
    lines = ["## Loss at the end, by learning rate", "", head, "|---" * (len(RATES) + 2) + "|"]
    for base in (None, BASE):
        for width in args.widths:
            losses = sweep(width, base, RATES, args.steps)
            shown = [
                f"**{x:.3f}**" if i == np.argmin(losses) else f"{x:.3f}"
                for i, x in enumerate(losses)
            ]
            lines.append(f"| {'muP' if base else 'standard'} | {width} | {' | '.join(shown)} |")
            print(lines[-1], flush=True)
    lines += [
        "",
        f"## How far one batch's activations move in {GROWTH_STEPS} steps at 2^{math.log2(GROWTH_RATE):.0f}",
        "",
    ]
    lines += ["| parametrisation | width | last hidden states | logits |", "|---|---|---|---|"]
    for base in (None, BASE):
        for width in GROWTH_WIDTHS:
            hidden, logits = growth(width, base)
            lines.append(
                f"| {'muP' if base else 'standard'} | {width} | {hidden:.3f} | {logits:.3f} |"
            )
    machine = (
        f"{os.cpu_count()} CPU cores, Python {platform.python_version()}, jax {jax.__version__}"
    )
    lines += [
        "",
        f"{machine}; {args.steps} steps, {time.perf_counter() - begin:.0f} s; the best of each row in bold.",
    ]
    text = "\n".join(lines)
    print(text)
    if args.write:
        command = "python -m benchmarks.mup --write"
        RESULTS.write_text(
            f"# muP: the best learning rate at several widths\n\n`{command}`: base width {BASE}.\n\n{text}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
