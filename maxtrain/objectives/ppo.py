"""Reinforcement learning with a value of each token: PPO.

A batch has the arrays of objectives/grpo.py, but with an advantage for each token, and with values
and returns. These are computed when a rollout is made: see rl/returns.py.

Source: Schulman et al., https://arxiv.org/abs/1707.06347; for language models Ouyang et al.,
    https://arxiv.org/abs/2203.02155.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.config.schema import PpoConfig, RegularizationConfig
from maxtrain.objectives.grpo import (
    ADVANTAGES,
    IS_FIRST,
    OLD,
    REFERENCE_LOG_PROBS,
    SAMPLED,
    VALUES,
    of_completions,
    pass_through,
)
from maxtrain.objectives.next_token import NO_NOISE, next_token, num_targets
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
from maxtrain.ops.policy_loss import RatioClip, clipped_value_loss, policy_loss
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum

# Additional array of a batch, float32 per token [B, T]: the target of the value, which is the
# unwhitened advantage plus the value.
RETURNS = "returns"


def ppo(
    config: PpoConfig,
    temperature: float = 1.0,
    regularization: RegularizationConfig = NO_NOISE,
    is_exact: bool = False,
) -> Objective:
    """Build the objective: the clipped policy loss plus vf_coef times the value loss, both means
    over tokens.

    The value of a token is the value of the text before it, from the hidden state that predicts the
        token.

    Recorded beside `nll` of the sampled tokens: policy_loss, value_loss: what is minimised, without
        the coefficient. kl: of the policy and the reference; only with kl_coef. Its estimate is k1,
        whatever the reward has. entropy: of the policy's distributions. ratio: of the policy now
        and when the completions were taken up. clipped_low, clipped_high: the share of tokens whose
        gradient is cut off. value_clipped: the share of tokens whose value loss is clipped. value,
        returns: means. sampler_gap: how far the sampler's log-probabilities are from those of
        training.

    Args:
        config: the settings of both losses.
        temperature: divisor of the logits, as for the sampler.
        regularization: noise and dropout, applied if the batch has keys.
        is_exact: as for `pass_through` in grpo.py.
    """
    clip = RatioClip(config.cliprange, config.cliprange)
    factors = {"policy": 1.0, "value": config.vf_coef, LAYERS: 1.0}
    plain = next_token(regularization=regularization)
    recorded = [
        Metric("policy_loss", "mean over targets"),
        Metric("value_loss", "half a squared reward per target"),
        Metric("entropy", "nats per target"),
        Metric("ratio", "per target"),
        Metric("clipped_low", "share of targets"),
        Metric("clipped_high", "share of targets"),
        Metric("value_clipped", "share of targets"),
        Metric("value", "reward per target"),
        Metric("returns", "reward per target"),
        Metric("sampler_gap", "nats per target"),
    ]
    if config.kl_coef:
        recorded.insert(2, Metric("kl", "nats per target"))

    def denominators(batch: Batch) -> dict[str, Array]:
        count = num_targets(batch, "tokens")
        return {"policy": count, "value": count, LAYERS: num_tokens(batch)}

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        if ADVANTAGES not in batch:
            # An evaluation set has no sampled completions.
            return plain.forward(models, batch, dict.fromkeys(plain.factors, 0.0))
        policy = models[POLICY]
        mask = batch["loss_mask"].astype(jnp.float32)
        out, found = pass_through(policy, batch, temperature, regularization, is_exact)
        values = policy.values(out.hidden)
        # In the first step that reads the completions, the policy is still the old one.
        is_first = batch[IS_FIRST][:, None] > 0
        old = jnp.where(is_first, jax.lax.stop_gradient(found.log_probs), batch[OLD])
        old_values = jnp.where(is_first, jax.lax.stop_gradient(values), batch[VALUES])
        tokens = policy_loss(
            found.log_probs, old, batch[ADVANTAGES], mask, batch["segment_ids"], clip
        )
        returns = batch[RETURNS]
        errors, is_clipped = clipped_value_loss(values, old_values, returns, config.cliprange_value)

        def mean_of(of_tokens: Array) -> WeightedSum:
            return WeightedSum((of_tokens.astype(jnp.float32) * mask).sum(), mask.sum())

        sums = {
            "nll": mean_of(-found.log_probs),
            "policy_loss": mean_of(tokens.loss),
            "value_loss": mean_of(errors),
            "entropy": mean_of(found.entropy),
            "ratio": mean_of(tokens.ratio),
            "clipped_low": mean_of(tokens.clipped_low),
            "clipped_high": mean_of(tokens.clipped_high),
            "value_clipped": mean_of(is_clipped),
            "value": mean_of(values),
            "returns": mean_of(returns),
            "sampler_gap": mean_of(jnp.abs(batch[SAMPLED] - old)),
        }
        if config.kl_coef:
            sums["kl"] = mean_of(found.log_probs - batch[REFERENCE_LOG_PROBS])
        loss = scales["policy"] * sums["policy_loss"].total
        loss += scales["value"] * sums["value_loss"].total
        return with_layers(loss, jax.lax.stop_gradient(sums), out, scales)

    objective = Objective(factors, denominators, forward, recorded=tuple(recorded))
    more = {VALUES: "BT", RETURNS: "BT"}
    return of_completions(objective, has_reference=bool(config.kl_coef), more=more)
