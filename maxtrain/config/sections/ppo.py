"""The section `ppo`: what PPO has beside the completions and rewards of section `grpo`."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key

_PPO = UsedBy(
    {"objective": ("ppo",)},
    "{key}={value} is not used with {cause}. Set objective=ppo, or leave it out.",
)
_WITH_DIVERGENCE = UsedBy({"ppo.kl_coef": AnyValueExcept(0.0)})


@dataclasses.dataclass(frozen=True)
class PpoConfig:
    """PPO: training on rewards of the model's own completions, with a value of each token."""

    kl_coef: float = key(
        0.05,
        "weight of the KL penalty that is subtracted from the reward of each token",
        low=0,
        high=1000,
        used_by=_PPO,
    )
    kl_estimator: Literal["k1", "k3"] = key(
        "k1",
        "estimator of the KL penalty: k1: difference of log-probabilities; k3: the estimator "
        "that is never negative",
        used_by=(_PPO, _WITH_DIVERGENCE),
    )
    reference: str | None = key(
        None,
        "reference model: a run or a Hugging Face directory, also a URL; null: the model "
        "without its adapters, or else its weights at the start",
        path="any",
        used_by=(_PPO, _WITH_DIVERGENCE),
    )
    gamma: float = key(1.0, "discount factor from token to token", low=0, high=1, used_by=_PPO)
    lambda_: float = key(
        0.95,
        "lambda of generalized advantage estimation; 0: one token ahead, by the value there; "
        "1: all rewards that follow",
        low=0,
        high=1,
        used_by=_PPO,
    )
    whiten_advantages: bool = key(
        True, "whiten advantages: mean 0 and deviation 1 over all tokens of a rollout", used_by=_PPO
    )
    cliprange: float = key(
        0.2,
        "clip range: probability ratios outside 1 +- cliprange are clipped",
        above=0,
        high=1,
        used_by=_PPO,
    )
    cliprange_value: float = key(
        0.2,
        "value clip range: largest change of a value from the rollout's value",
        above=0,
        used_by=_PPO,
    )
    vf_coef: float = key(0.1, "weight of the value loss", above=0, high=1000, used_by=_PPO)
    missing_eos_penalty: float | None = key(
        None,
        "reward that a truncated completion loses; null: none",
        low=0,
        used_by=_PPO,
    )


def value_problems(objective: str, has_value: bool) -> Iterator[str]:
    """PPO without a value."""
    if objective == "ppo" and not has_value:
        yield (
            "objective=ppo trains a value of each token, and the model has none with "
            "model.value=False. Set model.value=true."
        )
