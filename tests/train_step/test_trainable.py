"""Trained and frozen parameters, and the names of both."""

import dataclasses

import jax
import numpy as np
import pytest
from flax import nnx

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import TrainConfig
from maxtrain.objectives.next_token import next_token
from maxtrain.ops.digest import leaf_names
from maxtrain.train_step.optimizer import make_optimizer
from maxtrain.train_step.schedule import make_schedule
from maxtrain.train_step.state import (
    abstract_state,
    changing_part,
    constant_part,
    eval_params,
    policy_params,
    trained_summary,
    with_watch,
)
from maxtrain.train_step.step import gradients, make_train_step
from maxtrain.train_step.trainable import (
    POLICY,
    frozen_paths,
    join,
    models_from,
    nothing,
    split,
)


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


def chosen(tiny, **changes):
    """The parameters that train with these patterns."""
    params = tiny.parts().abstract.trainable
    trainable, frozen = split(params, frozen_paths(TrainConfig(**changes), params))
    names = {*leaf_names(trainable), *leaf_names(frozen)}
    assert names == set(leaf_names(params)), "none is lost"
    assert not set(leaf_names(trainable)) & set(leaf_names(frozen)), "and none is both"
    return set(leaf_names(trainable))


def test_patterns_choose_what_trains(tiny):
    everything = chosen(tiny)
    mlp = {name for name in everything if ".mlp." in name}
    assert 0 < len(mlp) < len(everything)
    assert chosen(tiny, only=(r"\.mlp\.",)) == mlp
    assert chosen(tiny, freeze=(r"\.mlp\.",)) == everything - mlp
    assert chosen(tiny, only=("mlp", "final_norm"), freeze=("norm", "up")) == {
        name for name in mlp if "up" not in name
    }


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"only": ("mpl",)}, r"train\.only: mpl is found in the path of no parameter"),
        ({"freeze": ("mlp", "no")}, None),
        ({"freeze": ("mlp", "nope")}, r"train\.freeze: nope is found .* embedding"),
        ({"freeze": ("",)}, r"leave no parameter to train"),
        ({"only": ("norm",), "freeze": ("norm",)}, r"leave no parameter to train"),
    ],
)
def test_patterns_that_mean_nothing_are_refused(tiny, changes, told):
    if told is None:
        assert chosen(tiny, **changes)
        return
    with pytest.raises(ConfigError, match=told):
        chosen(tiny, **changes)


def test_the_launch_says_what_trains(tiny):
    parts = tiny.parts()
    params = parts.abstract.trainable
    trainable, frozen = split(params, frozen_paths(TrainConfig(only=("up", "final")), params))
    rule = make_optimizer(tiny.optimizer, tiny.schedule, tiny.steps, trainable)
    abstract = abstract_state(trainable, rule, parts.mesh, frozen=frozen)
    told = trained_summary(abstract)
    total = sum(x.size for x in jax.tree.leaves(params))
    ours = sum(x.size for x in jax.tree.leaves(trainable))
    assert f"trains {ours:,} of {total:,} parameters: final_norm.scale, " in told
    assert f"layers.0.mlp.up.kernel (of {tiny.model.num_layers} layers)" in told
    names = set(leaf_names(abstract))
    assert {"params.embedding", "params.final_norm.scale"} <= names
    assert not any(name.startswith("opt_state") and "embedding" in name for name in names)
    assert leaf_names(constant_part(abstract)) == [f"params.{name}" for name in leaf_names(frozen)]
    assert not set(leaf_names(changing_part(abstract))) & set(leaf_names(constant_part(abstract)))


@pytest.mark.every_dose
@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.usefixtures("optax_dtypes")
def test_a_step_leaves_frozen_parameters_alone_and_keeps_no_moments_of_them(tiny):
    """The rest trains with them in place."""
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
