"""Outputs of layers other than activations: terms of the loss, numbers to record, and buffers,
which change without a gradient."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import TryAgainError
from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import (
    CheckpointConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
)
from maxtrain.models.decoder import Decoder, DecoderOut
from maxtrain.models.registry import build_model
from maxtrain.objectives.objective import POLICY, with_layers
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.batches import BatchLayout, abstract_batch
from maxtrain.train_step.state import policy_params
from maxtrain.train_step.trainable import split_buffers, updated
from maxtrain.trainer.job import make_parts
from tests.support.centred import FACTOR, QUANTITIES, RATE, centred
from tests.support.shared import TINY_MODEL

__all__ = ["centred"]
pytestmark = [pytest.mark.long, pytest.mark.usefixtures("centred", "optax_dtypes")]
ROWS = 8
LENGTH = 16
MODEL = TINY_MODEL | {"vocab_size": 64, "num_layers": 4}
PLACES = ("prefix_0", "0", "rest_0")


def config_of(mesh=(1, 1, 1), accumulation=1, **model):
    data, fsdp, tensor = mesh
    return RunConfig(
        steps=4,
        model=ModelConfig(**(MODEL | model)),
        precision=PrecisionConfig(compute="float32"),
        optimizer=OptimizerConfig(learning_rate=1e-2, accumulation=accumulation),
        schedule=ScheduleConfig(warmup_steps=0),
        mesh=MeshConfig(data=data, fsdp=fsdp, tensor=tensor),
    )


def batch_of(number):
    rng = np.random.default_rng(number)
    tokens = rng.integers(1, 64, (ROWS, LENGTH + 1)).astype(np.int32)
    real = np.arange(LENGTH) < rng.integers(3, LENGTH + 1, (ROWS, 1))
    return {
        "inputs": tokens[:, :-1] * real,
        "targets": tokens[:, 1:] * real,
        "segment_ids": real.astype(np.int32),
        "positions": np.arange(LENGTH, dtype=np.int32) * real,
        "loss_mask": real.astype(np.float32),
        "source": np.zeros(ROWS, np.int32),
    }


@functools.cache
def trained(mesh=(1, 1, 1), accumulation=1, steps=3, **model):
    """Parameters, buffers and metrics after some steps, on the host."""
    config = config_of(mesh, accumulation, **model)
    count = mesh[0] * mesh[1] * mesh[2]
    parts = make_parts(config, jax.devices()[:count], 4, 0)
    with jax.set_mesh(parts.mesh):
        step = parts.make_step()
        state = parts.initial_state()
        layout = BatchLayout(parts.mesh, ROWS, LENGTH)
        metrics = []
        for number in range(steps):
            state, found = step(state, layout.to_global(batch_of(number)))
            metrics.append(jax.device_get(found))
        return parts, jax.device_get(state), metrics


def values(buffers):
    return {name: np.asarray(x) for name, x in zip(leaf_names(buffers), jax.tree.leaves(buffers))}


def test_buffers_are_no_parameters():
    parts, state, _ = trained()
    names = [f"layers.{place}.mlp.shift" for place in PLACES]
    assert sorted(leaf_names(state.buffers)) == sorted(names)
    assert state.buffers["layers"]["0"]["mlp"]["shift"].shape == (2, 16)
    assert not any("shift" in name for name in leaf_names(policy_params(state)))
    assert not any("shift" in name for name in leaf_names(state.opt_state))
    assert parts.units == {q.name: q.unit for q in QUANTITIES}
    model = build_model(config_of().model, PrecisionConfig(compute="float32"))
    params, buffers = split_buffers(nnx.state(model))
    assert len(jax.tree.leaves(buffers)) == 3 and len(jax.tree.leaves(params)) > 10


def test_a_buffer_follows_what_its_layers_observe():
    """The expected values are computed by hand, layer by layer, from the forward pass of each
    step's model."""
    _, after, _ = trained(steps=2)
    parts, before, _ = trained(steps=1)
    batch = jax.tree.map(jnp.asarray, batch_of(1))
    with jax.set_mesh(parts.mesh):
        variables = {**values(policy_params(before)), **values(before.buffers)}
        model = nnx.merge(
            parts.graphdefs[POLICY],
            jax.tree.map(jnp.asarray, _joined(before)),
        )
        said = model.forward(batch["inputs"], batch["segment_ids"], batch["positions"])
    for place in PLACES:
        path = f"layers.{place}.mlp.shift"
        expected = variables[path] + RATE * np.sign(np.asarray(said.buffer_inputs[path]))
        np.testing.assert_allclose(values(after.buffers)[path], expected, atol=1e-7)
    assert np.abs(values(after.buffers)["layers.0.mlp.shift"]).max() > 0


def _joined(state):
    return nnx.merge_state(nnx.State({}), policy_params(state), state.buffers)


