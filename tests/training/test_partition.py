"""What trains, what is frozen, and what both are called."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from maxtrain.objectives.next_token import next_token
from maxtrain.ops.digest import leaf_names
from maxtrain.training.optimizer import make_optimizer
from maxtrain.training.partition import POLICY, join, models_from, nothing
from maxtrain.training.schedule import make_schedule
from maxtrain.training.state import abstract_state, eval_params, policy_params, with_watch
from maxtrain.training.step import gradients, make_train_step


def parts_of(params):
    """The embedding, which is frozen, and the rest, which trains."""
    return nnx.split_state(params, nnx.PathContains("embedding"), ...)


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def test_leaves_are_called_what_checkpoints_call_them(tiny):
    abstract = tiny.parts().abstract
    names = leaf_names(abstract)
    assert {name.split(".")[0] for name in names} == {
        "params",
        "opt_state",
        "step",
        "skipped",
        "skipped_in_row",
        "watch",
    }
    first = [f"params.{name}" for name in leaf_names(abstract.trainable)]
    assert names[: len(first)] == first


def test_a_state_comes_back_from_its_leaves(tiny):
    abstract = tiny.parts().abstract
    leaves, treedef = jax.tree.flatten(abstract)
    again = jax.tree.unflatten(treedef, leaves)
    assert jax.tree.leaves(again) == leaves and again.control == abstract.control
    halted = again.control.watch._replace(halted=again.step)
    assert with_watch(again, halted).control.watch.halted is again.step


def test_parts_join_to_what_was_split(tiny):
    params = tiny.parts().abstract.trainable
    frozen, trainable = parts_of(params)
    assert len(jax.tree.leaves(frozen)) == 1
    joined = join(trainable, frozen, nothing())
    assert jax.tree.structure(joined) == jax.tree.structure(params)
    assert jax.tree.leaves(joined) == jax.tree.leaves(params)
    assert join(params, nothing()) is params


def test_frozen_parameters_have_no_gradient(tiny):
    parts = tiny.parts()
    frozen, trainable = parts_of(parts.abstract.trainable)
    objective = next_token()

    def grads_of(frozen, trainable, batch):
        models = models_from({POLICY: parts.graphdef}, {POLICY: frozen})
        scales = objective.scales(batch)
        return gradients(models, trainable, batch, objective, scales, 2)[1]

    with jax.set_mesh(parts.mesh):
        batch = parts.put(tiny.batch())
        grads = jax.eval_shape(grads_of, frozen, trainable, batch)
    assert leaf_names(grads) == leaf_names(trainable)
    assert "embedding" not in leaf_names(grads)


@pytest.mark.usefixtures("optax_dtypes")
def test_a_step_leaves_frozen_parameters_alone_and_keeps_no_moments_of_them(tiny):
    """And the rest trains with them in place."""
    parts = tiny.parts()
    with jax.set_mesh(parts.mesh):
        whole = parts.new_state()
        frozen, trainable = parts_of(whole.trainable)
        rule = make_optimizer(tiny.optimizer, tiny.schedule, tiny.steps, trainable)
        _, described = parts_of(parts.abstract.trainable)
        abstract = abstract_state(described, rule, parts.mesh)
        unfrozen, _ = parts_of(parts.abstract.trainable)
        abstract = dataclasses.replace(abstract, frozen={POLICY: unfrozen})
        schedule = make_schedule(tiny.schedule, tiny.optimizer.learning_rate, tiny.steps)
        step = make_train_step(abstract, {POLICY: parts.graphdef}, next_token(), rule, schedule, 1)
        state = dataclasses.replace(
            whole, trainable=trainable, frozen={POLICY: frozen}, opt_state=rule.init(trainable)
        )
        before = bits(frozen)
        rest = bits(trainable)
        size = sum(x.size for x in jax.tree.leaves(state.opt_state))
        state, metrics = step(state, parts.put(tiny.batch()))
    assert bits(state.frozen[POLICY]) == before
    assert bits(state.trainable) != rest
    assert metrics["skipped"] == 0
    table = tiny.model.vocab_size * tiny.model.embed_dim
    assert size == sum(x.size for x in jax.tree.leaves(parts.abstract.opt_state)) - 2 * table
    for joined in (policy_params(state), eval_params(state)):
        assert leaf_names(joined) == leaf_names(parts.abstract.trainable)
