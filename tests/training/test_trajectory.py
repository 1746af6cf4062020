"""Twenty AdamW steps through the project's own step, against the same steps by transformers and
torch.

`trajectory.npz` beside each parity case holds the batches, the learning rates, and what torch found
for them: losses and gradient norms before clipping, in float32 and again in float64, and the logits
of other tokens after the last step.
"""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import (
    MeshConfig,
    OptimizerConfig,
    PrecisionConfig,
    RoutingConfig,
    ScheduleConfig,
)
from maxtrain.objectives.next_token import next_token
from maxtrain.parallel.batches import BatchLayout
from maxtrain.parallel.mesh import make_mesh
from maxtrain.training.optimizer import make_optimizer
from maxtrain.training.partition import split_buffers
from maxtrain.training.schedule import make_schedule
from maxtrain.training.state import (
    abstract_model,
    abstract_state,
    policy_variables,
    state_from_variables,
)
from maxtrain.training.step import make_train_step
from maxtrain.weights.hf import load_pretrained
from tests.shared import MORE_PARITY_CASES, in_time

PARITY = Path(__file__).parents[1] / "data" / "parity"
PEAK = 2e-3
SCHEDULE = ScheduleConfig(name="constant", warmup_steps=5)
ADAMW = OptimizerConfig(
    name="adamw", learning_rate=PEAK, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, clip_norm=1
)
# Losses and norms of torch's float32 run are up to 4e-7 from those of its float64 run.
TOLERANCE = 2e-5


def whole_rows(tokens):
    """The arrays of a batch whose rows are one document each. tokens: [B, T + 1]."""
    B, T = tokens.shape[0], tokens.shape[1] - 1
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((B, T), np.int32),
        "positions": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)),
        "loss_mask": np.ones((B, T), np.float32),
    }


class Twenty(NamedTuple):
    """What twenty steps gave."""

    losses: list[float]
    norms: list[float]
    # Of the probe, after the last step.
    logits: jax.Array


def twenty_steps(case, axes, accumulation=1, **changes) -> Twenty:
    """The case's steps on a mesh; `changes`: keys of the model. Routers add nothing to the loss."""
    alone = RoutingConfig(balance=0.0, correction_rate=0.0)
    changes = {"routing": alone} | changes
    theirs = np.load(PARITY / case / "trajectory.npz")
    steps, rows, columns = theirs["tokens"].shape
    mesh_config = MeshConfig(**axes)
    devices = int(np.prod([mesh_config.data, mesh_config.fsdp, mesh_config.tensor]))
    mesh = make_mesh(mesh_config, jax.devices()[:devices])
    model, config = load_pretrained(PARITY / case, mesh=mesh, **changes)
    schedule = make_schedule(SCHEDULE, PEAK, steps)
    rates = [float(schedule(step)) for step in range(steps)]
    np.testing.assert_allclose(rates, theirs["learning_rate"], rtol=1e-6)

    losses = []
    norms = []
    with jax.set_mesh(mesh):
        graphdef, variables = abstract_model(config, PrecisionConfig(compute="float32"), mesh)
        params, buffers = split_buffers(variables)
        optimizer = make_optimizer(ADAMW, SCHEDULE, steps, params)
        abstract = abstract_state(params, optimizer, mesh, buffers=buffers)
        state = state_from_variables(abstract, nnx.state(model), optimizer)
        step = make_train_step(
            abstract, {"policy": graphdef}, next_token(), optimizer, schedule, accumulation
        )
        layout = BatchLayout(mesh, rows, columns - 1)
        for tokens in theirs["tokens"]:
            state, metrics = step(state, layout.to_global(whole_rows(tokens)))
            losses.append(float(metrics["loss"]))
            norms.append(float(metrics["grad_norm"]))
        trained = nnx.merge(graphdef, policy_variables(state))
        logits = jax.jit(lambda model, tokens: model(tokens))(trained, jnp.asarray(theirs["probe"]))
    return Twenty(losses, norms, logits)


def assert_as_torch(case, found: Twenty) -> None:
    theirs = np.load(PARITY / case / "trajectory.npz")
    np.testing.assert_allclose(found.losses, theirs["loss"], rtol=TOLERANCE)
    np.testing.assert_allclose(found.norms, theirs["grad_norm"], rtol=TOLERANCE)
    apart = np.abs(theirs["probe_logits"] - theirs["probe_logits64"]).max()
    atol = max(2e-5, 10 * apart)
    np.testing.assert_allclose(found.logits, theirs["probe_logits64"], rtol=0, atol=atol)


def thorough(*case):
    return pytest.param(*case, marks=pytest.mark.long)


@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize(
    ("case", "axes", "accumulation", "changes"),
    [
        thorough("llama3", {"fsdp": 1}, 1, {}),
        thorough("llama3", {"data": 2, "fsdp": 1, "tensor": 2}, 2, {"scan_layers": False}),
        thorough("llama_tied_mha", {"fsdp": 2}, 2, {"remat": "full"}),
        thorough("qwen3", {"fsdp": 1}, 1, {"attention": "eager"}),
        thorough("qwen3", {"data": 2, "fsdp": 2}, 1, {"loss_chunk": 32}),
        thorough("qwen3_moe", {"fsdp": 1}, 1, {}),
        thorough("mixtral", {"data": 2, "fsdp": 1, "tensor": 2}, 2, {"scan_layers": False}),
    ],
    ids=lambda value: str(value) if isinstance(value, str) else None,
)
def test_twenty_steps_are_those_of_transformers_and_torch(case, axes, accumulation, changes):
    assert_as_torch(case, twenty_steps(case, axes, accumulation, **changes))


@pytest.mark.usefixtures("optax_dtypes")
@pytest.mark.parametrize("case", in_time(MORE_PARITY_CASES))
def test_every_family_trains_the_same_on_eight_devices(case):
    """On one device as on eight, and on both as torch."""
    one = twenty_steps(case, {"fsdp": 1})
    assert_as_torch(case, one)
    eight = twenty_steps(case, {"fsdp": 4, "tensor": 2})
    assert_as_torch(case, eight)
    np.testing.assert_allclose(eight.losses, one.losses, rtol=1e-5)
