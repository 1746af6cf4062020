"""Rewards of completions: the loss that its equation says, whatever the rows that completions lie
in, and the same gradient for every split of the batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from maxtrain.config.schema import GrpoConfig
from maxtrain.models.registry import build_model
from maxtrain.objectives.grpo import (
    ADVANTAGES,
    IS_FIRST,
    NUM_COMPLETIONS,
    OLD,
    REFERENCE_LOG_PROBS,
    SAMPLED,
    grpo,
)
from maxtrain.objectives.objective import POLICY

pytestmark = pytest.mark.usefixtures("optax_dtypes")
T = 24
WHOLE = ("inputs", "targets", "segment_ids", "positions")
LOG_PROBS = (OLD, SAMPLED, REFERENCE_LOG_PROBS)


@pytest.fixture(scope="module")
def policy(tiny):
    """A model as (structure, parameters)."""
    model = build_model(dataclasses.replace(tiny.model, num_layers=1), tiny.precision, 0)
    # No larger: logits are rounded to 1e-7 of their size, and a ratio has their error.
    model.head.kernel[...] = 2 * model.head.kernel[...]
    return nnx.split(model)


def completions(count=5, advantages=None):
    """Documents: a prompt of one or two tokens, and a completion with its numbers."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(count):
        length = int(rng.integers(3, 5))
        tokens = rng.integers(2, 96, length + 1)
        advantage = rng.normal()
        if advantages is not None:
            advantage = advantages[number]
        document = {
            "inputs": tokens[:-1],
            "targets": tokens[1:],
            "loss_mask": np.arange(length) >= int(rng.integers(1, 3)),
            ADVANTAGES: np.full(length, advantage),
        }
        # Away from the policy's own; some are beyond the clips.
        for name in LOG_PROBS:
            document[name] = 0.5 * rng.normal(size=length)
        found.append(document)
    return found


def rows_of(policy, documents_of_rows, is_first=False):
    """A batch with these documents in each row."""
    count = len(documents_of_rows)
    batch: dict[str, Any] = {name: np.zeros((count, T), np.int32) for name in WHOLE}
    for name in ("loss_mask", ADVANTAGES, *LOG_PROBS):
        batch[name] = np.zeros((count, T), np.float32)
    batch[IS_FIRST] = np.full(count, is_first, np.float32)
    batch[NUM_COMPLETIONS] = np.array([len(row) for row in documents_of_rows], np.float32)
    for row, documents in enumerate(documents_of_rows):
        column = 0
        for number, document in enumerate(documents):
            length = len(document["inputs"])
            here = slice(column, column + length)
            for name, values in document.items():
                batch[name][row, here] = values
            batch["segment_ids"][row, here] = number + 1
            batch["positions"][row, here] = np.arange(length)
            column += length
    now = log_probs_of(policy, batch)
    for name in LOG_PROBS:
        batch[name] = (batch[name] + now).astype(np.float32)
    return {name: jnp.asarray(x) for name, x in batch.items()}


def value_and_gradient(policy, objective, batch, scales=None):
    if scales is None:
        scales = objective.scales(batch)

    def loss(params):
        result = objective.forward({POLICY: nnx.merge(policy[0], params)}, batch, scales)
        return result.loss, result

    (_, result), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(policy[1])
    return result, gradient


def log_probs_of(policy, batch, temperature=1.0):
    """Return the log-probability of each target, from whole logits in float64."""
    model = nnx.merge(*policy)
    arrays = [jnp.asarray(batch[name]) for name in ("inputs", "segment_ids", "positions")]
    logits = model(*arrays)
    logits = np.asarray(logits, np.float64) / temperature
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return np.take_along_axis(log_p, np.asarray(batch["targets"])[..., None], -1)[..., 0]


def norm(tree):
    return float(optax.tree.norm(tree))


def by_hand(policy, batch, config):
    """The loss from its equation, completion by completion."""
    now = log_probs_of(policy, batch, config.temperature)
    values = {name: np.asarray(x, np.float64) for name, x in batch.items()}
    each = []
    lengths = []
    for row in range(len(now)):
        for number in range(1, int(values["segment_ids"][row].max()) + 1):
            here = (values["segment_ids"][row] == number) & (values["loss_mask"][row] > 0)
            ratio = np.exp(now[row, here] - values[OLD][row, here])
            advantage = values[ADVANTAGES][row, here]
            clipped = ratio.clip(1 - config.epsilon, 1 + config.epsilon)
            loss = -np.minimum(ratio * advantage, clipped * advantage)
            if config.beta:
                apart = values[REFERENCE_LOG_PROBS][row, here] - now[row, here]
                loss = loss + config.beta * (np.exp(apart) - apart - 1)
            each.append(loss)
            lengths.append(here.sum())
    if config.loss_type == "grpo":
        return np.mean([loss.mean() for loss in each])
    total = np.sum([loss.sum() for loss in each])
    if config.loss_type == "dr_grpo":
        return total / (len(each) * config.max_completion_length)
    return total / np.sum(lengths)


