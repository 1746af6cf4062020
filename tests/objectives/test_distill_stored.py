"""Distillation from files: with all entries as from the teacher itself, and the same gradient for
every split of the batch."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from data_pipeline.shards.teacher_logits import IDS, LOG_PROBS, TAIL
from maxtrain.config.schema import DistillConfig
from maxtrain.objectives.distill import TEACHER, distill
from maxtrain.objectives.distill_stored import distill_stored
from maxtrain.objectives.objective import POLICY
from maxtrain.ops.top_divergence import top_of
from tests.objectives.test_distill import TEMPERATURE, WEIGHT, merged, models, value_and_gradients

__all__ = ["models"]
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("optax_dtypes")]


def with_top(models, batch, k):
    """A batch with what the teacher says of it."""
    teacher = merged(models)[TEACHER]
    logits = teacher(batch["inputs"], batch["segment_ids"], batch["positions"])
    top = top_of(jax.nn.log_softmax(logits / TEMPERATURE), k)
    return batch | {IDS: top.ids, LOG_PROBS: top.log_probs, TAIL: top.tail}


def of_policy(models, objective, batch, scales):
    def loss(params):
        policy = nnx.merge(models[POLICY][0], params)
        result = objective.forward({POLICY: policy}, batch, scales)
        return result.loss, result

    return jax.jit(jax.value_and_grad(loss, has_aux=True))(models[POLICY][1])


@pytest.mark.parametrize("kind", ["forward", "reverse"])
def test_it_is_distillation_however_the_batch_is_split(tiny, models, kind):
    batch = {name: jnp.asarray(x) for name, x in tiny.batch().items()}
    size = tiny.model.vocab_size
    config = DistillConfig(temperature=TEMPERATURE, weight=WEIGHT, kind=kind, stored="x", top=size)
    objective = distill_stored(config)
    live = distill(TEMPERATURE, WEIGHT, kind)
    expected, (of_live, _) = value_and_gradients(models, live, batch, live.scales(batch))
    (loss, result), gradient = of_policy(
        models, objective, with_top(models, batch, size), objective.scales(batch)
    )
    np.testing.assert_allclose(loss, expected.loss, rtol=1e-6)
    for name in ("nll", "distill", "agreement"):
        np.testing.assert_allclose(
            result.sums[name].mean(), expected.sums[name].mean(), rtol=1e-6, err_msg=name
        )
    difference = jax.tree.map(jnp.subtract, gradient, of_live)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(of_live))

    few = with_top(models, batch, 3)
    scales = objective.scales(batch)
    (whole, _), gradient = of_policy(models, objective, few, scales)
    assert whole < loss
    parts = []
    for first in range(4):
        micro = {name: x[first::4] for name, x in few.items()}
        parts.append(of_policy(models, objective, micro, scales))
    np.testing.assert_allclose(sum(part[0][0] for part in parts), whole, rtol=1e-6)
    total = jax.tree.map(lambda *x: sum(x), *(part[1] for part in parts))
    difference = jax.tree.map(jnp.subtract, total, gradient)
    assert float(optax.tree.norm(difference)) <= 1e-6 * float(optax.tree.norm(gradient))
