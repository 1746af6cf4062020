"""Distillation: a model learns the distributions of a frozen teacher, and the data's next tokens.

Source: Hinton et al., https://arxiv.org/abs/1503.02531.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.config.schema import LossConfig, RegularizationConfig
from maxtrain.models.decoder import Decoder
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
from maxtrain.objectives.objective import (
    POLICY,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
)
from maxtrain.ops.divergence import KINDS, LogitFormats, Predictor, divergence
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

TEACHER = "teacher"


def distill(
    temperature: float,
    weight: float,
    kind: str = "forward",
    loss: LossConfig = PLAIN,
    normalize: str = "tokens",
    num_sources: int = 0,
    regularization: RegularizationConfig = NO_NOISE,
    beta: float = 0.5,
) -> Objective:
    """Build the objective weight * temperature^2 * divergence + (1 - weight) * cross-entropy.

    The divergence compares the policy's and the teacher's distributions at each target, both at the
    temperature. The teacher reads the same tokens, without noise.

    Args:
        temperature: divisor of the logits of both models, above 0.
        weight: weight of the divergence, from 0 to 1.
        kind: `forward`: KL(teacher || policy); `reverse`: KL(policy || teacher); `jsd`: the
            generalised Jensen-Shannon divergence of `divergence`, with its `beta`.
        loss, normalize, num_sources, regularization: as for `next_token`; the divergence is
            normalized like the cross-entropy.
        beta: weight of the teacher in the mixture of `jsd`, between 0 and 1.

    Raises:
        ValueError: an argument is out of range.
    """
    require_divergence(temperature, kind, beta)
    _require_weight(weight)
    plain = next_token(loss, normalize, num_sources, regularization)
    factors = {**plain.factors, "nll": 1 - weight, "distill": weight}
    compared = (
        Metric("distill", unit_of(temperature)),
        Metric("agreement", "share of targets"),
    )

    def denominators(batch: Batch) -> dict[str, Array]:
        return plain.denominators(batch) | {"distill": num_targets(batch, normalize)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        teacher = models[TEACHER]
        out = noisy_forward(policy, batch, regularization)
        learnt = loss_of_hidden(out, policy, batch, scales, loss, normalize, num_sources)
        of_teacher = teacher.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
        found = divergence(
            Predictor(out.hidden, policy.output_matrix()),
            jax.lax.stop_gradient(Predictor(of_teacher, teacher.output_matrix())),
            target_weights(batch, normalize) * scales["distill"],
            batch["loss_mask"].astype(jnp.float32),
            chunks=chunks_of(batch, policy),
            student_numbers=numbers_of(policy),
            teacher_numbers=numbers_of(teacher),
            temperature=temperature,
            kind=kind,
            beta=beta,
        )
        targets = learnt.sums["nll"].weight
        sums = {
            **learnt.sums,
            "distill": WeightedSum(found.divergence.sum(), targets),
            "agreement": WeightedSum(found.agreement.sum(), targets),
        }
        return learnt._replace(loss=learnt.loss + found.loss, sums=sums)

    return Objective(
        factors,
        denominators,
        forward,
        models=(POLICY, TEACHER),
        recorded=(*plain.recorded, *compared),
        evaluated=compared,
    )


def unit_of(temperature: float) -> str:
    """Return the unit of a divergence at a temperature."""
    if temperature == 1:
        return "nats per target"
    return f"nats per target at temperature {temperature:g}"


def numbers_of(model: Decoder) -> LogitFormats:
    """Return the number formats of a model's logits."""
    return LogitFormats(model.precision.compute, model.precision.output, model.spec.logit_softcap)


def _require_weight(weight: float) -> None:
    """Raise a ValueError if the weight is not from 0 to 1."""
    if not 0 <= weight <= 1:
        raise ValueError(
            f"weight={weight} must be from 0 to 1: it is the share of the divergence in the loss. "
            "Set it to 0.5, for example."
        )


def require_divergence(temperature: float, kind: str, beta: float) -> None:
    """Raise a ValueError if an argument of a divergence is out of range; see `distill`."""
    if not temperature > 0:
        raise ValueError(
            f"temperature={temperature} must be above 0: it divides the logits. "
            "Set it to 1 for the distributions as they are."
        )
    if kind not in KINDS:
        raise ValueError(f"kind={kind} must be one of {', '.join(KINDS)}. Set it to forward.")
    if not 0 < beta < 1:
        raise ValueError(
            f"beta={beta} must be between 0 and 1: it is the teacher's share of the mixture. Set "
            "it to 0.5, or kind to forward or reverse for what is at its ends."
        )
