"""Distillation from stored teacher logits: each token's likeliest tokens and the mass of all
others, which `maxtrain teach` has written beside the data. The teacher itself is not needed."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from data_pipeline.shards.teacher_logits import IDS, LOG_PROBS, TAIL
from maxtrain.config.schema import DistillConfig, LossConfig, RegularizationConfig
from maxtrain.objectives.distill import numbers_of, unit_of
from maxtrain.objectives.next_token import (
    NO_NOISE,
    PLAIN,
    chunks_of,
    loss_of_hidden,
    next_token,
    noisy_forward,
    num_targets,
    target_weights,
)
from maxtrain.objectives.objective import POLICY, Batch, Models, Objective, ObjectiveOutput, Scales
from maxtrain.ops.divergence import Predictor
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum
from maxtrain.ops.top_divergence import TopLogProbs, top_divergence
from maxtrain.parallel.batches import PerToken


def distill_stored(
    config: DistillConfig,
    loss: LossConfig = PLAIN,
    normalize: str = "tokens",
    num_sources: int = 0,
    regularization: RegularizationConfig = NO_NOISE,
) -> Objective:
    """Build the objective of `distill` with the divergence of ops/top_divergence.py.

    Args:
        config: the divergence, its weight, and the number of stored entries per token.
        loss, normalize, num_sources, regularization: as for `next_token`.
    """
    plain = next_token(loss, normalize, num_sources, regularization)
    factors = {**plain.factors, "nll": 1 - config.weight, "distill": config.weight}
    compared = (
        Metric("distill", unit_of(config.temperature)),
        Metric("agreement", "share of targets"),
    )

    def denominators(batch: Batch) -> dict[str, Array]:
        return plain.denominators(batch) | {"distill": num_targets(batch, normalize)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        out = noisy_forward(policy, batch, regularization)
        learnt = loss_of_hidden(out, policy, batch, scales, loss, normalize, num_sources)
        found = top_divergence(
            Predictor(out.hidden, policy.output_matrix()),
            TopLogProbs(batch[IDS], batch[LOG_PROBS], batch[TAIL]),
            target_weights(batch, normalize) * scales["distill"],
            batch["loss_mask"].astype(jnp.float32),
            chunks=chunks_of(batch, policy),
            student_numbers=numbers_of(policy),
            temperature=config.temperature,
            kind=config.kind,
            beta=config.beta,
        )
        targets = learnt.sums["nll"].weight
        sums = {
            **learnt.sums,
            "distill": WeightedSum(found.divergence.sum(), targets),
            "agreement": WeightedSum(found.agreement.sum(), targets),
        }
        sums = jax.lax.stop_gradient(sums)
        return learnt._replace(loss=learnt.loss + found.loss, sums=sums)

    return Objective(
        factors,
        denominators,
        forward,
        recorded=(*plain.recorded, *compared),
        evaluated=compared,
        arrays={
            IDS: PerToken(config.top, "int32"),
            LOG_PROBS: PerToken(config.top, "float32"),
            TAIL: "BT",
        },
    )