@pytest.mark.parametrize(
    "how",
    [
        {"accumulation": 4},
        pytest.param({"mesh": (2, 2, 2)}, marks=pytest.mark.long),
        pytest.param({"scan_layers": False}, marks=pytest.mark.long),
        pytest.param({"remat": "full"}, marks=pytest.mark.long),
        pytest.param({"mesh": (1, 4, 1), "accumulation": 2}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_same_on_any_mesh_and_however_a_batch_is_split(how):
    _, first, told = trained()
    _, other, metrics = trained(**how)
    for name, value in values(first.buffers).items():
        np.testing.assert_allclose(values(other.buffers)[name], value, atol=1e-7)
    for name, value in values(first.trainable).items():
        np.testing.assert_allclose(values(other.trainable)[name], value, atol=2e-5)
    for ours, theirs in zip(metrics, told, strict=True):
        assert ours["positive"] == pytest.approx(theirs["positive"], abs=3)
        for name in ("loss", "objective", "size", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5)


def test_a_term_of_layers_is_part_of_the_loss_and_of_its_gradient():
    """It is a mean over tokens, summed over layers."""
    _, _, metrics = trained()
    for found in metrics:
        # The sum over four layers, of which each has all tokens.
        added = found["size"] * 4
        assert found["objective"] == pytest.approx(found["loss"] + added, rel=1e-5)
        assert added > 0
    parts, _, _ = trained()
    with jax.set_mesh(parts.mesh):
        state = parts.initial_state()
        batch = BatchLayout(parts.mesh, ROWS, LENGTH).to_global(batch_of(0))
        batch = {name: jnp.asarray(x) for name, x in batch.items()}

        def size(scale):
            def loss(params):
                variables = nnx.merge_state(nnx.State({}), params, state.buffers)
                models = {POLICY: nnx.merge(parts.graphdefs[POLICY], variables)}
                scales = parts.objective.scales(batch) | {"layers": scale}
                return parts.objective.forward(models, batch, scales).loss

            return jax.grad(loss)(state.trainable)

        with_term, without = size(1.0), size(0.0)
    up = with_term["layers"]["0"]["mlp"]["inner"]["up"]["kernel"].get_value()
    assert np.abs(up - without["layers"]["0"]["mlp"]["inner"]["up"]["kernel"].get_value()).max() > 0
    assert FACTOR > 0


@pytest.mark.parametrize("weight", [0, np.nan], ids=["without targets", "not finite"])
def test_a_step_that_is_not_applied_leaves_buffers_as_they_are(weight):
    parts, _, _ = trained()
    with jax.set_mesh(parts.mesh):
        step = parts.make_step()
        layout = BatchLayout(parts.mesh, ROWS, LENGTH)
        state = parts.initial_state()
        state, _ = step(state, layout.to_global(batch_of(0)))
        before = jax.device_get(state.buffers)
        bad = batch_of(1)
        bad["loss_mask"] = np.full_like(bad["loss_mask"], weight)
        state, metrics = step(state, layout.to_global(bad))
        assert metrics["skipped"] == 1
        for ours, theirs in zip(jax.tree.leaves(state.buffers), jax.tree.leaves(before)):
            assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


def test_padding_is_neither_observed_nor_in_a_term():
    parts, state, _ = trained()
    batch = jax.tree.map(jnp.asarray, batch_of(1))
    with jax.set_mesh(parts.mesh):
        model = nnx.merge(parts.graphdefs[POLICY], jax.tree.map(jnp.asarray, _joined(state)))
        other = jnp.where(batch["segment_ids"] > 0, batch["inputs"], 7)
        first, second = (
            model.forward(ids, batch["segment_ids"], batch["positions"])
            for ids in (batch["inputs"], other)
        )
    assert not np.array_equal(batch["inputs"], other)
    tokens = float(batch["loss_mask"].sum())
    for ours, theirs in ((first.aux_losses, second.aux_losses), (first.metrics, second.metrics)):
        for name, found in ours.items():
            np.testing.assert_allclose(found.total, theirs[name].total, rtol=1e-6)
            assert found.weight == 4 * tokens, "of four layers"
    for path, found in first.buffer_inputs.items():
        np.testing.assert_array_equal(found, second.buffer_inputs[path])
        assert np.abs(found).max() <= tokens


def test_names_that_mean_two_numbers_are_refused(monkeypatch):
    parts, _, _ = trained()
    batch = abstract_batch(parts.mesh, ROWS, LENGTH)
    for name, told in (("learning_rate", "names two numbers"), ("absent", "is not among the sums")):
        with jax.set_mesh(parts.mesh):
            objective = parts.objective._replace(recorded=(Metric(name, "unit"),))
            step = dataclasses.replace(parts, objective=objective).make_step()
            with pytest.raises(ValueError, match=told):
                step.lower(parts.abstract, batch)
    with jax.set_mesh(parts.mesh):
        monkeypatch.setattr(Decoder, "quantities", lambda decoder: ())
        with pytest.raises(ValueError, match="which nobody would record"):
            parts.make_step().lower(parts.abstract, batch)
    out = DecoderOut(jnp.zeros(()), {"a": WeightedSum(1.0, 1.0)}, {"a": WeightedSum(1.0, 1.0)}, {})
    with pytest.raises(ValueError, match="both as a term of the loss and as a number"):
        with_layers(jnp.zeros(()), {}, out, {"layers": 1.0})


def test_a_buffer_that_nobody_observes_is_an_error():
    _, state, _ = trained()
    with pytest.raises(ValueError, match=r"but the buffers are .*layers\.0\.mlp\.shift"):
        updated(state.buffers, {})


def test_buffers_are_saved_with_each_step_and_worthless_ones_are_not(tmp_path):
    _, state, _ = trained()
    checkpoints = Checkpoints(tmp_path, CheckpointConfig(asynchronous=False))
    saved = {"params": state.trainable, "buffers": state.buffers}
    checkpoints.save(1, jax.tree.map(jnp.asarray, saved), {})
    restored, _ = checkpoints.restore(saved)
    for ours, theirs in zip(jax.tree.leaves(restored), jax.tree.leaves(saved), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    bad = dataclasses.replace(state, buffers=jax.tree.map(lambda x: x * np.nan, state.buffers))
    with pytest.raises(TryAgainError, match=r"buffers\.layers\.0\.mlp\.shift"):
        checkpoints.save(2, jax.tree.map(jnp.asarray, {"buffers": bad.buffers}), {})
    checkpoints.close()
