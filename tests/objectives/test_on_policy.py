"""Distillation on a model's own completions: the divergence alone, and the same gradient for every
split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxtrain.objectives.on_policy import on_policy
from tests.objectives.test_distill import by_hand, models, value_and_gradients

__all__ = ["models"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optax_dtypes")]
TEMPERATURE = 2.0


@pytest.mark.parametrize("kind", ["reverse", "jsd"])
def test_the_loss_is_the_divergence_however_the_batch_is_split(tiny, models, kind):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    objective = on_policy(TEMPERATURE, kind)
    scales = objective.scales(batch)
    whole, (gradient, of_teacher) = value_and_gradients(models, objective, batch, scales)
    _, means = by_hand(models, batch, kind)
    np.testing.assert_allclose(whole.loss, TEMPERATURE**2 * means["distill"], rtol=1e-5)
    for name in ("distill", "agreement"):
        np.testing.assert_allclose(whole.sums[name].mean(), means[name], rtol=1e-5)
    assert 0 < whole.sums["entropy"].mean() < np.log(tiny.model.vocab_size)
    assert all((x == 0).all() for x in jax.tree.leaves(of_teacher))
    parts = []
    for first in range(2):
        micro = {name: x[first::2] for name, x in batch.items()}
        parts.append(value_and_gradients(models, objective, micro, scales))
    total = jax.tree.map(jnp.add, parts[0][1][0], parts[1][1][0])
    difference = jax.tree.map(jnp.subtract, total, gradient)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(gradient))
    np.testing.assert_allclose(parts[0][0].loss + parts[1][0].loss, whole.loss, rtol=1e-6)