@pytest.mark.long
@pytest.mark.parametrize(
    "loss_type",
    ["grpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("dr_grpo", "dapo"))],
)
def test_the_loss_is_what_the_equation_says_with_the_divisor_of_its_name(policy, loss_type):
    config = GrpoConfig(
        loss_type=loss_type, max_completion_length=9, temperature=0.8, epsilon=0.5, beta=0.1
    )
    here = completions()
    batch = rows_of(policy, [here[:3], here[3:]])
    result, _ = value_and_gradient(policy, grpo(config), batch)
    np.testing.assert_allclose(result.loss, by_hand(policy, batch, config), rtol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["grpo", pytest.param("gspo", marks=pytest.mark.long)])
def test_completions_in_one_row_are_as_in_rows_of_their_own(policy, loss_type):
    objective = grpo(GrpoConfig(loss_type=loss_type, epsilon=0.5))
    here = completions()
    apart, expected = value_and_gradient(
        policy, objective, rows_of(policy, [[one] for one in here])
    )
    packed, found = value_and_gradient(policy, objective, rows_of(policy, [here[:3], here[3:]]))
    np.testing.assert_allclose(packed.loss, apart.loss, rtol=1e-5)
    assert norm(jax.tree.map(jnp.subtract, found, expected)) <= 2e-6 * norm(expected)


@pytest.mark.long
@pytest.mark.parametrize("loss_type", ["dapo", pytest.param("dr_grpo", marks=pytest.mark.long)])
def test_a_split_of_the_batch_gives_the_same_gradient(policy, loss_type):
    """The rows may have different numbers of completions, and one row none."""
    here = completions()
    batch = rows_of(policy, [here[:3], here[3:4], [], here[4:]])
    objective = grpo(GrpoConfig(loss_type=loss_type, beta=0.1, max_completion_length=9))
    scales = objective.scales(batch)
    _, whole = value_and_gradient(policy, objective, batch, scales)
    parts = []
    for first in range(2):
        micro = {name: x[first::2] for name, x in batch.items()}
        parts.append(value_and_gradient(policy, objective, micro, scales)[1])
    difference = jax.tree.map(lambda a, b, c: a + b - c, *parts, whole)
    assert norm(difference) <= 1e-6 * norm(whole)


@pytest.mark.long
@pytest.mark.every_dose
def test_the_first_step_has_a_ratio_of_exactly_one(policy):
    """Whatever was written down of the old policy."""
    batch = rows_of(policy, [completions()], is_first=True)
    result, gradient = value_and_gradient(policy, grpo(GrpoConfig()), batch)
    assert float(result.sums["ratio"].mean()) == 1.0
    assert float(result.sums["clipped_low"].total) == 0.0
    assert norm(gradient) > 0
    gap = np.abs(log_probs_of(policy, batch) - np.asarray(batch[SAMPLED]))
    mask = np.asarray(batch["loss_mask"])
    np.testing.assert_allclose(
        result.sums["sampler_gap"].mean(), (gap * mask).sum() / mask.sum(), rtol=1e-4
    )


@pytest.mark.long
@pytest.mark.every_dose
def test_completions_of_another_sampler_count_by_the_ratio_of_both(policy):
    """The result is that of advantages scaled by the ratio, token by token, while the divergence
    from the reference has no such weight."""
    config = GrpoConfig(beta=0.1)
    batch = rows_of(policy, [completions()])
    cap = 1.2
    trust = np.minimum(np.exp(np.asarray(batch[OLD]) - np.asarray(batch[SAMPLED])), cap)
    weighted = batch | {ADVANTAGES: batch[ADVANTAGES] * jnp.asarray(trust)}
    expected, plain = value_and_gradient(policy, grpo(config), weighted)
    objective = grpo(dataclasses.replace(config, importance_sampling_cap=cap))
    result, gradient = value_and_gradient(policy, objective, batch)
    np.testing.assert_allclose(result.loss, expected.loss, rtol=1e-5)
    assert norm(jax.tree.map(jnp.subtract, gradient, plain)) <= 2e-6 * norm(plain)
    mask = np.asarray(batch["loss_mask"]) > 0
    found = {name: float(total.mean()) for name, total in result.sums.items()}
    np.testing.assert_allclose(found["importance_weight"], trust[mask].mean(), rtol=1e-5)
    np.testing.assert_allclose(found["importance_capped"], (trust >= cap)[mask].mean())
    assert 0 < found["importance_capped"] < 1


@pytest.mark.long
@pytest.mark.every_dose
def test_advantages_of_zero_teach_nothing(policy):
    batch = rows_of(policy, [completions(advantages=[0.0] * 5)])
    result, gradient = value_and_gradient(policy, grpo(GrpoConfig()), batch)
    assert float(result.loss) == 0.0
    assert norm(gradient) == 0.0


@pytest.mark.long
def test_a_masked_completion_counts_where_completions_are_divided_by(policy):
    """TRL does the same with mask_truncated_completions: it is one of the group."""
    here = completions()
    here[1]["loss_mask"] = np.zeros(len(here[1]["inputs"]))
    without = rows_of(policy, [[here[0], *here[2:]]])
    batch = rows_of(policy, [here])
    objective = grpo(GrpoConfig(loss_type="grpo"))
    result, _ = value_and_gradient(policy, objective, batch)
    alone, _ = value_and_gradient(policy, objective, without)
    np.testing.assert_allclose(5 * result.loss, 4 * alone.loss, rtol=1e-5)


def test_an_evaluation_set_has_its_loss(policy):
    """It has no completions of the policy: only the likelihood of its tokens is computed."""
    batch = rows_of(policy, [completions()])
    plain = {name: batch[name] for name in (*WHOLE, "loss_mask")}
    sums = grpo(GrpoConfig(beta=0.1)).evaluate({POLICY: nnx.merge(*policy)}, plain)
    mask = np.asarray(batch["loss_mask"])
    expected = -(log_probs_of(policy, batch) * mask).sum() / mask.sum()
    np.testing.assert_allclose(sums["nll"].mean(), expected, rtol=1e-5)
    assert list(sums) == ["nll"]
