"""PPO: loss and gradient are those of the formula, whatever the rows that completions lie in, and
the same for every split of the batch."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import PpoConfig
from maxtrain.models.registry import build_model
from maxtrain.objectives.grpo import ADVANTAGES, OLD, REFERENCE_LOG_PROBS, VALUES
from maxtrain.objectives.objective import POLICY
from maxtrain.objectives.ppo import RETURNS, ppo
from tests.objectives.test_grpo import completions, norm, rows_of, value_and_gradient

pytestmark = pytest.mark.usefixtures("optax_dtypes")
CONFIG = PpoConfig(cliprange=0.5, cliprange_value=0.3, vf_coef=0.7)
OF_PPO = (ADVANTAGES, VALUES, RETURNS)


@pytest.fixture(scope="module")
def policy(tiny):
    """A model with a value as (structure, parameters)."""
    config = dataclasses.replace(tiny.model, num_layers=1, value=True)
    model = build_model(config, tiny.precision, 0)
    assert model.value is not None
    kernel = model.value.kernel
    assert isinstance(kernel, nnx.Param)
    assert not np.asarray(kernel[...]).any()
    kernel[...] = 0.2 * jax.random.normal(jax.random.key(1), kernel[...].shape)
    return nnx.split(model)


@pytest.fixture(scope="module")
def documents():
    """Completions with advantages, values and returns of each token, around what the policy has."""
    rng = np.random.default_rng(2)
    found = completions()
    for document in found:
        for name in OF_PPO:
            document[name] = rng.normal(size=len(document["inputs"]))
    return found


def batch_of(policy, documents_of_rows, is_first=False):
    shape = (len(documents_of_rows), 24)
    apart = []
    own = {name: np.zeros(shape, np.float32) for name in (VALUES, RETURNS)}
    for row, documents in enumerate(documents_of_rows):
        column = 0
        for document in documents:
            here = slice(column, column + len(document["inputs"]))
            for name, values in own.items():
                values[row, here] = document[name]
            column = here.stop
        apart.append([{k: v for k, v in each.items() if k not in own} for each in documents])
    batch = rows_of(policy, apart, is_first)
    return batch | {name: jnp.asarray(values) for name, values in own.items()}


def naive(params, policy, rows):
    """The loss from its formula over whole logits, token by token."""
    model = nnx.merge(policy[0], params)
    of_policy = []
    of_values = []
    for row in range(len(rows["inputs"])):
        names = ("inputs", "segment_ids", "positions")
        arrays = [jnp.asarray(rows[name][row : row + 1]) for name in names]
        hidden = model.hidden(*arrays)
        log_p = jax.nn.log_softmax(model.logits(hidden), axis=-1)[0]
        value = (hidden @ model.value.kernel[...])[0, :, 0]
        for t in np.flatnonzero(np.asarray(rows["loss_mask"][row]) > 0):
            ratio = jnp.exp(log_p[t, rows["targets"][row, t]] - rows[OLD][row, t])
            advantage = rows[ADVANTAGES][row, t]
            clipped = jnp.clip(ratio, 1 - CONFIG.cliprange, 1 + CONFIG.cliprange)
            of_policy.append(jnp.maximum(-ratio * advantage, -clipped * advantage))
            old = rows[VALUES][row, t]
            near = jnp.clip(value[t], old - CONFIG.cliprange_value, old + CONFIG.cliprange_value)
            goal = rows[RETURNS][row, t]
            of_values.append(0.5 * jnp.maximum((value[t] - goal) ** 2, (near - goal) ** 2))
    return jnp.mean(jnp.stack(of_policy)) + CONFIG.vf_coef * jnp.mean(jnp.stack(of_values))


@pytest.mark.long
@pytest.mark.every_dose
def test_loss_and_gradient_are_those_of_the_formula(policy, documents):
    batch = batch_of(policy, [documents[:3], documents[3:]])
    result, gradient = value_and_gradient(policy, ppo(CONFIG), batch)
    known = {name: np.asarray(values) for name, values in batch.items()}
    with jax.default_matmul_precision("highest"):
        expected, slope = jax.jit(jax.value_and_grad(lambda params: naive(params, policy, known)))(
            policy[1]
        )
    np.testing.assert_allclose(result.loss, expected, rtol=1e-5)
    assert norm(jax.tree.map(jnp.subtract, gradient, slope)) <= 1e-5 * norm(slope)
    sums = {name: float(total.mean()) for name, total in result.sums.items()}
    assert 0 < sums["value_clipped"] < 1
    assert 0 < sums["clipped_low"] + sums["clipped_high"] < 1
    mask = np.asarray(batch["loss_mask"]) > 0
    np.testing.assert_allclose(sums["returns"], np.asarray(batch[RETURNS])[mask].mean(), rtol=1e-5)


@pytest.mark.every_dose
@pytest.mark.long
def test_packing_and_splits_change_nothing(policy, documents):
    """This holds if one row is empty, too."""
    objective = ppo(CONFIG)
    rows = [documents[:3], documents[3:4], [], documents[4:]]
    batch = batch_of(policy, rows)
    scales = objective.scales(batch)
    whole, expected = value_and_gradient(policy, objective, batch, scales)
    parts = []
    for first in range(2):
        micro = {name: x[first::2] for name, x in batch.items()}
        parts.append(value_and_gradient(policy, objective, micro, scales)[1])
    difference = jax.tree.map(lambda a, b, c: a + b - c, *parts, expected)
    assert norm(difference) <= 1e-6 * norm(expected)
    apart = batch_of(policy, [[one] for one in documents])
    found, gradient = value_and_gradient(policy, objective, apart)
    np.testing.assert_allclose(found.loss, whole.loss, rtol=1e-6)
    assert norm(jax.tree.map(jnp.subtract, gradient, expected)) <= 2e-6 * norm(expected)


@pytest.mark.long
@pytest.mark.every_dose
def test_the_first_step_clips_nothing(policy, documents):
    """Whatever was written down of the old policy and its values."""
    batch = batch_of(policy, [documents], is_first=True)
    result, _ = value_and_gradient(policy, ppo(CONFIG), batch)
    assert float(result.sums["ratio"].mean()) == 1.0
    assert float(result.sums["value_clipped"].total) == 0.0
    assert REFERENCE_LOG_PROBS in ppo(CONFIG).arrays
    plain = ppo(dataclasses.replace(CONFIG, kl_coef=0.0))
    assert plain.models == (POLICY,)
