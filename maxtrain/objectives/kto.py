"""KTO: labelled answers; good ones become more likely than under the reference, bad ones less.

A row holds answers as documents, each after its prompt. The loss mask is 1 for the tokens of
answers, and the array `value` of a batch has the label of each position's document, 1 or -1.

The baseline z0 estimates the divergence of the policy from the reference: the mean log-ratio of
answers after mismatched prompts, but at least 0. It is computed over the whole batch before the
first gradient, without noise, and no gradient flows through it. So a gradient does not depend on
how the batch is split.

Source: Ethayarajh et al., https://arxiv.org/abs/2402.01306. As in TRL, each prompt gets the
previous
    answer of the batch; here answers of one row stay in it, so that none is cut.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from data_pipeline.loader.packing import VALUE
from maxtrain.config.schema import DpoConfig, RegularizationConfig
from maxtrain.objectives.next_token import NO_NOISE, noisy_forward, target_log_probs
from maxtrain.objectives.objective import (
    LAYERS,
    POLICY,
    REFERENCE,
    REFERENCE_SUM,
    Batch,
    FirstPass,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.mismatched import mismatched
from maxtrain.ops.preference import of_label
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum, numbers_of_documents, sums_of_documents

PREFERENCE = Metric("preference", "per answer")
_DIVERGENCE = "divergence"


class _LogRatios(NamedTuple):
    """log(policy / reference) of the answers of each row, in nats; meaningless for other
    documents."""

    values: Float[Array, "B S"]
    # Whether the document has targets and is no padding.
    are_there: Bool[Array, "B S"]


def kto(config: DpoConfig, regularization: RegularizationConfig = NO_NOISE) -> Objective:
    """Build the objective: the mean over answers of KTO's loss, from 0 to 1, weighted by label.

    Recorded beside `nll` of the targets of all answers: reward_chosen, reward_rejected: beta *
        log(policy / reference), nats, of good answers and of bad ones.
        reward_accuracy: the share of answers that are above z0 and good, or below it and bad.
        kl: z0, nats; with `apo_zero_unpaired` there is none.
        entropy: of the policy's distributions at the targets, nats.

    Args:
        config: `kto`, or `apo_zero_unpaired`, whose z0 is 0.
        regularization: noise and dropout, applied if the batch has keys.
    """
    has_divergence = config.loss_type == "kto"
    factors = {"preference": 1.0, LAYERS: 1.0}
    recorded = [
        PREFERENCE,
        Metric("reward_chosen", "nats per good answer"),
        Metric("reward_rejected", "nats per bad answer"),
        Metric("reward_accuracy", "share of answers"),
        Metric("entropy", "nats per target"),
    ]
    first_pass = None
    if has_divergence:
        recorded.insert(4, Metric("kl", "nats per answer"))
        first_pass = FirstPass(mismatched, _divergence)

    def denominators(batch: Batch) -> dict[str, Array]:
        return {
            "preference": _are_there(batch).sum().astype(jnp.float32),
            LAYERS: num_tokens(batch),
        }

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        mask = batch["loss_mask"].astype(jnp.float32)
        out = noisy_forward(policy, batch, regularization)
        found = target_log_probs(policy, out.hidden, batch)
        ratios = _log_ratios(found.log_probs, models, batch)
        labels = jnp.sign(sums_of_documents(batch[VALUE] * mask, batch["segment_ids"]))
        zero = jnp.zeros_like(labels)
        if has_divergence:
            zero += jax.nn.relu(batch[_DIVERGENCE])[:, None]
        weights = jnp.where(labels > 0, config.desirable_weight, config.undesirable_weight)
        each = weights * of_label(ratios.values, labels, zero, config.beta)
        preference = jnp.where(ratios.are_there, each, 0.0).sum()

        def over(values: Array, answers: Array) -> WeightedSum:
            total = jnp.where(answers, values, 0.0).sum()
            return WeightedSum(total, answers.sum().astype(jnp.float32))

        rewards = config.beta * ratios.values
        is_right = (labels * (ratios.values - zero) > 0).astype(jnp.float32)
        good = ratios.are_there & (labels > 0)
        bad = ratios.are_there & (labels < 0)
        sums = {
            "nll": WeightedSum(-(found.log_probs * mask).sum(), mask.sum()),
            "preference": over(each, ratios.are_there),
            "reward_chosen": over(rewards, good),
            "reward_rejected": over(rewards, bad),
            "reward_accuracy": over(is_right, ratios.are_there),
            "entropy": WeightedSum((found.entropy * mask).sum(), mask.sum()),
        }
        if has_divergence:
            sums["kl"] = over(zero, ratios.are_there)
        loss = scales["preference"] * preference
        return with_layers(loss, jax.lax.stop_gradient(sums), out, scales)

    models: tuple[str, ...] = (POLICY, REFERENCE)
    arrays = {VALUE: "BT"}
    if config.reference_logprobs == "stored":
        models = (POLICY,)
        arrays[REFERENCE_SUM] = "BT"
    return Objective(
        factors,
        denominators,
        forward,
        models=models,
        loss=PREFERENCE,
        recorded=tuple(recorded),
        evaluated=tuple(recorded),
        arrays=arrays,
        first_pass=first_pass,
    )


def _divergence(models: Models, batch: Batch) -> dict[str, WeightedSum]:
    """Sum the log-ratios of rows of mismatched answers."""
    policy = models[POLICY]
    hidden = policy.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
    found = target_log_probs(policy, hidden, batch)
    ratios = _log_ratios(found.log_probs, models, batch)
    total = jnp.where(ratios.are_there, ratios.values, 0.0).sum()
    measured = WeightedSum(total, ratios.are_there.sum().astype(jnp.float32))
    return jax.lax.stop_gradient({_DIVERGENCE: measured})


def _log_ratios(log_probs: Float[Array, "B T"], models: Models, batch: Batch) -> _LogRatios:
    """Compute the log-ratios of the documents of each row."""
    segments = batch["segment_ids"]
    mask = batch["loss_mask"].astype(jnp.float32)
    if REFERENCE_SUM in batch:
        of_reference = numbers_of_documents(batch[REFERENCE_SUM], segments)
        ratios = sums_of_documents(log_probs * mask, segments) - of_reference
        return _LogRatios(ratios, _are_there(batch))
    model = models[REFERENCE]
    hidden = model.hidden(batch["inputs"], segments, batch["positions"])
    reference = jax.lax.stop_gradient(target_log_probs(model, hidden, batch).log_probs)
    return _LogRatios(
        sums_of_documents((log_probs - reference) * mask, segments), _are_there(batch)
    )


def _are_there(batch: Batch) -> Bool[Array, "B S"]:
    """Return which documents are answers with targets."""
    mask = batch["loss_mask"].astype(jnp.float32)
    lengths = sums_of_documents(mask, batch["segment_ids"])
    # Padding is no document.
    return (lengths > 0).at[:, 0].set(False)
