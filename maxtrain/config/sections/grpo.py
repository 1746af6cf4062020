"""The section `grpo`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from data_pipeline.config import DataConfig
from maxtrain.config.sections import sampling

# Objectives that learn from rewards of the model's own completions.
FROM_REWARDS = ("grpo", "ppo")
_IDLE = "{key}={value} is not used with {cause}. Set objective=grpo, or leave it out."
_GRPO = UsedBy({"objective": ("grpo",)}, _IDLE)
_SAMPLES = UsedBy({"objective": FROM_REWARDS}, _IDLE)
_CLIPPED = UsedBy({"grpo.loss_type": ("grpo", "bnpo", "dr_grpo", "dapo", "gspo")})
_WITH_DIVERGENCE = UsedBy({"grpo.beta": AnyValueExcept(0.0)})


@dataclasses.dataclass(frozen=True)
class GrpoConfig:
    """GRPO: training on groups of the model's own completions, by their rewards."""

    rewards: tuple[str, ...] = key(
        (),
        "reward functions: built-in ones such as 'overlong(max_tokens=512, cache_tokens=64)',"
        " or module:function of your own",
        used_by=_SAMPLES,
    )
    reward_weights: tuple[float, ...] = key(
        (), "weight of each reward function; empty: 1", used_by=_SAMPLES
    )
    reward_seconds: float = key(
        10.0,
        "time limit of a reward for one completion; a reward that takes longer is not counted",
        above=0,
        used_by=_SAMPLES,
    )
    reward_environment: tuple[str, ...] = key(
        (),
        "environment variables that your reward functions may read, such as an API key; other"
        " secrets are hidden from them",
        used_by=_SAMPLES,
    )
    num_generations: int = sampling.num_generations(
        8, "completions sampled for each prompt: a group", _SAMPLES
    )
    max_completion_length: int = sampling.max_completion_length(_SAMPLES)
    slots: int = sampling.slots(_SAMPLES)
    temperature: float = sampling.temperature(
        "temperature that divides the logits, in the sampler and in the loss", _SAMPLES
    )
    loss_type: Literal["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "gspo"] = key(
        "dapo",
        "policy loss and its mean: grpo, gspo: over completions; dapo, bnpo, cispo: over "
        "tokens; dr_grpo: a sum divided by a constant",
        used_by=_GRPO,
    )
    epsilon: float = key(
        0.2,
        "lower clip range: probability ratios below 1 - epsilon are clipped",
        above=0,
        high=1,
        used_by=(_GRPO, _CLIPPED),
    )
    epsilon_high: float | None = key(
        None,
        "upper clip range: ratios above 1 + epsilon_high are clipped, or with cispo above "
        "epsilon_high; null: epsilon",
        above=0,
        high=1000,
        used_by=_GRPO,
    )
    delta: float | None = key(
        None,
        "upper bound of the ratio itself, also for negative advantages; must be above 1 + "
        "epsilon; null: none",
        above=1,
        used_by=(_GRPO, _CLIPPED),
    )
    beta: float = key(
        0.0, "weight of the KL divergence from the reference model", low=0, high=1000, used_by=_GRPO
    )
    correct_kl: bool = key(
        False,
        "weight the KL divergence of each token by its probability ratio",
        used_by=(_GRPO, _WITH_DIVERGENCE),
    )
    reference: str | None = key(
        None,
        "reference model: a run or a Hugging Face directory, also a URL; null: the model "
        "without its adapters, or else its weights at the start",
        path="any",
        used_by=(_GRPO, _WITH_DIVERGENCE),
    )
    scale_rewards: Literal["group", "batch", "none"] = key(
        "group",
        "divisor of advantages: the standard deviation of the rewards in the group or in the "
        "batch, or none",
        used_by=_GRPO,
    )
    num_iterations: int = sampling.num_iterations(_SAMPLES)
    dynamic_sampling: int = key(
        0,
        "most times that groups with equal rewards, which teach nothing, are replaced by "
        "groups of later prompts; 0: never",
        low=0,
        high=1000,
        used_by=_GRPO,
    )
    staleness: int = key(
        0,
        "0: on-policy; 1: sample one rollout ahead with older weights, and compute its "
        "rewards during training",
        low=0,
        high=1,
        used_by=_GRPO,
    )
    importance_sampling_cap: float | None = key(
        None,
        "cap of the importance weights (policy / sampler) of each token; null: no importance "
        "weights",
        above=0,
        high=1000,
        used_by=_GRPO,
    )
    keep_rollouts: bool = sampling.keep_rollouts(_SAMPLES)
    mask_truncated_completions: bool = sampling.mask_truncated_completions(_SAMPLES)


