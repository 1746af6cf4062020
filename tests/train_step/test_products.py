"""Every matrix product of a step has a kernel on this CPU, and on one with the vector instructions
of AVX2 alone.

XLA can compile a product of bfloat16 inputs for which its CPU runtime has no kernel; only running
it shows that. So whole train steps, evaluations and generations run here, of many forms and shapes.
Run as a program, this file runs them too, in a process whose XLA_FLAGS were set before jax was
imported, and names those that fail.
"""

import dataclasses
import functools
import itertools
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config.schema import (
    LossScaleConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from maxtrain.inference.complete import generate
from maxtrain.models.registry import build_model
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.dot import MatmulPrecision, dot
from maxtrain.ops.einsum import contract
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.evaluate import make_eval_step
from maxtrain.train_step.loss_scale import resolve
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import abstract_model, abstract_state, create_state
from maxtrain.train_step.step import make_train_step

SCHEDULE = ScheduleConfig(warmup_steps=1)
MODEL = ModelConfig(
    vocab_size=24,
    num_layers=1,
    embed_dim=16,
    mlp_dim=24,
    num_heads=2,
    num_kv_heads=2,
    tie_embeddings=True,
    max_length=128,
    scan_layers=False,
    loss_chunk=0,
)
# Each case changes `MODEL`, or what `DEFAULTS` lists. Tied embeddings and one chunk are what all of
# them have otherwise.
DEFAULTS = {
    "rows": 2,
    "length": 8,
    "compute": "bfloat16",
    "params": "float32",
    "accumulation": 1,
    "optimizer": "adamw",
}
ONE_ROW = {"rows": 1, "num_heads": 1, "num_kv_heads": 1}
ODD = {
    "vocab_size": 11,
    "embed_dim": 7,
    "mlp_dim": 9,
    "num_heads": 1,
    "num_kv_heads": 1,
    "head_dim": 6,
}
CASES: dict[str, dict[str, Any]] = {
    "tied, one chunk": {},
    "tied, accumulation, remat, scan": {
        "accumulation": 2,
        "remat": "full",
        "scan_layers": True,
        "num_layers": 2,
    },
    "untied, chunks, groups of 2": {
        "tie_embeddings": False,
        "loss_chunk": 4,
        "num_kv_heads": 1,
        "remat": "dots",
    },
    "one token, one head": ONE_ROW | {"length": 1},
    "odd, bfloat16 parameters": ODD
    | {"rows": 3, "length": 7, "optimizer": "muon", "params": "bfloat16"},
}
MORE_CASES: dict[str, dict[str, Any]] = CASES | {
    "untied, one chunk": {"tie_embeddings": False, "num_kv_heads": 1},
    "one row and head": ONE_ROW | {"remat": "dots"},
    "odd, one row": ODD | {"rows": 1, "length": 3, "tie_embeddings": False},
    "float16": {"compute": "float16"},
    "eager attention": {"attention": "eager"},
}
GENERATIONS: dict[str, dict[str, Any]] = {
    "one row, groups of 2": {"rows": 1, "num_kv_heads": 1},
}
MORE_GENERATIONS: dict[str, dict[str, Any]] = GENERATIONS | {
    "3 odd rows": ODD | {"rows": 3, "tie_embeddings": False, "params": "bfloat16"},
    "float16": {"rows": 2, "compute": "float16"},
}
AXES = {
    "tie_embeddings": (True, False),
    "loss_chunk": (0, 4),
    "accumulation": (1, 2),
    "remat": ("none", "full"),
    "scan_layers": (True, False),
}
SHAPES: dict[str, dict[str, Any]] = {
    "two rows": {"rows": 2},
    "groups": {"rows": 4, "num_kv_heads": 1},
    "odd": ODD | {"rows": 6, "length": 7},
    "one token": {"rows": 2, "length": 1, "num_heads": 1, "num_kv_heads": 1},
}

# Less than pytest's faulthandler_timeout, so that a part that hangs is reported as this test.
MINUTES_FOR_A_PART = 14


def model_and_rest(changes: dict[str, Any]) -> tuple[ModelConfig, dict[str, Any]]:
    """The model's config, and the other choices of a case."""
    rest = DEFAULTS | {name: value for name, value in changes.items() if name in DEFAULTS}
    model = {name: value for name, value in changes.items() if name not in DEFAULTS}
    return dataclasses.replace(MODEL, **model), rest


def train_and_evaluate(changes: dict[str, Any]) -> None:
    """Two train steps and an evaluation; raises what they raise, and AssertionError if the loss is
    not finite."""
    config, rest = model_and_rest(changes)
    precision = PrecisionConfig(params=rest["params"], compute=rest["compute"])
    loss_scale = resolve(LossScaleConfig(initial=2.0**10), rest["compute"])
    mesh = make_mesh(MeshConfig(data=1, fsdp=1, tensor=1), jax.devices()[:1])
    rows, length = rest["rows"], rest["length"]
    ids = (
        np.random.default_rng(0)
        .integers(0, config.vocab_size or 0, (2, rows, length))
        .astype(np.int32)
    )
    ones = np.ones((rows, length), np.int32)
    arrays = {
        "inputs": ids[0],
        "targets": ids[1],
        "segment_ids": ones,
        "loss_mask": ones.astype(np.float32),
    }
    arrays["positions"] = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    with jax.set_mesh(mesh):
        graphdef, params = abstract_model(config, precision, mesh)
        options = OptimizerConfig(name=rest["optimizer"])
        optimizer = make_optimizer(options, SCHEDULE, 10, params)
        schedule = make_schedule(SCHEDULE, options.learning_rate, 10)
        abstract = abstract_state(params, optimizer, mesh, loss_scale)
        state = create_state(abstract, config, precision, optimizer, 0, loss_scale)
        batch = BatchLayout(mesh, rows, length).to_global(arrays)
        step = make_train_step(
            abstract,
            {"policy": graphdef},
            next_token(),
            optimizer,
            schedule,
            rest["accumulation"],
            loss_scale=loss_scale,
        )
        for _ in range(2):
            state, metrics = step(state, batch)
        assert np.isfinite(float(metrics["loss"])) and int(metrics["skipped"]) == 0
        eval_step = make_eval_step({POLICY: graphdef}, next_token())
        nll = eval_step({POLICY: state.trainable}, batch)["nll"]
        assert np.isfinite(float(nll.total))


def generate_some(changes: dict[str, Any]) -> None:
    """A prompt a row, read at once, and two tokens after it, read one by one from the cache."""
    config, rest = model_and_rest(changes)
    precision = PrecisionConfig(params=rest["params"], compute=rest["compute"])
    model = jax.jit(lambda: build_model(config, precision, 3))()
    made = generate(model, [[1, 2, 3]] * rest["rows"], max_tokens=3)
    assert [len(ids) for ids in made] == [3] * rest["rows"]


def products_alone() -> None:
    """Products with what XLA would fold into them, before them and after them, and under vmap."""
    before = (
        lambda x: x,
        lambda x: jnp.where(
            x > 2, x.swapaxes(0, 1), x.swapaxes(0, 1)
        ),  # a transpose, once XLA has simplified it
    )
    after = (
        lambda out: out.T,
        lambda out: out[:, :1],
        lambda out: out[:1],
        lambda out: out.sum(0),
        lambda out: out.reshape(-1),
        lambda out: out.astype(jnp.bfloat16).T,
    )
    surroundings = tuple(itertools.product(before, after))
    # Of different numbers, or XLA would compute them as one.
    xs = jnp.ones((len(surroundings), 16, 16)) * jnp.arange(len(surroundings))[:, None, None]
    w = jnp.ones((16, 24))

    def surrounded(xs: jax.Array, w: jax.Array, dtype: str) -> list[jax.Array]:
        return [
            g(dot(f(x), w, MatmulPrecision.of(dtype)))
            for x, (f, g) in zip(xs, surroundings, strict=True)
        ]

    def total(xs: jax.Array, w: jax.Array, dtype: str) -> jax.Array:
        return jnp.stack([out.astype(jnp.float32).sum() for out in surrounded(xs, w, dtype)]).sum()

    for dtype in ("bfloat16", "float16"):
        jax.block_until_ready(jax.jit(surrounded, static_argnums=2)(xs, w, dtype))
        jax.block_until_ready(jax.jit(jax.grad(total, (0, 1)), static_argnums=2)(xs, w, dtype))

    def mapped(x: jax.Array, w: jax.Array) -> list[jax.Array]:
        results = []
        for axes in (
            (0, None),
            (1, None),
            (2, None),
            (None, 0),
            (None, 1),
            (None, 2),
            (0, 1),
            (1, 0),
            (2, 2),
        ):
            a, b = (
                array if axis is None else jnp.stack([array, array], axis)
                for array, axis in zip((x, w), axes, strict=True)
            )
            out = jax.vmap(lambda a, b: contract("ti,io->to", a, b), axes)(a, b)
            results += [out, (out + 1).swapaxes(-1, -2)]
        return results

    low = jnp.ones((8, 16), jnp.bfloat16)
    jax.block_until_ready(jax.jit(mapped)(low, w.astype(jnp.bfloat16)))


def every_combination(shape: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Cases of one shape, with every combination of the values of `AXES`."""
    cases = {}
    for values in itertools.product(*AXES.values()):
        changes = dict(zip(AXES, values, strict=True))
        name = " ".join(f"{axis}={value}" for axis, value in changes.items())
        cases[f"{shape}: {name}"] = {"num_layers": 2} | shape | changes
    return cases


def failures(train: dict[str, dict[str, Any]], generations: dict[str, dict[str, Any]]) -> list[str]:
    """Case and error of all that fail."""
    work: dict[str, Callable[[], None]] = {"products alone": products_alone}
    for name, changes in train.items():
        work[f"train: {name}"] = functools.partial(train_and_evaluate, changes)
    for name, changes in generations.items():
        work[f"generate: {name}"] = functools.partial(generate_some, changes)
    failed = []
    for name, run in work.items():
        try:
            run()
        except (jax.errors.JaxRuntimeError, AssertionError) as error:
            failed.append(f"{name}: {str(error)[:200]}")
    return failed


def cases_of(which: str) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The cases to train and to generate with: "some", "more", or every combination of a shape."""
    if which == "some":
        return CASES, GENERATIONS
    if which == "more":
        return MORE_CASES, MORE_GENERATIONS
    return every_combination(SHAPES[which]), {}


def failures_elsewhere(isa: str | None, which: str) -> list[str]:
    """`failures` of the cases that `cases_of` knows as `which`, in a process with vector
    instructions up to `isa`; None: as here."""
    flags = os.environ.get("XLA_FLAGS", "")
    if isa is not None:
        flags += f" --xla_cpu_max_isa={isa}"
    root = Path(__file__).parents[2]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"XLA_FLAGS": flags, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, __file__, which],
        env=environment,
        capture_output=True,
        text=True,
        timeout=MINUTES_FOR_A_PART * 60,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


# Only x86 has instruction sets that XLA can be configured not to use.
OLDER = ("AVX2",) if platform.machine() in ("x86_64", "AMD64") else ()


@pytest.mark.long
@pytest.mark.usefixtures("optax_dtypes")
def test_every_product_has_a_kernel_here():
    assert failures(CASES, GENERATIONS) == []


@pytest.mark.slow
@pytest.mark.parametrize("isa", OLDER)
def test_every_product_has_a_kernel_on_older_processors(isa):
    assert failures_elsewhere(isa, "some") == []


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("which", ("more", *SHAPES))
@pytest.mark.parametrize("isa", (None, *OLDER))
def test_every_combination_has_its_kernels(isa, which):
    assert failures_elsewhere(isa, which) == []


if __name__ == "__main__":
    print(json.dumps(failures(*cases_of(sys.argv[1]))))
