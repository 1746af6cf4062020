"""Answers with a label: the loss that its equation says, by a model, with the same gradient for every
split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.config.schema import DpoConfig
from maxtrain.objectives.kto import VALUE, kto
from maxtrain.objectives.objective import POLICY, REFERENCE
from maxtrain.train_step.step import gradients
from maxtrain.train_step.trainable import models_from
from tests.objectives.test_dpo import answer, by_hand, models, rows_of

__all__ = ["models"]

pytestmark = pytest.mark.usefixtures("optax_dtypes")
CONFIG = DpoConfig(loss_type="kto", beta=0.7, desirable_weight=1.5, undesirable_weight=0.5)


def answers(count, seed=0):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = int(rng.integers(1, 3))
        found.append(answer(rng, int(rng.integers(prompt + 1, 6)), prompt))
    return found


def batch_of(rows, labels):
    """A batch with these documents in each row, and their labels in the order of the rows."""
    batch = rows_of([[row] for row in rows])
    value = np.zeros(batch["loss_mask"].shape, np.float32)
    segments = np.asarray(batch["segment_ids"])
    rest = iter(labels)
    for row, documents in enumerate(rows):
        for number in range(len(documents)):
            value[row, segments[row] == number + 1] = next(rest)
    return batch | {VALUE: jnp.asarray(value)}


def trained(models, objective, batch, accumulation):
    """The result of a batch and its gradient, as a step takes them."""
    graphdefs = {name: graphdef for name, (graphdef, _) in models.items()}
    frozen = {POLICY: nnx.State({}), REFERENCE: models[REFERENCE][1]}
    made = models_from(graphdefs, frozen)

    @jax.jit
    def program(params, batch):
        scales = objective.scales(batch)
        return gradients(made, params, batch, objective, scales, accumulation)

    return program(models[POLICY][1], batch)


def evaluation(models, objective, batch):
    """Return the metrics of an evaluation of a batch."""

    @jax.jit
    def program(params, batch):
        modules = {name: nnx.merge(models[name][0], params[name]) for name in models}
        return objective.evaluate(modules, batch)

    return program({name: params for name, (_, params) in models.items()}, batch)


def pair_up(documents):
    return list(zip(documents[::2], documents[1::2], strict=True))


def log_ratios(models, documents):
    """log(policy / reference) of documents, an even number, in float64."""
    found = []
    for pair in by_hand(models, pair_up(documents)):
        for policy, reference, _ in pair:
            found.append(policy - reference)
    return np.array(found)


def swapped(documents):
    """Each prompt with the answer before it."""
    found = []
    for (inputs, targets, mask), (_, others, other_mask) in zip(
        documents, [documents[-1], *documents[:-1]], strict=True
    ):
        prompt = int((~mask).sum())
        given = others[int((~other_mask).sum()) :]
        tokens = np.concatenate([inputs[:1], targets[:prompt], given])
        length = len(tokens) - 1
        found.append((tokens[:-1], tokens[1:], np.arange(length) >= prompt))
    return found


@pytest.mark.long
def test_loss_and_records_are_what_the_equation_says_for_every_split(models):
    """Rows of several answers, of one, and of none."""
    here = answers(8)
    rows = [here[:3], here[3:7], here[7:], []]
    labels = np.array([1, -1, 1, 1, -1, -1, 1, -1])
    ratios = log_ratios(models, here)
    # The third row's answer stands behind no prompt: the row before gives its last one.
    mixed = [*swapped(here[:3]), *swapped(here[3:7]), swapped([here[6], here[7]])[1]]
    divergence = max(0.0, log_ratios(models, [*mixed]).mean())
    assert divergence > 0
    weights = np.where(labels > 0, 1.5, 0.5)
    each = weights / (1 + np.exp(labels * 0.7 * (ratios - divergence)))
    batch = batch_of(rows, labels)
    objective = kto(CONFIG)
    whole, gradient = trained(models, objective, batch, 1)
    np.testing.assert_allclose(whole.loss, each.mean(), rtol=1e-5)
    np.testing.assert_allclose(whole.sums["kl"].mean(), divergence, rtol=1e-4)
    rewards = whole.sums["reward_chosen"]
    np.testing.assert_allclose(rewards.mean(), 0.7 * ratios[labels > 0].mean(), rtol=1e-4)
    is_right = labels * (ratios - divergence) > 0
    np.testing.assert_allclose(whole.sums["reward_accuracy"].mean(), is_right.mean())
    split, found = trained(models, objective, batch, 4)
    np.testing.assert_allclose(split.loss, whole.loss, rtol=1e-6)
    np.testing.assert_allclose(split.sums["kl"].mean(), divergence, rtol=1e-4)
    difference = jax.tree.map(jnp.subtract, found, gradient)
    assert float(optax.tree.norm(difference)) <= 2e-6 * float(optax.tree.norm(gradient))
    evaluated = evaluation(models, objective, batch)
    for quantity in objective.evaluated:
        expected = whole.sums[quantity.name].mean()
        np.testing.assert_allclose(evaluated[quantity.name].mean(), expected, rtol=1e-5)


@pytest.mark.long
def test_no_gradient_flows_through_the_divergence_and_apo_has_none(models):
    here = answers(4)
    batch = batch_of([here[:2], here[2:]], [1, -1, 1, -1])
    result, gradient = trained(models, kto(CONFIG), batch, 1)
    divergence = float(result.sums["kl"].mean())
    assert divergence > 0
    known = batch | {"divergence": jnp.full(2, divergence)}
    constant = kto(CONFIG)._replace(first_pass=None)
    _, expected = trained(models, constant, known, 1)
    difference = jax.tree.map(jnp.subtract, gradient, expected)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(expected))
    apo = kto(DpoConfig(loss_type="apo_zero_unpaired", beta=0.7))
    assert apo.first_pass is None
    result, _ = trained(models, apo, batch, 1)
    labels = np.array([1, -1, 1, -1])
    each = 1 / (1 + np.exp(labels * 0.7 * log_ratios(models, here)))
    np.testing.assert_allclose(result.loss, each.mean(), rtol=1e-5)
