"""Reward models: a score of answers that ranks the chosen answer of a pair above the rejected one.

Pairs lie in rows as for objectives/dpo.py. The model reads each answer after its prompt, and the
score at its last token is its reward. If documents have end-of-document tokens, the targets of a
row are all tokens of its documents, ending with that token. If they have none, as in rendered
chats, the inputs of a row are all tokens of its documents.

Source: Ouyang et al., https://arxiv.org/abs/2203.02155; ops/preference.py names the sources of the
    loss and the regulariser.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from maxtrain.config.schema import RegularizationConfig, RewardConfig
from maxtrain.objectives.next_token import NO_NOISE, noisy_forward
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
from maxtrain.ops.preference import bradley_terry, off_centre
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum, sums_of_pairs

PREFERENCE = Metric("preference", "nats per pair")
# The array with the margin of each position's pair: how much better the chosen answer is.
_MARGIN = "value"
_TARGETS = "targets"


def reward(
    config: RewardConfig,
    regularization: RegularizationConfig = NO_NOISE,
    has_end_marks: bool = True,
) -> Objective:
    """Build the objective: the mean over pairs of the Bradley-Terry loss, plus `centre_weight`
    times the mean square of the sum of their rewards.

    Recorded:
        preference: the loss without the regulariser.
        off_centre: the mean square; only with its weight.
        reward_chosen, reward_rejected, reward_margin: the rewards, and their difference.
        reward_accuracy: the share of pairs in which the chosen answer has the higher reward.

    Args:
        config: weight of the regulariser, and whether the data's margins are read.
        regularization: noise and dropout, applied if the batch has keys.
        has_end_marks: whether the documents of the data have end-of-document tokens.
    """
    # The array that holds all tokens of the documents.
    tokens = "targets" if has_end_marks else "inputs"
    factors = {"preference": 1.0, LAYERS: 1.0}
    recorded = [
        PREFERENCE,
        Metric("reward_chosen", "per answer"),
        Metric("reward_rejected", "per answer"),
        Metric("reward_margin", "per pair"),
        Metric("reward_accuracy", "share of pairs"),
    ]
    if config.centre_weight:
        factors["off_centre"] = config.centre_weight
        recorded.insert(1, Metric("off_centre", "squared reward per pair"))

    def denominators(batch: Batch) -> dict[str, Array]:
        count = _are_there(batch).sum().astype(jnp.float32)
        return {"preference": count, "off_centre": count, LAYERS: num_tokens(batch)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        policy = models[POLICY]
        out = noisy_forward(policy, batch | {"inputs": batch[tokens]}, regularization)
        is_end = _is_end(batch).astype(jnp.float32)
        rewards = sums_of_pairs(policy.scores(out.hidden) * is_end, batch["segment_ids"])
        chosen = rewards[..., 0]
        rejected = rewards[..., 1]
        margin = jnp.zeros_like(chosen)
        if config.margin:
            margin = sums_of_pairs(batch[_MARGIN] * is_end, batch["segment_ids"])[..., 0]
        are_there = _are_there(batch)
        count = are_there.sum().astype(jnp.float32)

        def over_pairs(values: Array) -> WeightedSum:
            return WeightedSum(jnp.where(are_there, values, 0.0).sum(), count)

        sums = {
            "preference": over_pairs(bradley_terry(chosen, rejected, margin)),
            "reward_chosen": over_pairs(chosen),
            "reward_rejected": over_pairs(rejected),
            "reward_margin": over_pairs(chosen - rejected),
            "reward_accuracy": over_pairs((chosen > rejected).astype(jnp.float32)),
        }
        loss = scales["preference"] * sums["preference"].total
        if config.centre_weight:
            sums["off_centre"] = over_pairs(off_centre(chosen, rejected))
            loss += scales["off_centre"] * sums["off_centre"].total
        targets = batch["loss_mask"].astype(jnp.float32).sum()
        sums[_TARGETS] = WeightedSum(sums["preference"].total, targets)
        return with_layers(loss, jax.lax.stop_gradient(sums), out, scales)

    arrays = {}
    if config.margin:
        arrays[_MARGIN] = "BT"
    return Objective(
        factors,
        denominators,
        forward,
        loss=PREFERENCE,
        recorded=tuple(recorded),
        evaluated=tuple(recorded),
        arrays=arrays,
        counted=_TARGETS,
    )


def _are_there(batch: Batch) -> Bool[Array, "B P"]:
    """Return which pairs have targets in both answers."""
    mask = batch["loss_mask"].astype(jnp.float32)
    return (sums_of_pairs(mask, batch["segment_ids"]) > 0).all(-1)


def _is_end(batch: Batch) -> Bool[Array, "B T"]:
    """Return where the documents of rows end."""
    segments = batch["segment_ids"]
    after = jnp.pad(segments[:, 1:], ((0, 0), (0, 1)))
    return (segments > 0) & (segments != after)
