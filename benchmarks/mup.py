"""Does the best learning rate stay the same when the model gets wider? With muP and without, on a
random task.

    python -m benchmarks.mup [--write] [--steps 60] [--widths 64 256]

A random table gives each token from the two tokens before it, with some noise; every step has new
tokens. The models have two layers, head_dim 16, and heads and mlp_dim in proportion to the width.
They are trained by AdamW without decay, at a constant rate after a short warm-up; the base width is
64. tests/models/test_mup.py uses `sweep` and `growth`, too.
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
from maxtrain.train_step.optimizer import make_optimizer

RESULTS = Path(__file__).parent / "results" / "mup.md"
BASE = 64
VOCAB = 32
ROWS = 8
LENGTH = 32
GROWTH_WIDTHS = (64, 128, 256, 512)
GROWTH_RATE = 2.0**-9
# So few that no model has learned much.
GROWTH_STEPS = 5
RATES = tuple(2.0**-e for e in range(10, 2, -1))
# How a row is named, by the width of muP's base model.
NAMES = {None: "standard", BASE: "muP"}
EXACT = PrecisionConfig(params="float32", compute="float32")


def model_of(width: int) -> ModelConfig:
    """Two layers whose every width is in proportion."""
    heads = width // 16
    return ModelConfig(
        vocab_size=VOCAB,
        num_layers=2,
        embed_dim=width,
        mlp_dim=2 * width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=16,
        max_length=LENGTH,
        attention="eager",
    )


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
    return {
        "inputs": np.int32(ids[..., :-1]),
        "targets": np.int32(ids[..., 1:]),
        "segment_ids": ones,
        "positions": positions,
        "loss_mask": np.float32(ones),
    }


def train(
    width: int, base: int | None, rate: Array, batches: dict, seed: Array | int
) -> tuple[Array, Decoder, Decoder]:
    """Trains a model; to be jitted, with `rate` and `seed` traced.

    Args:
        width: of the model.
        base: the width of muP's base model; None: no muP.
        rate: learning rate.
        batches: [steps, ROWS, LENGTH].
        seed: of the initial weights.

    Returns:
        Loss of each step, the model before, and the model after.
    """
    config = model_of(width)
    init = InitConfig(mup_base_width=base)
    first = build_model(config, EXACT, jax.random.key(seed), init)
    graphdef, params = nnx.split(first)
    steps = len(batches["inputs"])
    objective = next_token()
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
        updates = jax.tree.map(lambda update: update * rate, updates)
        return (optax.apply_updates(params, updates), state), value

    (trained, _), losses = jax.lax.scan(step, (params, optimizer.init(params)), batches)
    return losses, first, nnx.merge(graphdef, trained)


def sweep(
    width: int, base: int | None, rates: Sequence[float], steps: int, seeds: int = 1
) -> np.ndarray:
    """The mean loss of the last tenth of the steps for each learning rate, over seeds; infinite for
    a run that diverged."""
    batches = jax.tree.map(jnp.asarray, make_batches(steps))
    last = max(1, steps // 10)

    @jax.jit
    def run(rate: Array, seed: Array) -> Array:
        losses, _, _ = train(width, base, rate, batches, seed)
        return losses[-last:].mean()

    found = np.zeros((len(rates), seeds))
    for i, rate in enumerate(rates):
        for seed in range(seeds):
            found[i, seed] = float(run(jnp.float32(rate), jnp.int32(seed)))
    return np.nan_to_num(found.mean(axis=1), nan=math.inf)


def growth(width: int, base: int | None) -> tuple[float, float]:
    """Return how far the last hidden states and the logits of one batch move in a few steps (root
    mean square).
    """
    batches = jax.tree.map(jnp.asarray, make_batches(GROWTH_STEPS))

    def moved(rate: Array) -> tuple[Array, Array]:
        _, first, last = train(width, base, rate, batches, 0)
        before = first.hidden(batches["inputs"][0])
        after = last.hidden(batches["inputs"][0])
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
    columns = " | ".join(f"2^{math.log2(rate):.0f}" for rate in RATES)
    head = f"| parametrisation | width | {columns} |"
    lines = ["## Loss at the end, by learning rate", "", head, "|---" * (len(RATES) + 2) + "|"]
    for base in (None, BASE):
        for width in args.widths:
            losses = sweep(width, base, RATES, args.steps)
            shown = [f"{loss:.3f}" for loss in losses]
            best = np.argmin(losses)
            shown[best] = f"**{shown[best]}**"
            lines.append(f"| {NAMES[base]} | {width} | {' | '.join(shown)} |")
            print(lines[-1], flush=True)
    at = f"{GROWTH_STEPS} steps at 2^{math.log2(GROWTH_RATE):.0f}"
    lines += [
        "",
        f"## How far one batch's activations move in {at}",
        "",
        "| parametrisation | width | last hidden states | logits |",
        "|---|---|---|---|",
    ]
    for base in (None, BASE):
        for width in GROWTH_WIDTHS:
            hidden, logits = growth(width, base)
            lines.append(f"| {NAMES[base]} | {width} | {hidden:.3f} | {logits:.3f} |")
    python = platform.python_version()
    machine = f"{os.cpu_count()} CPU cores, Python {python}, jax {jax.__version__}"
    seconds = time.perf_counter() - begin
    lines += [
        "",
        f"{machine}; {args.steps} steps, {seconds:.0f} s; the best of each row in bold.",
    ]
    text = "\n".join(lines)
    print(text)
    if args.write:
        title = "# muP: the best learning rate at several widths"
        command = "`python -m benchmarks.mup --write`"
        RESULTS.write_text(f"{title}\n\n{command}: base width {BASE}.\n\n{text}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
