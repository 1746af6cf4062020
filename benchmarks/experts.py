"""Experts: what keeps them busy, and what their products cost.

    python -m benchmarks.experts [--write] [--steps 300]

A small model of eight experts, two for each token, learns a random table that gives each token from
the two before it; some tokens are far more frequent than others. It is trained without anything
that evens out the shares of experts, and with each kind. Then the forward and backward pass of one
block of experts is timed with each kernel, beside a dense block with the units of a token's
experts. tests/train_step/test_expert_balance.py uses `train`, too.
"""

import argparse
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from maxtrain.config.schema import (
    InitConfig,
    MeshConfig,
    ModelConfig,
    MoeConfig,
    OptimizerConfig,
    PrecisionConfig,
    RoutingConfig,
    ScheduleConfig,
)
from maxtrain.models.context import Context
from maxtrain.models.families import FAMILIES
from maxtrain.models.init import Initializer
from maxtrain.models.layers import FEED_FORWARDS
from maxtrain.models.specs import LayerSpec, MlpSpec
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dot import MatmulPrecision
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import abstract_model, abstract_state, create_state
from maxtrain.train_step.step import make_train_step
from maxtrain.train_step.trainable import split_buffers

RESULTS = Path(__file__).parent / "results" / "experts.md"
VOCAB = 64
ROWS = 16
LENGTH = 32
RATE = 1e-2
EXACT = PrecisionConfig(params="float32", compute="float32")
MOE = MoeConfig(num_experts=8, experts_per_token=2, expert_dim=32)
LATENT = {"head_dim": 12, "num_heads": 2, "num_kv_heads": 2}


class BalanceKind(NamedTuple):
    """Configuration of load balancing between experts."""

    family: str
    routing: RoutingConfig
    # The number of micro-batches of a step.
    accumulation: int = 1


NOTHING = RoutingConfig(balance=0.0, correction_rate=0.0)
KINDS = {
    "nothing": BalanceKind("qwen3_moe", NOTHING),
    "balance, of each sequence": BalanceKind("qwen3_moe", RoutingConfig(balance=0.3)),
    "balance, of each of 4 micro-batches": BalanceKind(
        "qwen3_moe", RoutingConfig(balance=0.3, balance_scope="micro_batch"), 4
    ),
    "balance, of the whole batch": BalanceKind(
        "qwen3_moe", RoutingConfig(balance=0.3, balance_scope="global")
    ),
    "nothing, by sigmoid": BalanceKind("deepseek_v3", NOTHING),
    "correction": BalanceKind("deepseek_v3", RoutingConfig(balance=0.0, correction_rate=0.01)),
}


class TrainingCurves(NamedTuple):
    """Records of a run, a number for each step."""

    loss: np.ndarray
    max_load: np.ndarray
    entropy: np.ndarray


