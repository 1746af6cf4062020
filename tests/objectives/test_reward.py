"""Reward models: the loss that its equation says of scores at the ends of answers, with the same
gradient for every split of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.config.schema import RewardConfig
from maxtrain.models.registry import build_model
from maxtrain.objectives.objective import POLICY
from maxtrain.objectives.reward import reward
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from
from tests.objectives.test_dpo import pairs, rows_of

pytestmark = pytest.mark.usefixtures("optax_dtypes")


@pytest.fixture(scope="module")
def model(tiny):
    """A model with a score, as (structure, parameters)."""
    config = dataclasses.replace(tiny.model, num_layers=1, score=True)
    return nnx.split(build_model(config, tiny.precision, 0))


def trained(model, objective, batch, accumulation):
    graphdef, params = model

    @jax.jit
    def program(params, batch):
        made = models_from({POLICY: graphdef})
        return gradients(made, params, batch, objective, objective.scales(batch), accumulation)

    return program(params, batch)


def scores(model, here):
    """Return the scores of the answers of each pair, each computed alone."""
    module = nnx.merge(*model)
    found = []
    for pair in here:
        for _, targets, _ in pair:
            hidden = module.hidden(jnp.asarray(targets, jnp.int32)[None])
            found.append(float(module.scores(hidden)[0, -1]))
    return np.array(found).reshape(-1, 2)


@pytest.mark.long
def test_loss_and_records_are_what_the_equation_says_for_every_split(model):
    """Rows of three pairs, of one, and of none; a pair without targets does not count."""
    here = pairs(count=5)
    batch = rows_of([here[:3], here[3:4], [], here[4:]])
    margins = np.array([0.5, -1.0, 2.0, 0.25, 9.0])
    value = np.zeros(batch["loss_mask"].shape, np.float32)
    segments = np.asarray(batch["segment_ids"])
    for row, first in ((0, 0), (1, 3), (3, 4)):
        value[row] = margins[np.minimum(first + (segments[row] - 1) // 2, 4)]
    mask = np.array(batch["loss_mask"])
    mask[3] = 0
    batch |= {"value": jnp.asarray(value), "loss_mask": jnp.asarray(mask)}
    objective = reward(RewardConfig(margin=True, centre_weight=0.1))
    result, gradient = trained(model, objective, batch, 1)
    chosen, rejected = scores(model, here[:4]).T
    each = np.log1p(np.exp(-(chosen - rejected - margins[:4])))
    squares = ((chosen + rejected) ** 2).mean()
    np.testing.assert_allclose(result.sums["preference"].mean(), each.mean(), rtol=1e-5)
    np.testing.assert_allclose(result.sums["off_centre"].mean(), squares, rtol=1e-5)
    np.testing.assert_allclose(result.loss, each.mean() + 0.1 * squares, rtol=1e-5)
    difference = result.sums["reward_margin"]
    np.testing.assert_allclose(difference.mean(), (chosen - rejected).mean(), rtol=1e-4)
    wins = (chosen > rejected).mean()
    np.testing.assert_allclose(result.sums["reward_accuracy"].mean(), wins)
    assert result.sums["targets"].weight == mask.sum()
    split, found = trained(model, objective, batch, 4)
    np.testing.assert_allclose(split.loss, result.loss, rtol=1e-6)
    apart = jax.tree.map(jnp.subtract, found, gradient)
    assert float(optax.tree.norm(apart)) <= 2e-6 * float(optax.tree.norm(gradient))
    assert float(optax.tree.norm(gradient["score"])) > 0


@pytest.mark.long
def test_without_end_marks_the_tokens_of_answers_are_the_inputs_of_rows(model):
    """The reward is the score at the last token of the answer, as TRL takes it."""
    here = pairs(count=3)
    batch = rows_of([here])
    result, _ = trained(model, reward(RewardConfig(), has_end_marks=False), batch, 1)
    module = nnx.merge(*model)
    found = []
    for pair in here:
        for inputs, _, _ in pair:
            hidden = module.hidden(jnp.asarray(inputs, jnp.int32)[None])
            found.append(float(module.scores(hidden)[0, -1]))
    chosen, rejected = np.array(found).reshape(-1, 2).T
    expected = np.log1p(np.exp(-(chosen - rejected))).mean()
    np.testing.assert_allclose(result.sums["preference"].mean(), expected, rtol=1e-5)
