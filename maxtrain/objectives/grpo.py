"""Reinforcement learning from groups of completions: GRPO and its variants.

A batch holds completions after their prompts, as documents that are packed into rows. The loss mask
is 1 for the tokens of completions. The samples and their advantages come with the batch;
rl/rollouts.py makes it.

Source: GRPO: Shao et al., https://arxiv.org/abs/2402.03300; Dr. GRPO: Liu et al.,
    https://arxiv.org/abs/2503.20783; DAPO: Yu et al., https://arxiv.org/abs/2503.14476;
    ops/policy_loss.py names the sources of the other losses.
"""

from collections.abc import Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp
from jaxtyping import Array, Key

from maxtrain.config.schema import GrpoConfig, RegularizationConfig
from maxtrain.models.decoder import Decoder, DecoderOut
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
    ObjectiveOutput,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.log_probs import TokenLogProbs
from maxtrain.ops.policy_loss import (
    RatioClip,
    importance_weights,
    policy_loss,
    reference_divergence,
)
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

# Additional arrays of a batch, float32: per token [B, T], and per row [B]. Log-probabilities by the
# policy at the beginning of training on the completion:
OLD = "old_log_probs"
# Log-probabilities by the sampler, while it decoded.
SAMPLED = "sampled_log_probs"
# Log-probabilities by the reference; only if beta is not 0.
REFERENCE_LOG_PROBS = "reference_log_probs"
# Tokens that `scored` draws, int32 [B, T].
DRAWN = "drawn"
# The advantage of each token's completion; with objective=ppo of the token itself.
ADVANTAGES = "advantages"
# The policy's value before each token at the beginning of training on the completion; only if it
# has a value head.
VALUES = "old_values"
# 1 in the first step that reads these completions, when the policy is still the old one.
IS_FIRST = "is_first"
# Number of completions of a row, including masked ones.
NUM_COMPLETIONS = "num_completions"


def grpo(
    config: GrpoConfig,
    regularization: RegularizationConfig = NO_NOISE,
    is_exact: bool = False,
) -> Objective:
    """Build the objective: the mean of a policy loss over tokens or completions, as `loss_type`
    says, plus beta times the divergence from the reference.

    Recorded beside `nll` of the sampled tokens: policy_loss: what is minimised, without the
        divergence. kl: an estimate of the divergence from the reference; only with beta. entropy:
        of the policy's distributions. ratio: of the policy now and when the completions were taken
        up. clipped_low, clipped_high: the share of tokens whose gradient is cut off. sampler_gap:
        how far the sampler's log-probabilities are from those of training. importance_weight,
        importance_capped: of the policy that took completions up over the one that sampled them,
        and the share of tokens where it is bounded; only with importance_sampling_cap.

    Args:
        config: the loss and its settings.
        regularization: noise and dropout, applied if the batch has keys.
        is_exact: as for `pass_through`.
    """
    clip = clip_of(config)
    per_completion = config.loss_type in ("grpo", "gspo")
    normalize = "sequences" if per_completion else "tokens"
    factors = {"policy": 1.0, LAYERS: 1.0}
    plain = next_token(regularization=regularization)
    recorded = [
        Metric("policy_loss", "mean over tokens or completions"),
        Metric("entropy", "nats per target"),
        Metric("ratio", "per target"),
        Metric("clipped_low", "share of targets"),
        Metric("clipped_high", "share of targets"),
        Metric("sampler_gap", "nats per target"),
    ]
    cap = config.importance_sampling_cap
    if cap is not None:
        recorded.append(Metric("importance_weight", "per target"))
        recorded.append(Metric("importance_capped", "share of targets"))
    if config.beta:
        recorded.insert(1, Metric("kl", "nats per target"))

    def divisor(batch: Batch) -> Array:
        if config.loss_type == "dr_grpo":
            return batch[NUM_COMPLETIONS].sum() * float(config.max_completion_length)
        if per_completion:
            return batch[NUM_COMPLETIONS].sum()
        return num_targets(batch, "tokens")

    def denominators(batch: Batch) -> dict[str, Array]:
        return {"policy": divisor(batch), LAYERS: num_tokens(batch)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        if ADVANTAGES not in batch:
            # An evaluation set has no sampled completions.
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

        def mean_of(values: Array) -> WeightedSum:
            return WeightedSum((values.astype(jnp.float32) * mask).sum(), mask.sum())

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
            "policy_loss": WeightedSum((of_policy * weights).sum(), divisor(batch)),
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
    """Return the objective with the arrays of a batch of completions, and the models it needs.

    Args:
        objective: an objective that learns from completions.
        has_reference: whether the policy is compared with a reference.
        more: additional arrays that the objective needs.
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
) -> tuple[DecoderOut, TokenLogProbs]:
    """Run the forward pass that trains, and return the log-probabilities of targets.

    Args:
        policy: the model.
        batch: the batch to read.
        temperature: divisor of the logits.
        regularization: noise and dropout, applied if the batch has keys.
        is_exact: whether the pass stores nothing for the backward pass, which recomputes it. Then
            it has the same bits as `scored`, because stored values would change how the compiler
            fuses operations.
    """

    def through() -> tuple[DecoderOut, TokenLogProbs]:
        out = noisy_forward(policy, batch, regularization)
        return out, target_log_probs(policy, out.hidden, batch, temperature)

    if is_exact:
        return jax.checkpoint(through)()
    return through()


def scored(
    models: Models, batch: Batch, temperature: float, keys: Key[Array, "B T"] | None = None
) -> dict[str, Array]:
    """Return the log-probability of each target, [B, T], by the policy (OLD) and by the reference
    if there is one, and the policy's values if it has a value head; without noise.

    Args:
        models: the policy, and a reference if needed.
        batch: the batch to read.
        temperature: divisor of the logits.
        keys: random keys to also draw a token from the policy at each target (DRAWN); None: draw
            none.
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
            # A barrier, so that log-probabilities have the same bits as without draws.
            apart = jax.lax.optimization_barrier(hidden)
            found[DRAWN] = target_draws(model, apart, keys, batch, temperature)
        if role == POLICY and model.value is not None:
            found[VALUES] = model.values(hidden)
    return found


def clip_of(config: GrpoConfig) -> RatioClip:
    """Return the clipping range of the config."""
    high = config.epsilon
    if config.epsilon_high is not None:
        high = config.epsilon_high
    level = "token"
    if config.loss_type == "gspo":
        level = "sequence"
    return RatioClip(config.epsilon, high, config.delta, level, config.loss_type == "cispo")
