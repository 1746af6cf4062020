"""Reinforcement learning from groups of completions: GRPO and its kin.

A batch holds completions behind their prompts, as documents that are packed into rows, with a loss
mask that is 1 for the tokens of completions. What was sampled, and how well it did, comes with the
batch: see rl/rollouts.py, which makes it.

Source: GRPO: Shao et al., https://arxiv.org/abs/2402.03300; Dr. GRPO: Liu et al.,
    https://arxiv.org/abs/2503.20783; DAPO: Yu et al., https://arxiv.org/abs/2503.14476; the other
    losses name theirs in ops/policy_loss.py.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from maxtrain.config.schema import GrpoConfig, RegularizationConfig
from maxtrain.models.decoder import Decoder, Forward
from maxtrain.objectives.next_token import (
    NO_NOISE,
    next_token,
    noisy_forward,
    num_targets,
    target_draws,
    target_log_probs,
    target_weights,
)
from maxtrain.objectives.objective import (
    LAYERS,
    POLICY,
    REFERENCE,
    Batch,
    Models,
    Objective,
    Result,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.log_probs import TokenLogProbs
from maxtrain.ops.policy_loss import (
    Clip,
    importance_weights,
    policy_loss,
    reference_divergence,
)
from maxtrain.ops.quantity import Quantity
from maxtrain.ops.sums import Sum

# Arrays of a batch beside those of every batch, float32: of each token [B, T], and of each row [B].
# By the policy, when the completion was taken up for training.
OLD = "old_log_probs"
# By the sampler, while it decoded.
SAMPLED = "sampled_log_probs"
# By the reference; only where there is a weight on the divergence from it.
REFERENCE_LOG_PROBS = "reference_log_probs"
# What `scored` finds beside log-probabilities: tokens, int32 [B, T].
DRAWN = "drawn"
# Of each token's completion; with objective=ppo of the token itself.
ADVANTAGES = "advantages"
# By the policy, when the completion was taken up: what was to be expected before the token; only
# where it has values.
VALUES = "old_values"
# 1 in the first step that reads these completions: the policy is the old one still.
IS_FIRST = "is_first"
# How many completions a row holds, also those that are masked.
NUM_COMPLETIONS = "num_completions"


def grpo(
    config: GrpoConfig,
    regularization: RegularizationConfig = NO_NOISE,
    is_exact: bool = False,
) -> Objective:
    """The mean of a loss of policies over tokens or completions, as `loss_type` says, plus beta
    times the divergence from the reference.

    Recorded beside `nll`, which is that of the tokens that were sampled:
        policy_loss: what is minimised, without the divergence.
        kl: an estimate of the divergence from the reference; only with beta.
        entropy: of the policy's distributions.
        ratio: of the policy now and when the completions were taken up.
        clipped_low, clipped_high: the share of tokens whose gradient is cut off.
        sampler_gap: how far the sampler's log-probabilities are from those of training.
        importance_weight, importance_capped: of the policy that took completions up over the one
            that sampled them, and the share of tokens where it is bounded; only with
            importance_sampling_cap.

    Args:
        config: which loss, and its numbers.
        regularization: what is random where the batch has keys.
        is_exact: as of `pass_through`.
    """
    clip = clip_of(config)
    per_completion = config.loss_type in ("grpo", "gspo")
    normalize = "sequences" if per_completion else "tokens"
    factors = {"policy": 1.0, LAYERS: 1.0}
    plain = next_token(regularization=regularization)
    recorded = [
        Quantity("policy_loss", "mean over tokens or completions"),
        Quantity("entropy", "nats per target"),
        Quantity("ratio", "per target"),
        Quantity("clipped_low", "share of targets"),
        Quantity("clipped_high", "share of targets"),
        Quantity("sampler_gap", "nats per target"),
    ]
    cap = config.importance_sampling_cap
    if cap is not None:
        recorded.append(Quantity("importance_weight", "per target"))
        recorded.append(Quantity("importance_capped", "share of targets"))
    if config.beta:
        recorded.insert(1, Quantity("kl", "nats per target"))

    def divisor(batch: Batch) -> Array:
        if config.loss_type == "dr_grpo":
            return batch[NUM_COMPLETIONS].sum() * float(config.max_completion_length)
        if per_completion:
            return batch[NUM_COMPLETIONS].sum()
        return num_targets(batch, "tokens")

    def denominators(batch: Batch) -> dict[str, Array]:
        return {"policy": divisor(batch), LAYERS: num_tokens(batch)}

    def forward(models: Models, batch: Batch, scales: Scales) -> Result:
        if ADVANTAGES not in batch:
            # Of an evaluation set: nobody sampled it.
            return plain.forward(models, batch, dict.fromkeys(plain.factors, 0.0))
        policy = models[POLICY]
        mask = batch["loss_mask"].astype(jnp.float32)
        out, found = pass_through(policy, batch, config.temperature, regularization, is_exact)
        now = jax.lax.stop_gradient(found.log_probs)
        is_first = batch[IS_FIRST][:, None] > 0
        old = jnp.where(is_first, now, batch[OLD])
        tokens = policy_loss(
            found.log_probs, old, batch[ADVANTAGES], mask, batch["segment_ids"], clip
        )
        weights = target_weights(batch, normalize)
        of_policy = tokens.loss
        sums = {}

        def mean_of(values: Array) -> Sum:
            return Sum((values.astype(jnp.float32) * mask).sum(), mask.sum())

        if cap is not None:
            trust = importance_weights(
                old, batch[SAMPLED], mask, batch["segment_ids"], clip.level, cap
            )
            of_policy = of_policy * trust
            sums["importance_weight"] = mean_of(trust)
            sums["importance_capped"] = mean_of(trust >= cap)
        each = of_policy
        if config.beta:
            apart = reference_divergence(found.log_probs, batch[REFERENCE_LOG_PROBS])
            sums["kl"] = mean_of(apart)
            if config.correct_kl:
                apart = apart * tokens.ratio
            each = each + config.beta * apart
        loss = scales["policy"] * (each * weights).sum()
        gap = jnp.abs(batch[SAMPLED] - old)
        sums |= {
            "nll": mean_of(-found.log_probs),
            "policy_loss": Sum((of_policy * weights).sum(), divisor(batch)),
            "entropy": mean_of(found.entropy),
            "ratio": mean_of(tokens.ratio),
            "clipped_low": mean_of(tokens.clipped_low),
            "clipped_high": mean_of(tokens.clipped_high),
            "sampler_gap": mean_of(gap),
        }
        return with_layers(loss, jax.lax.stop_gradient(sums), out, scales)

    objective = Objective(factors, denominators, forward, recorded=tuple(recorded))
    return of_completions(objective, has_reference=bool(config.beta))


def of_completions(
    objective: Objective, has_reference: bool, more: Mapping[str, str] = MappingProxyType({})
) -> Objective:
    """The objective with the arrays of a batch of completions, and with the models it is about.

    Args:
        objective: that learns from completions.
        has_reference: the policy is compared with a reference.
        more: arrays that it needs beside those of every such batch.
    """
    arrays = {
        OLD: "BT",
        SAMPLED: "BT",
        ADVANTAGES: "BT",
        IS_FIRST: "B",
        NUM_COMPLETIONS: "B",
        **more,
    }
    models: tuple[str, ...] = (POLICY,)
    if has_reference:
        arrays[REFERENCE_LOG_PROBS] = "BT"
        models = (POLICY, REFERENCE)
    return objective._replace(models=models, arrays=arrays)


def pass_through(
    policy: Decoder,
    batch: Batch,
    temperature: float,
    regularization: RegularizationConfig = NO_NOISE,
    is_exact: bool = False,
) -> tuple[Forward, TokenLogProbs]:
    """The pass that trains, and the log-probabilities of targets.

    Args:
        policy: the model.
        batch: what it reads.
        temperature: divides the logits.
        regularization: what is random where the batch has keys.
        is_exact: the pass stores nothing for the backward pass, which computes all of it once more.
            So it is the same program as `scored` inside another one. What is stored changes what a
            compiler computes together, and with that the last bits.
    """

    def through() -> tuple[Forward, TokenLogProbs]:
        out = noisy_forward(policy, batch, regularization)
        return out, target_log_probs(policy, out.hidden, batch, temperature)

    if is_exact:
        return jax.checkpoint(through)()
    return through()


def scored(
    models: Models, batch: Batch, temperature: float, keys: Key[Array, "B T"] | None = None
) -> dict[str, Array]:
    """The log-probability of each target, [B, T], by the policy (OLD) and, if there is one, by the
    reference, and the policy's value if it has one; nothing is random.

    Args:
        models: the policy, and perhaps a reference.
        batch: what they read.
        temperature: divides the logits.
        keys: also the tokens that the policy draws by these, in the place of targets (DRAWN).
    """
    names = {POLICY: OLD, REFERENCE: REFERENCE_LOG_PROBS}
    found = {}
    for role, name in names.items():
        if role not in models:
            continue
        model = models[role]
        hidden = model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
        found[name] = target_log_probs(model, hidden, batch, temperature).log_probs
        if role == POLICY and keys is not None:
            # Apart, so that log-probabilities are computed as they are without it.
            apart = jax.lax.optimization_barrier(hidden)
            found[DRAWN] = target_draws(model, apart, keys, batch, temperature)
        if role == POLICY and model.value is not None:
            found[VALUES] = model.values(hidden)
    return found


def clip_of(config: GrpoConfig) -> Clip:
    """How far ratios count."""
    high = config.epsilon
    if config.epsilon_high is not None:
        high = config.epsilon_high
    level = "token"
    if config.loss_type == "gspo":
        level = "sequence"
    return Clip(config.epsilon, high, config.delta, level, config.loss_type == "cispo")
