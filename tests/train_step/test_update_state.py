"""Every rule's state in a run: it lies like the parameters, and a checkpoint of it goes on bit for
bit."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from maxtrain.checkpoint.manager import Checkpoints
from maxtrain.config.schema import CheckpointConfig
from maxtrain.train_step.optimizer import apply_updates, make_optimizer
from maxtrain.train_step.state import abstract_model, abstract_state, create_state, shardings

pytestmark = pytest.mark.usefixtures("optax_dtypes")
RULES = ["adamw", "adam", "sgd", "momentum", "nesterov", "adafactor", "lion", "muon"]


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.slow
@pytest.mark.parametrize(("rule", "bfloat16"), [(rule, rule != "adamw") for rule in RULES])
def test_a_checkpoint_goes_on_bit_for_bit(tiny, tmp_path, rule, bfloat16):
    """The gradients depend on the parameters. bfloat16: weights, with stochastic rounding and an
    average in float32."""
    config = dataclasses.replace(tiny.optimizer, name=rule, ema_decay=0.9 if bfloat16 else None)
    precision = dataclasses.replace(tiny.precision, params="bfloat16" if bfloat16 else "float32")
    mesh = tiny.mesh(2, 2, 2)
    params = abstract_model(tiny.model, precision, mesh)[1]
    optimizer = make_optimizer(config, tiny.schedule, tiny.steps, params)
    abstract = abstract_state(params, optimizer, mesh)

    def step(state):
        grads = jax.tree.map(lambda p: 0.3 * p.astype("float32") - 0.01, state.trainable)
        updates, new = optimizer.update(grads, state.opt_state, state.trainable)
        key = jax.random.fold_in(jax.random.key(0), state.step) if bfloat16 else None
        new = jax.tree.map(lambda x, old: x.astype(old.dtype), new, state.opt_state)
        params = apply_updates(state.trainable, updates, key)
        return dataclasses.replace(state, trainable=params, opt_state=new, step=state.step + 1)

    with jax.set_mesh(mesh):
        step = jax.jit(step, out_shardings=shardings(abstract))
        begin = state = create_state(
            abstract, tiny.model, precision, optimizer, tiny.model.num_layers
        )
        state = step(state)
        checkpoints = Checkpoints(tmp_path, CheckpointConfig())
        checkpoints.save(1, state, {})
        restored, _ = checkpoints.restore(abstract, 1)
        checkpoints.close()
        assert bits(step(restored)) == bits(step(state)) != bits(state)
    assert bits(state.trainable) != bits(begin.trainable)
    places = {
        v.shape: v.get_value().sharding
        for v in jax.tree.leaves(state.trainable, is_leaf=is_variable)
    }
    like = [v for v in jax.tree.leaves(state.opt_state, is_leaf=is_variable) if is_variable(v)]
    assert bool(like) == (bfloat16 or rule not in ("sgd", "adafactor"))
    assert all(v.get_value().sharding == places[v.shape] for v in like)


def is_variable(x):
    return isinstance(x, nnx.Variable)


@pytest.mark.long
def test_muon_is_the_same_with_scanned_and_unrolled_layers_and_on_a_mesh(tiny):
    config, results = dataclasses.replace(tiny.optimizer, name="muon", eps=1e-8), []
    for shape, scan in (((1, 1, 1), True), ((1, 1, 1), False), ((2, 2, 2), True)):
        parts = tiny.parts(shape, optimizer=config, scan_layers=scan)
        with jax.set_mesh(parts.mesh):
            state, metrics = parts.step(parts.new_state(), parts.put(tiny.batch()))
            results.append((jax.device_get(state.trainable["layers"]), float(metrics["loss"])))
    for params, loss in results[1:]:
        assert loss == pytest.approx(results[0][1], rel=1e-5)
        for x, expected in zip(
            jax.tree.leaves(params), jax.tree.leaves(results[0][0]), strict=True
        ):
            np.testing.assert_allclose(x, expected, rtol=0, atol=2e-5)
