"""Direct preference optimisation: of two answers to a prompt, the chosen one becomes more likely
than the rejected one.

A row holds pairs as consecutive documents: documents 2 k - 1 and 2 k of a row are the chosen and
the rejected answer of a pair, each after its prompt. The loss mask is 1 for the tokens of answers.
So pairs are packed like other documents, and rows are independent of each other.

Source: Rafailov et al., https://arxiv.org/abs/2305.18290; ops/preference.py names the source of
each
    loss.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from maxtrain.config.schema import DpoConfig, RegularizationConfig
from maxtrain.objectives.next_token import (
    NO_NOISE,
    document_log_probs,
    noisy_forward,
    target_log_probs,
)
from maxtrain.objectives.objective import (
    LAYERS,
    POLICY,
    REFERENCE,
    REFERENCE_SUM,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.preference import (
    FREE_OF_REFERENCE,
    LOSSES,
    AnswerLogProbs,
    PreferenceCoefficients,
)
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum, by_pair, numbers_of_documents, sums_of_pairs

PREFERENCE = Metric("preference", "nats per pair")


class Pairs(NamedTuple):
    """The pairs of each row; missing pairs have meaningless numbers."""

    chosen: AnswerLogProbs
    rejected: AnswerLogProbs
    # Whether both answers have targets.
    are_there: Bool[Array, "B P"]


def dpo(config: DpoConfig, regularization: RegularizationConfig = NO_NOISE) -> Objective:
    """Build the objective: the mean over pairs of a preference loss, plus `sft_weight` times the
    mean cross-entropy over the tokens of chosen answers.

    Recorded beside `nll` of the targets of all answers: reward_chosen, reward_rejected: beta *
        log(policy / reference), nats; with a loss that is free of a reference, beta * the mean
        log-probability of a target.
        reward_margin: the difference of both.
        reward_accuracy: the share of pairs in which the chosen answer has the higher reward.
        chosen_nll: nats per target of the chosen answers.
        entropy: of the policy's distributions at the targets, nats.

    Args:
        config: the loss and its settings.
        regularization: noise and dropout, applied if the batch has keys.
    """
    loss_of_pairs = LOSSES[config.loss_type]
    needs_reference = config.loss_type not in FREE_OF_REFERENCE
    is_stored = needs_reference and config.reference_logprobs == "stored"
    strength = PreferenceCoefficients(config.beta, config.label_smoothing, config.margin)
    sft_weight = config.sft_weight
    if sft_weight is None:
        sft_weight = float(config.loss_type == "orpo")
    factors = {"preference": 1.0, "chosen": sft_weight, LAYERS: 1.0}
    recorded = (
        PREFERENCE,
        Metric("reward_chosen", "nats per answer"),
        Metric("reward_rejected", "nats per answer"),
        Metric("reward_margin", "nats per pair"),
        Metric("reward_accuracy", "share of pairs"),
        Metric("chosen_nll", "nats per target"),
        Metric("entropy", "nats per target"),
    )

    def denominators(batch: Batch) -> dict[str, Array]:
        mask = batch["loss_mask"].astype(jnp.float32)
        lengths = sums_of_pairs(mask, batch["segment_ids"])
        are_there = (lengths > 0).all(-1)
        of_chosen = jnp.where(are_there, lengths[..., 0], 0.0)
        return {
            "preference": are_there.sum().astype(jnp.float32),
            "chosen": of_chosen.sum(),
            LAYERS: num_tokens(batch),
        }

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        mask = batch["loss_mask"].astype(jnp.float32)
        out = noisy_forward(policy, batch, regularization)
        found = target_log_probs(policy, out.hidden, batch)
        of_policy = sums_of_pairs(found.log_probs * mask, batch["segment_ids"])
        of_reference = jnp.zeros_like(of_policy)
        if needs_reference:
            of_reference = by_pair(_reference_log_probs(models, batch))
        pairs = _pairs(of_policy, of_reference, mask, batch)
        each = loss_of_pairs(pairs.chosen, pairs.rejected, strength)
        preference = jnp.where(pairs.are_there, each, 0.0).sum()
        chosen_nll = -jnp.where(pairs.are_there, pairs.chosen.log_prob, 0.0).sum()
        loss = scales["preference"] * preference + scales["chosen"] * chosen_nll
        count = pairs.are_there.sum().astype(jnp.float32)
        chosen_targets = jnp.where(pairs.are_there, pairs.chosen.length, 0.0).sum()
        sums = {
            "nll": WeightedSum(-(found.log_probs * mask).sum(), mask.sum()),
            "preference": WeightedSum(preference, count),
            "chosen_nll": WeightedSum(chosen_nll, chosen_targets),
            "entropy": WeightedSum((found.entropy * mask).sum(), mask.sum()),
        }
        sums |= _rewards(pairs, needs_reference, config.beta)
        sums = jax.lax.stop_gradient(sums)
        return with_layers(loss, sums, out, scales)

    models: tuple[str, ...] = (POLICY,)
    arrays = {}
    if is_stored:
        arrays = {REFERENCE_SUM: "BT"}
    elif needs_reference:
        models = (POLICY, REFERENCE)
    return Objective(
        factors,
        denominators,
        forward,
        models=models,
        loss=PREFERENCE,
        recorded=recorded,
        evaluated=recorded,
        arrays=arrays,
    )


def _reference_log_probs(models: Models, batch: Batch) -> Float[Array, "B S"]:
    """Return the reference's `document_log_probs`, from the batch if it has them."""
    if REFERENCE_SUM in batch:
        return numbers_of_documents(batch[REFERENCE_SUM], batch["segment_ids"])
    return document_log_probs(models[REFERENCE], batch)


def _pairs(
    of_policy: Float[Array, "B P 2"],
    of_reference: Float[Array, "B P 2"],
    mask: Float[Array, "B T"],
    batch: Batch,
) -> Pairs:
    """Collect the log-probabilities of chosen and rejected answers."""
    lengths = sums_of_pairs(mask, batch["segment_ids"])
    # Answers without targets are not used, but must not cause a division by 0.
    divisors = jnp.maximum(lengths, 1.0)
    answers = []
    for place in range(2):
        answers.append(
            AnswerLogProbs(of_policy[..., place], of_reference[..., place], divisors[..., place])
        )
    return Pairs(answers[0], answers[1], (lengths > 0).all(-1))


def _rewards(pairs: Pairs, needs_reference: bool, beta: float) -> dict[str, WeightedSum]:
    """Return the metrics of the policy's implicit rewards."""
    if needs_reference:
        chosen = beta * pairs.chosen.log_ratio
        rejected = beta * pairs.rejected.log_ratio
    else:
        chosen = beta * pairs.chosen.mean_log_prob
        rejected = beta * pairs.rejected.mean_log_prob
    count = pairs.are_there.sum().astype(jnp.float32)

    def over_pairs(values: Array) -> WeightedSum:
        return WeightedSum(jnp.where(pairs.are_there, values, 0.0).sum(), count)

    return {
        "reward_chosen": over_pairs(chosen),
        "reward_rejected": over_pairs(rejected),
        "reward_margin": over_pairs(chosen - rejected),
        "reward_accuracy": over_pairs((chosen > rejected).astype(jnp.float32)),
    }
