"""The section `ppo`: what PPO has beside the completions and rewards of section `grpo`."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AllBut, UsedBy, key

_PPO = UsedBy(
    {"objective": ("ppo",)},
    "{key}={value} is not used with {cause}. Set objective=ppo, or leave it out.",
)
_WITH_DIVERGENCE = UsedBy({"ppo.kl_coef": AllBut(0.0)})


@dataclasses.dataclass(frozen=True)
class PpoConfig:
    """How a model learns from rewards of its own completions with a value of each token."""

    kl_coef: float = key(
        0.05,
        "what the divergence of each token from the reference costs of its reward",
        low=0,
        high=1000,
        used_by=_PPO,
    )
    kl_estimator: Literal["k1", "k3"] = key(
        "k1",
        "the divergence of a token: k1: policy - reference, in log-probabilities; k3: never below "
        "0",
        used_by=(_PPO, _WITH_DIVERGENCE),
    )
    reference: str | None = key(
        None,
        "reference: a run or a Hugging Face directory, also by URL; null: the model without its "
        "adapters, or checkpoint.init_from",
        path="any",
        used_by=(_PPO, _WITH_DIVERGENCE),
    )
    gamma: float = key(1.0, "discount of rewards from token to token", low=0, high=1, used_by=_PPO)
    lambda_: float = key(
        0.95,
        "of advantages: 0: one token ahead, by the value there; 1: all rewards that follow",
        low=0,
        high=1,
        used_by=_PPO,
    )
    whiten_advantages: bool = key(
        True, "advantages of all tokens of a rollout have mean 0 and deviation 1", used_by=_PPO
    )
    cliprange: float = key(
        0.2, "ratios beyond 1 +- cliprange are clipped", above=0, high=1, used_by=_PPO
    )
    cliprange_value: float = key(
        0.2, "values further than this from those of the rollout are clipped", above=0, used_by=_PPO
    )
    vf_coef: float = key(0.1, "weight of the loss of values", above=0, high=1000, used_by=_PPO)
    missing_eos_penalty: float | None = key(
        None,
        "what a completion that was cut loses of its reward; null: nothing",
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
