"""Preferences: the loss that its equation says, whatever the rows that pairs lie in, and the same
gradient for every split of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.config.schema import DpoConfig
from maxtrain.models.registry import build_model
from maxtrain.objectives.dpo import dpo
from maxtrain.objectives.objective import POLICY, REFERENCE

pytestmark = pytest.mark.usefixtures("optax_dtypes")
BETA = 0.7
T = 24
NAMES = ("inputs", "targets", "segment_ids", "positions", "loss_mask")


@pytest.fixture(scope="module")
def models(tiny):
    """A policy and a reference, as (structure, parameters)."""
    found = {}
    config = dataclasses.replace(tiny.model, num_layers=1)
    for seed, name in enumerate((POLICY, REFERENCE)):
        model = build_model(config, tiny.precision, seed)
        model.head.kernel[...] = 5 * model.head.kernel[...]
        found[name] = nnx.split(model)
    return found


def answer(rng, length, prompt):
    """One document: inputs, targets, and a mask that leaves the prompt out."""
    tokens = rng.integers(2, 96, length + 1)
    return tokens[:-1], tokens[1:], np.arange(length) >= prompt


def pairs(seed=0, count=4):
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(count):
        prompt = int(rng.integers(1, 3))
        found.append([answer(rng, int(rng.integers(prompt + 1, 4)), prompt) for _ in range(2)])
    return found


def rows_of(pairs_of_rows):
    """A batch with these pairs in each row."""
    batch = {name: np.zeros((len(pairs_of_rows), T), np.int32) for name in NAMES}
    for row, pairs_here in enumerate(pairs_of_rows):
        column = 0
        documents = [document for pair in pairs_here for document in pair]
        for number, (inputs, targets, mask) in enumerate(documents):
            here = slice(column, column + len(inputs))
            batch["inputs"][row, here] = inputs
            batch["targets"][row, here] = targets
            batch["segment_ids"][row, here] = number + 1
            batch["positions"][row, here] = np.arange(len(inputs))
            batch["loss_mask"][row, here] = mask
            column += len(inputs)
    batch["loss_mask"] = batch["loss_mask"].astype(np.float32)
    return {name: jnp.asarray(x) for name, x in batch.items()}


def value_and_gradient(models, objective, batch, scales=None):
    if scales is None:
        scales = objective.scales(batch)

    def loss(params):
        modules = {POLICY: nnx.merge(models[POLICY][0], params)}
        modules[REFERENCE] = nnx.merge(*models[REFERENCE])
        result = objective.forward(modules, batch, scales)
        return result.loss, result

    program = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (_, result), gradient = program(models[POLICY][1])
    return result, gradient


def by_hand(models, pairs_here):
    """Log-probability sums of each answer by both models, from whole logits in float64."""
    batch = rows_of([[[document]] for pair in pairs_here for document in pair])
    mask = np.asarray(batch["loss_mask"], np.float64)
    sums = []
    for name in (POLICY, REFERENCE):
        model = nnx.merge(*models[name])
        logits = model(batch["inputs"], batch["segment_ids"], batch["positions"])
        logits = np.asarray(logits, np.float64)
        log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        of_target = np.take_along_axis(log_p, np.asarray(batch["targets"])[..., None], -1)[..., 0]
        sums.append((of_target * mask).sum(-1))
    answers = list(zip(*sums, mask.sum(-1), strict=True))
    return list(zip(answers[::2], answers[1::2], strict=True))


@pytest.mark.long
@pytest.mark.every_dose
def test_loss_and_records_are_what_the_equation_says(models):
    here = pairs()
    config = DpoConfig(beta=BETA, sft_weight=0.25)
    result, _ = value_and_gradient(models, dpo(config), rows_of([here[:2], here[2:]]))
    margins = []
    chosen_nll = 0.0
    chosen_targets = 0
    for (chosen, of_chosen, length), (rejected, of_rejected, _) in by_hand(models, here):
        margins.append(BETA * (chosen - of_chosen - rejected + of_rejected))
        chosen_nll -= chosen
        chosen_targets += length
    margins = np.array(margins)
    preference = np.log1p(np.exp(-margins)).mean()
    np.testing.assert_allclose(result.sums["preference"].mean(), preference, rtol=1e-5)
    np.testing.assert_allclose(result.sums["reward_margin"].mean(), margins.mean(), rtol=1e-4)
    np.testing.assert_allclose(result.sums["reward_accuracy"].mean(), (margins > 0).mean())
    loss = preference + 0.25 * chosen_nll / chosen_targets
    np.testing.assert_allclose(result.loss, loss, rtol=1e-5)


@pytest.mark.long
@pytest.mark.every_dose
def test_a_policy_that_is_the_reference_has_the_loss_of_no_opinion(models):
    same = {POLICY: models[POLICY], REFERENCE: models[POLICY]}
    result, gradient = value_and_gradient(same, dpo(DpoConfig(beta=BETA)), rows_of([pairs()]))
    np.testing.assert_allclose(result.loss, np.log(2), rtol=1e-6)
    assert float(optax.tree.norm(gradient)) > 0


@pytest.mark.long
@pytest.mark.parametrize(
    "loss_type",
    ["sigmoid", *(pytest.param(name, marks=pytest.mark.long) for name in ("ipo", "orpo"))],
)
def test_pairs_in_one_row_are_as_in_rows_of_their_own(models, loss_type):
    here = pairs()
    objective = dpo(DpoConfig(loss_type=loss_type, beta=BETA))
    apart, expected = value_and_gradient(models, objective, rows_of([[pair] for pair in here]))
    packed, found = value_and_gradient(models, objective, rows_of([here[:3], here[3:]]))
    np.testing.assert_allclose(packed.loss, apart.loss, rtol=1e-5)
    difference = jax.tree.map(jnp.subtract, found, expected)
    assert float(optax.tree.norm(difference)) <= 2e-6 * float(optax.tree.norm(expected))


@pytest.mark.long
def test_a_split_of_the_batch_gives_the_same_gradient(models):
    """The rows may have different numbers of pairs, and one row none."""
    here = pairs(count=5)
    batch = rows_of([here[:3], here[3:4], [], here[4:]])
    objective = dpo(DpoConfig(beta=BETA, sft_weight=0.5))
    scales = objective.scales(batch)
    _, whole = value_and_gradient(models, objective, batch, scales)
    total = None
    for first in range(2):
        micro = {name: x[first::2] for name, x in batch.items()}
        part = value_and_gradient(models, objective, micro, scales)[1]
        if total is None:
            total = part
        else:
            total = jax.tree.map(jnp.add, total, part)
    difference = jax.tree.map(jnp.subtract, total, whole)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(whole))


@pytest.mark.long
@pytest.mark.every_dose
def test_an_answer_without_targets_makes_no_pair(models):
    """Skipped steps and truncated answers have none."""
    here = pairs()
    batch = rows_of([here[:2], here[2:]])
    objective = dpo(DpoConfig(beta=BETA))
    mask = np.array(batch["loss_mask"])
    mask[0][np.array(batch["segment_ids"][0]) == 4] = 0
    result, gradient = value_and_gradient(
        models, objective, batch | {"loss_mask": jnp.asarray(mask)}
    )
    expected, wanted = value_and_gradient(models, objective, rows_of([here[:1], here[2:]]))
    assert result.sums["preference"].weight == 3
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-6)
    difference = jax.tree.map(jnp.subtract, gradient, wanted)
    assert float(optax.tree.norm(difference)) <= 2e-6 * float(optax.tree.norm(wanted))


def test_only_losses_with_a_reference_ask_for_one():
    assert dpo(DpoConfig()).models == (POLICY, REFERENCE)
    assert dpo(DpoConfig(loss_type="simpo", beta=2.0)).models == (POLICY,)
    orpo = dpo(DpoConfig(loss_type="orpo"))
    assert orpo.models == (POLICY,)
    assert orpo.factors["chosen"] == 1
    without = dataclasses.replace(DpoConfig(loss_type="orpo"), sft_weight=0.0)
    assert dpo(without).factors["chosen"] == 0