def model_of(family: str, routing: RoutingConfig) -> ModelConfig:
    """Two layers of experts."""
    rope_dim = 4
    latent = ModelConfig().latent
    if family == "deepseek_v3":
        latent = type(latent)(None, 16, rope_dim, 8)
    return ModelConfig(
        family=family,
        vocab_size=VOCAB,
        num_layers=2,
        embed_dim=32,
        mlp_dim=64,
        max_length=LENGTH,
        moe=MOE,
        latent=latent,
        routing=routing,
        **LATENT,
    )


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Rows that follow a table, nine times of ten; frequencies fall as 1 / rank."""
    rng = np.random.default_rng(step)
    often = 1 / np.arange(1, VOCAB + 1)
    often /= often.sum()
    table = np.random.default_rng(10_000).choice(VOCAB, (VOCAB, 4), p=often)
    ids = rng.choice(VOCAB, (ROWS, LENGTH + 1), p=often)
    for t in range(2, LENGTH + 1):
        follows = rng.random(ROWS) < 0.9
        ids[:, t] = np.where(follows, table[ids[:, t - 2], ids[:, t - 1] % 4], ids[:, t])
    ones = np.ones((ROWS, LENGTH), np.int32)
    return {
        "inputs": np.int32(ids[:, :-1]),
        "targets": np.int32(ids[:, 1:]),
        "segment_ids": ones,
        "positions": np.broadcast_to(np.arange(LENGTH, dtype=np.int32), ones.shape),
        "loss_mask": np.float32(ones),
        "source": np.zeros(ROWS, np.int32),
    }


def train(kind: BalanceKind, steps: int) -> TrainingCurves:
    """A run from the same weights on the same batches, whatever keeps experts busy."""
    config = model_of(kind.family, kind.routing)
    optimizer_config = OptimizerConfig(learning_rate=RATE, weight_decay=0.0)
    schedule_config = ScheduleConfig(name="constant", warmup_steps=min(10, steps))
    mesh = make_mesh(MeshConfig(fsdp=1), jax.devices()[:1])
    found = []
    with jax.set_mesh(mesh):
        graphdef, variables = abstract_model(config, EXACT, mesh)
        params, buffers = split_buffers(variables)
        optimizer = make_optimizer(optimizer_config, schedule_config, steps, params)
        abstract = abstract_state(params, optimizer, mesh, buffers=buffers)
        state = create_state(abstract, config, EXACT, optimizer, seed=0)
        schedule = make_schedule(schedule_config, RATE, steps)
        graphdefs = {POLICY: graphdef}
        accumulation = kind.accumulation
        objective = next_token()
        step = make_train_step(abstract, graphdefs, objective, optimizer, schedule, accumulation)
        for number in range(steps):
            state, metrics = step(state, batch_of(number))
            names = ("loss", "expert_max_load", "expert_load_entropy")
            found.append([float(metrics[name]) for name in names])
    return TrainingCurves(*np.array(found).T)


def balance_table(steps: int) -> list[str]:
    """A row for each kind."""
    last = max(steps // 6, 1)
    lines = [
        f"| what keeps experts busy | loss, last {last} steps | busiest expert, in equal shares | "
        "entropy of loads |",
        "|---|---|---|---|",
    ]
    for name, kind in KINDS.items():
        run = train(kind, steps)
        numbers = [values[-last:].mean() for values in run]
        lines.append("| " + " | ".join([name, *(f"{number:.3f}" for number in numbers)]) + " |")
        print(lines[-1], flush=True)
    return lines


def block(spec: LayerSpec, embed_dim: int, compute: str) -> nnx.Module:
    """One feed-forward block."""
    config = ModelConfig(embed_dim=embed_dim, num_layers=2)
    init = Initializer(InitConfig(), config, "float32")
    make = FEED_FORWARDS[type(spec.mlp)]
    return make(spec, embed_dim, init, MatmulPrecision.of(compute), nnx.Rngs(params=0))


def seconds(run: Callable[[], Array], repeats: int) -> float:
    """The median time of a call."""
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - start)
    return statistics.median(found)


def kernel_table(tokens: int, embed_dim: int, width: int, repeats: int) -> list[str]:
    """The time of forward and backward of one block, a row for each kernel."""
    lines = [
        f"{tokens:,} tokens of {embed_dim}, 16 experts of {width} units, 2 for each token; "
        "forward and backward, median",
        "",
        "| kernel | bfloat16, ms | float32, ms | times a dense block of as many units a token |",
        "|---|---|---|---|",
    ]
    config = ModelConfig(
        family="qwen3_moe",
        vocab_size=64,
        embed_dim=embed_dim,
        num_heads=embed_dim // 64,
        num_kv_heads=embed_dim // 64,
        moe=MoeConfig(16, 2, expert_dim=width),
    )
    layer = FAMILIES[config.family].spec(config).stack.period[0]
    dense = type(layer)(layer.mixer, MlpSpec(2 * width), rope=layer.rope)
    times = {"dense block": times_of(dense, tokens, embed_dim, repeats)}
    kinds = {kernel: RoutingConfig(kernel=kernel) for kernel in ("blocks", "ragged", "eager")}
    kinds["blocks, capacity_factor=1.25"] = RoutingConfig(capacity_factor=1.25)
    for name, routing in kinds.items():
        changed = type(config)(**{**vars(config), "routing": routing})
        spec = FAMILIES[config.family].spec(changed).stack.period[0]
        times[name] = times_of(spec, tokens, embed_dim, repeats)
    for name, (rounded, exact) in times.items():
        ratio = rounded / times["dense block"][0]
        lines.append(f"| {name} | {rounded * 1e3:.1f} | {exact * 1e3:.1f} | {ratio:.2f} |")
        print(lines[-1], flush=True)
    return lines


def times_of(spec: LayerSpec, tokens: int, embed_dim: int, repeats: int) -> tuple[float, float]:
    """Seconds of a block in bfloat16, and in float32."""
    rows = max(tokens // 512, 1)
    x = jax.random.normal(jax.random.key(0), (rows, tokens // rows, embed_dim))
    context = Context({}, Mask.of_rows(jnp.ones(x.shape[:2], jnp.int32)))
    found = []
    for compute in ("bfloat16", "float32"):
        graphdef, params = nnx.split(block(spec, embed_dim, compute))

        def loss(params: nnx.State, x: Array, graphdef: nnx.GraphDef = graphdef) -> Array:
            return (nnx.merge(graphdef, params)(x, context).x.astype(jnp.float32) ** 2).sum()

        slopes = jax.jit(jax.grad(loss, (0, 1)))
        found.append(seconds(lambda run=slopes, own=params: run(own, x), repeats))
    return found[0], found[1]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"write {RESULTS.name}")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--embed-dim", type=int, default=512)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=9)
    args = parser.parse_args(argv)
    balance = balance_table(args.steps)
    kernels = kernel_table(args.tokens, args.embed_dim, args.width, args.repeats)
    if args.write:
        device = f"{platform.machine()}, {jax.devices()[0].device_kind}, jax {jax.__version__}"
        text = ["# Experts", "", f"`python -m benchmarks.experts --write`; {device}.", ""]
        text += ["## What keeps them busy", "", f"{args.steps} steps.", "", *balance, ""]
        text += ["## What their products cost", "", *kernels, ""]
        RESULTS.write_text("\n".join(text))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
