"""Each choice of the schema has what does it, and what has no choice is refused: nothing falls
through to another one."""

import dataclasses
import typing
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config import schema
from maxtrain.config.keys import all_keys, element
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.models import init, mlp, remat, rotation, specs
from maxtrain.models.families import FAMILIES
from maxtrain.models.specs import RopeSpec
from maxtrain.objectives.registry import OBJECTIVES
from maxtrain.observe import tracking
from maxtrain.ops import divergence, experts, routing, top_divergence
from maxtrain.ops.preference import LOSSES
from maxtrain.rl import advantages, returns
from maxtrain.train_step import loss_scale, optimizer, schedule


def choices(path: str) -> set[str]:
    """The words that a key of the schema may be set to."""
    (key,) = [key for key in all_keys() if key.path == path]
    return _words(key.kind)


def _words(kind: Any) -> set[str]:
    if typing.get_origin(kind) is Literal:
        return set(get_args(kind))
    if typing.get_origin(kind) is tuple:
        return _words(element(kind))
    return set().union(*map(_words, get_args(kind)), set())


def test_tables_have_the_choices():
    assert set(OBJECTIVES) == choices("objective")
    assert set(FAMILIES) == choices("model.family")
    assert set(LOSSES) | UNPAIRED == choices("dpo.loss_type")
    assert not set(LOSSES) & UNPAIRED
    assert set(tracking.TRACKERS) == choices("observe.trackers")
    assert set(remat._POLICY) == set(remat._POLICY_OF_ROUNDED)
    assert {"none", "named", *remat._POLICY} == choices("model.remat")
    assert {"clamped_swiglu", *mlp._ACTIVATIONS} == set(get_args(specs.Activation))
    assert set(advantages.SCALES) == choices("grpo.scale_rewards")
    assert set(get_args(specs.RopeScaling)) == choices("model.rope_scaling")
    assert {"eager", *get_args(experts.Kernel)} == choices("model.routing.kernel")
    assert set(get_args(routing.Noise)) == choices("regularization.router_noise")
    assert set(get_args(routing.Scope)) == choices("model.routing.balance_scope")


def _of_name(section: type, name: str) -> Any:
    """A section with a value of `name` that the schema may not know."""
    made = section()
    return dataclasses.replace(made, name=name)


@pytest.mark.parametrize("name", sorted(choices("optimizer.name")))
def test_each_optimizer_has_a_direction_of_its_own(name):
    direction = optimizer._direction(_of_name(schema.OptimizerConfig, name))
    assert callable(direction.update)


@pytest.mark.parametrize("name", sorted(choices("schedule.name") - {"wsd", "pieces"}))
def test_each_schedule_has_a_curve(name):
    curve = schedule._curve(schedule._SchedulePiece(name, 9, 1.0, 0.1))
    assert float(np.asarray(curve(0))) == pytest.approx(1.0)
    pieces = choices("schedule.pieces[0].name")
    assert pieces == choices("schedule.name") - {"wsd", "pieces"}


@pytest.mark.parametrize("name", sorted(choices("init.name")))
def test_each_initialiser_has_a_distribution(name):
    config = dataclasses.replace(schema.InitConfig(), name=name, std=0.02)
    made = init.Initializer(config, schema.ModelConfig(), "float32")
    assert made._distribution() in ("uniform", "normal", "truncated")
    assert made.deviation((4, 4), ("embed", "mlp"), "hidden") > 0


def _divergence(kind: str) -> Any:
    log = jnp.log(jnp.full((1, 1, 2), 0.5))
    numbers = typing.cast(Any, None)
    form = top_divergence.TopDivergenceStaticArgs.__new__(
        top_divergence.TopDivergenceStaticArgs, 1, numbers, 1.0, kind
    )
    return top_divergence._of_outcomes(top_divergence._Outcomes(log, log), form)


def test_each_divergence_and_estimator_is_known():
    for kind in choices("distill.kind"):
        _divergence(kind)
    for estimator in choices("ppo.kl_estimator"):
        assert returns.divergence(np.zeros(2), np.zeros(2), estimator).shape == (2,)


UNKNOWN = "never_heard_of"


@pytest.mark.parametrize(
    "use",
    [
        lambda: optimizer._direction(_of_name(schema.OptimizerConfig, UNKNOWN)),
        lambda: schedule._curve(schedule._SchedulePiece(UNKNOWN, 9, 1.0, 0.1)),
        lambda: rotation._frequencies(dataclasses.replace(ROPE, scaling=UNKNOWN)),
        lambda: rotation._frequencies_of_rows(
            dataclasses.replace(ROPE, scaling=UNKNOWN), jnp.ones(1, jnp.int32)
        ),
        lambda: routing.choose(
            jnp.zeros((1, 1, 4)), jnp.ones((1, 1), bool), 2, scores=typing.cast(Any, UNKNOWN)
        ),
        lambda: routing.with_noise(
            jnp.zeros((1, 1, 4)),
            jax.random.split(jax.random.key(0), 1),
            typing.cast(Any, UNKNOWN),
            1.0,
        ),
        lambda: _divergence(UNKNOWN),
        lambda: divergence._require_mixture(UNKNOWN),
        lambda: returns.divergence(np.zeros(2), np.zeros(2), UNKNOWN),
        lambda: init.Initializer(
            dataclasses.replace(schema.InitConfig(), name=typing.cast(Any, UNKNOWN)),
            schema.ModelConfig(),
            "float32",
        )._distribution(),
        lambda: loss_scale.advance(
            loss_scale.LossScale(jnp.float32(1), jnp.int32(0), jnp.int32(1)),
            jnp.bool_(True),
            dataclasses.replace(schema.LossScaleConfig(), mode=typing.cast(Any, UNKNOWN)),
        ),
        lambda: OBJECTIVES[UNKNOWN],
        lambda: remat._policy(UNKNOWN, schema.RematNamesConfig(), "float32"),
        lambda: mlp._activated(typing.cast(Any, UNKNOWN), jnp.ones(1)),
    ],
)
def test_what_is_unknown_is_refused(use):
    with pytest.raises((AssertionError, KeyError, ValueError, TypeError)):
        use()


ROPE = RopeSpec(head_dim=4, theta=1e4)
