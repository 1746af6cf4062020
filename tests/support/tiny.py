"""Shared parts of the tests of training and of objectives: a small model, batches with ragged
masks, and all parts of a step."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import (
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    ScheduleConfig,
)
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import POLICY
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.parallel.sharding import RULES, Rules
from maxtrain.train_step.layer_updates import make_layer_updates
from maxtrain.train_step.loss_scale import initial
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import (
    TrainState,
    abstract_model,
    abstract_state,
    create_state,
    shardings,
    state_from_variables,
)
from maxtrain.train_step.step import make_train_step

# Every size is divisible by 8, and no two that could be confused are equal.
MODEL = ModelConfig(
    vocab_size=96,
    num_layers=2,
    embed_dim=32,
    mlp_dim=56,
    num_heads=8,
    num_kv_heads=8,
    head_dim=6,
    loss_chunk=64,
    max_length=64,
)
EXACT = PrecisionConfig(params="float32", compute="float32")
# A large eps: with a small one the first step of Adam is the sign of each gradient, even of those
# that are rounding noise.
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-2, clip_norm=0.5)
SCHEDULE = ScheduleConfig(min_learning_rate=1e-3, warmup_steps=2)
B, T, STEPS, SEED = 8, 24, 20, 5
NEXT_TOKEN = next_token()


class Parts(NamedTuple):
    """Everything of a run's state and step, on one mesh."""

    mesh: Any
    graphdef: Any
    abstract: TrainState
    create: Callable[..., TrainState]  # of a seed, in place
    new_state: Callable[[], TrainState]  # always the same bits, copied
    put: Callable[[dict[str, np.ndarray]], dict[str, jax.Array]]
    step: Any


class Tiny:
    """The namespace behind the fixture `tiny`."""

    model, precision, optimizer, schedule, rows, length, steps = (
        MODEL,
        EXACT,
        OPTIMIZER,
        SCHEDULE,
        B,
        T,
        STEPS,
    )

    @staticmethod
    def mesh(*shape: int):
        """A mesh of (data, fsdp, tensor) on the first devices."""
        return make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])

    @staticmethod
    @functools.cache
    def batch(seed: int = 0) -> dict[str, np.ndarray]:
        """Rows of two documents and padding. Even rows have many targets, odd rows one or two, and
        those are hard: the loss of a random model on them is about three times as high. So a mean
        of the means of parts is far from the mean."""
        rng = np.random.default_rng(seed)
        lengths = np.array([24, 9, 20, 24, 22, 11, 24, 16])
        column = np.arange(T)[None]
        first = lengths[:, None] // 3
        real = column < lengths[:, None]
        segments = np.where(real, 1 + (column >= first), 0)
        wanted = np.where(np.arange(B) % 2 == 0, T, 1 + (np.arange(B) == 3))[:, None]
        batch = {
            "inputs": np.where(real, rng.integers(2, 96, (B, T)), 0),
            "targets": np.zeros((B, T)),
            "segment_ids": segments,
            "positions": np.where(column >= first, column - first, column) * real,
        }
        batch = {name: x.astype(np.int32) for name, x in batch.items()} | {
            "loss_mask": (real & (column < wanted)).astype(np.float32)
        }
        parts = Tiny.parts()
        with jax.set_mesh(parts.mesh):
            logits = jax.jit(_logits, static_argnums=0)(
                parts.graphdef, parts.new_state().trainable, batch
            )
        likely = np.argsort(np.asarray(logits), axis=-1)
        hard = (np.arange(B) % 2 == 1)[:, None]
        return batch | {"targets": np.where(hard, likely[..., 0], likely[..., -3]).astype(np.int32)}

    @staticmethod
    @functools.cache
    def first_state(precision: PrecisionConfig) -> TrainState:
        """Return the first state on the host; test_state.py shows that every mesh makes the
        same."""
        parts = Tiny.parts(precision=precision)
        with jax.set_mesh(parts.mesh):
            return jax.tree.map(np.array, parts.create())

    @staticmethod
    def parts(
        shape: tuple[int, int, int] = (1, 1, 1),
        accumulation: int = 1,
        objective=NEXT_TOKEN,
        precision=EXACT,
        optimizer: OptimizerConfig = OPTIMIZER,
        step=None,
        rules: Rules = RULES,
        weights_on_host="none",
        **model: Any,
    ) -> Parts:
        """A step with these options, and functions for new states, on a mesh of (data, fsdp,
        tensor)."""
        config, mesh = dataclasses.replace(MODEL, **model), Tiny.mesh(*shape)
        graphdef, params = abstract_model(config, precision, mesh, rules)
        rule, options = make_optimizer(optimizer, SCHEDULE, STEPS, params), step or {}
        options = {
            "zero": optimizer.zero,
            "stochastic_rounding": optimizer.stochastic_rounding,
        } | options
        schedule = make_schedule(SCHEDULE, optimizer.learning_rate, STEPS)
        loss_scale = options.get("loss_scale")
        if optimizer.on_host:
            options["layer_updates"] = make_layer_updates(optimizer, SCHEDULE, STEPS, params)
        abstract = abstract_state(
            params,
            rule,
            mesh,
            loss_scale,
            optimizer.zero,
            rules=rules,
            on_host=optimizer.on_host,
            weights_on_host=weights_on_host,
        )
        train_step = make_train_step(
            abstract, {POLICY: graphdef}, objective, rule, schedule, accumulation, **options
        )

        def create(seed: int = SEED) -> TrainState:
            return create_state(abstract, config, precision, rule, seed, loss_scale)

        def new_state() -> TrainState:
            first = Tiny.first_state(precision)
            control = first.control._replace(loss_scale=initial(loss_scale))
            first = dataclasses.replace(first, control=control)
            if optimizer is OPTIMIZER:
                return jax.device_put(first, shardings(abstract))
            params = jax.device_put(first.trainable, shardings(abstract.trainable))
            return state_from_variables(abstract, params, rule, loss_scale)

        return Parts(
            mesh,
            graphdef,
            abstract,
            create,
            new_state,
            BatchLayout(mesh, B, T).to_global,
            train_step,
        )


def _logits(graphdef, params, batch):
    return nnx.merge(graphdef, params)(batch["inputs"], batch["segment_ids"], batch["positions"])


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(scope="module")
def optax_dtypes() -> Iterator[None]:
    """Optax promotes counts to floats silently (say, beta ** count), which the strict world of
    tests would refuse."""
    with jax.numpy_dtype_promotion("standard"):
        yield
