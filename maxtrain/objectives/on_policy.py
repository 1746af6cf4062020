"""On-policy distillation: a model learns the distributions of a frozen teacher on completions that
it sampled itself.

A batch holds completions after their prompts, as documents that are packed into rows;
rl/rollouts.py makes it. The loss mask is 1 for the tokens of completions. The loss is the
divergence of both models' full distributions at each of these tokens. As in the paper, no gradient
goes through the sampling.

Source: Agarwal et al., https://arxiv.org/abs/2306.13649 (generalised knowledge distillation, all of
    it on-policy); Gu et al., https://arxiv.org/abs/2306.08543.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.config.schema import RegularizationConfig
from maxtrain.objectives.distill import TEACHER, numbers_of, require_divergence, unit_of
from maxtrain.objectives.next_token import (
    NO_NOISE,
    chunks_of,
    noisy_forward,
    num_targets,
    target_weights,
)
from maxtrain.objectives.objective import (
    LAYERS,
    POLICY,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.divergence import Predictor, divergence
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

_TARGETS = "targets"


def on_policy(
    temperature: float,
    kind: str = "forward",
    normalize: str = "tokens",
    regularization: RegularizationConfig = NO_NOISE,
    beta: float = 0.5,
) -> Objective:
    """Build the objective: temperature^2 * the divergence from the teacher at each token of
    completions.

    Recorded: distill: the divergence, which is the loss of the run. agreement: share of targets
        where both models have the same likeliest token. entropy: of the policy's distributions, at
        the temperature.

    Args:
        temperature, kind, beta: as for `distill`.
        normalize: what the divergence is averaged over, as for `next_token`.
        regularization: noise and dropout, applied if the batch has keys.

    Raises:
        ValueError: an argument is out of range.
    """
    require_divergence(temperature, kind, beta)
    loss = Metric("distill", unit_of(temperature))
    recorded = (
        loss,
        Metric("agreement", "share of targets"),
        Metric("entropy", "nats per target"),
    )

    def denominators(batch: Batch) -> dict[str, Array]:
        return {"distill": num_targets(batch, normalize), LAYERS: num_tokens(batch)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        teacher = models[TEACHER]
        mask = batch["loss_mask"].astype(jnp.float32)
        out = noisy_forward(policy, batch, regularization)
        of_teacher = teacher.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
        found = divergence(
            Predictor(out.hidden, policy.output_matrix()),
            jax.lax.stop_gradient(Predictor(of_teacher, teacher.output_matrix())),
            target_weights(batch, normalize) * scales["distill"],
            mask,
            chunks=chunks_of(batch, policy),
            student_numbers=numbers_of(policy),
            teacher_numbers=numbers_of(teacher),
            temperature=temperature,
            kind=kind,
            beta=beta,
        )
        targets = mask.sum()
        sums = {
            "distill": WeightedSum(found.divergence.sum(), targets),
            "agreement": WeightedSum(found.agreement.sum(), targets),
            "entropy": WeightedSum(found.entropy.sum(), targets),
            _TARGETS: WeightedSum(found.divergence.sum(), targets),
        }
        return with_layers(found.loss, jax.lax.stop_gradient(sums), out, scales)

    return Objective(
        {"distill": 1.0, LAYERS: 1.0},
        denominators,
        forward,
        models=(POLICY, TEACHER),
        loss=loss,
        recorded=recorded,
        evaluated=recorded,
        counted=_TARGETS,
    )