def grpo_problems(objective: str, grpo: GrpoConfig) -> Iterator[str]:
    """No reward, weights of other rewards, bounds in the wrong order, and weights that are gone."""
    if objective not in FROM_REWARDS:
        return
    if not grpo.rewards:
        yield (
            f"objective={objective} needs a reward, but grpo.rewards=[] names none. "
            "Set grpo.rewards='[gsm8k]', for example."
        )
    if grpo.reward_weights and len(grpo.reward_weights) != len(grpo.rewards):
        yield (
            f"grpo.reward_weights={list(grpo.reward_weights)} must have as many numbers as "
            f"grpo.rewards={list(grpo.rewards)}. Give each reward one, or none at all."
        )
    if objective != "grpo":
        return
    if grpo.num_generations < 2:
        yield (
            f"grpo.num_generations={grpo.num_generations} has no other completion to be compared "
            "with. Set grpo.num_generations=8, or objective=ppo."
        )
    if grpo.loss_type == "cispo" and grpo.epsilon_high is None:
        yield (
            "grpo.loss_type=cispo needs grpo.epsilon_high, which bounds the ratio itself. "
            "Set grpo.epsilon_high=5."
        )
    if grpo.staleness and grpo.importance_sampling_cap is None:
        yield (
            f"grpo.staleness={grpo.staleness} learns from what older weights have sampled, and "
            "grpo.importance_sampling_cap=null takes it for the policy's own. Set "
            "grpo.importance_sampling_cap=2."
        )
    if grpo.delta is not None:
        high = grpo.epsilon
        if grpo.epsilon_high is not None:
            high = grpo.epsilon_high
        if grpo.delta <= 1 + high:
            yield (
                f"grpo.delta={grpo.delta} must be above 1 + grpo.epsilon_high={1 + high:g}: a "
                f"lower one would clip before it does. Set grpo.delta={2 * (1 + high):g}, or null."
            )


def prompt_problems(objective: str, max_completion_length: int, data: DataConfig) -> Iterator[str]:
    """Batches that are no prompts one by one, and rows without room for a completion.

    Args:
        objective: that learns from completions.
        max_completion_length: tokens of a completion, at most.
        data: what the prompts are read by.
    """
    name = f"objective={objective}"
    section = "grpo"
    if objective == "distill":
        name = "distill.on_policy=true"
        section = "distill"
    if data.packing != "pad":
        yield (
            f"data.packing={data.packing} joins documents, and {name} reads prompts one by "
            "one. Set data.packing=pad."
        )
    if data.corruption.rate:
        yield (
            f"data.corruption.rate={data.corruption.rate} replaces tokens of inputs, and "
            f"{name} completes prompts as they are. Leave it out."
        )
    if data.attend_across_documents:
        yield (
            "data.attend_across_documents=True lets a completion see another one, and "
            f"{name} learns from each alone. Leave it out."
        )
    if max_completion_length >= data.seq_length:
        yield (
            f"{section}.max_completion_length={max_completion_length:,} leaves no room for a "
            f"prompt in rows of data.seq_length={data.seq_length:,}. Set "
            f"{section}.max_completion_length={max(1, data.seq_length // 2)}, or data.seq_length "
            "higher."
        )
