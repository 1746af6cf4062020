"""Adversarial training: the loss is also minimised at nearby embeddings that maximise it.

It wraps any objective. Each row's embeddings are moved by an offset of length `radius` at most,
along the gradient of the row's own loss: in one step (FGM), or in several with projection back onto
the ball (PGD). An offset depends on its own row only, so the batch may be split in any way. The
cost is `steps` additional forward and backward passes, and one of the attacked batch.

Source: Miyato et al., https://arxiv.org/abs/1605.07725, equation 5; Madry et al.,
    https://arxiv.org/abs/1706.06083.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxtrain.config.schema import LossConfig
from maxtrain.objectives.objective import (
    POLICY,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
)
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

# The total length of PGD's steps in radii, so that the border can be reached from anywhere.
_OVERSHOOT = 2.5


def adversarial(objective: Objective, loss: LossConfig) -> Objective:
    """Add to an objective `loss.adversarial` times itself at the worst embeddings nearby.

    This includes the terms of layers. Metrics and observations of layers come from the unmodified
    embeddings.

    Also recorded: `adversarial`, the nats per target at the worst embeddings.
    """

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        clean = objective.forward(models, batch, scales)
        offset = worst_offset(objective, models, batch, scales, loss)
        attacked = objective.forward(models, batch | {"embedding_offset": offset}, scales)
        sums = clean.sums | {"adversarial": WeightedSum(*attacked.sums["nll"])}
        return clean._replace(loss=clean.loss + loss.adversarial * attacked.loss, sums=sums)

    recorded = (*objective.recorded, Metric("adversarial", "nats per target"))
    return objective._replace(forward=forward, recorded=recorded)


def worst_offset(
    objective: Objective, models: Models, batch: Batch, scales: Scales, loss: LossConfig
) -> Float[Array, "B T D"]:
    """Find the offset of each row's embeddings that maximises its loss; no gradient flows through
    it.

    The offset's Euclidean length is at most `loss.adversarial_radius`.
    """
    frozen = {}
    for name, model in models.items():
        graphdef, params = nnx.split(model)
        frozen[name] = nnx.merge(graphdef, jax.lax.stop_gradient(params))
    rows, length = batch["inputs"].shape
    step = loss.adversarial_radius
    if loss.adversarial_steps > 1:
        step *= _OVERSHOOT / loss.adversarial_steps

    def value(offset: Array) -> Array:
        return objective.forward(frozen, batch | {"embedding_offset": offset}, scales).loss

    def climb(_: Any, offset: Array) -> Array:
        offset += step * _unit(jax.grad(value)(offset))
        size = jnp.sqrt((offset * offset).sum((1, 2), keepdims=True))
        return offset * jnp.minimum(1.0, loss.adversarial_radius / jnp.maximum(size, 1e-30))

    start = jnp.zeros((rows, length, models[POLICY].config.embed_dim), jnp.float32)
    return jax.lax.stop_gradient(jax.lax.fori_loop(0, loss.adversarial_steps, climb, start))


def _unit(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Divide each row by its length; a row of zeros, which has no target, stays zero."""
    # Rows are scaled first, because squares would underflow.
    largest = jnp.abs(x).max((1, 2), keepdims=True)
    x = x / jnp.where(largest > 0, largest, 1.0)
    return x / jnp.maximum(jnp.sqrt((x * x).sum((1, 2), keepdims=True)), 1e-30)
