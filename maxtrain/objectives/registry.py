"""Registry of objectives by their names in the config."""

from collections.abc import Callable
from typing import NamedTuple

from maxtrain.config.schema import (
    DistillConfig,
    DpoConfig,
    GrpoConfig,
    LossConfig,
    PpoConfig,
    RegularizationConfig,
    RewardConfig,
)
from maxtrain.config.sections.dpo import UNPAIRED
from maxtrain.objectives.adversarial import adversarial
from maxtrain.objectives.distill import distill
from maxtrain.objectives.distill_stored import distill_stored
from maxtrain.objectives.dpo import dpo
from maxtrain.objectives.grpo import grpo
from maxtrain.objectives.kto import kto
from maxtrain.objectives.next_token import next_token
from maxtrain.objectives.objective import Objective
from maxtrain.objectives.on_policy import on_policy
from maxtrain.objectives.ppo import ppo
from maxtrain.objectives.reward import reward


class ObjectiveSettings(NamedTuple):
    """The config sections that objectives are built from; each uses what it needs."""

    loss: LossConfig
    distill: DistillConfig
    dpo: DpoConfig
    reward: RewardConfig
    grpo: GrpoConfig
    ppo: PpoConfig
    regularization: RegularizationConfig
    # As for `next_token`.
    normalize: str
    num_sources: int
    # As for `grpo`.
    is_exact: bool = False
    # As for `reward`.
    has_end_marks: bool = True


def _next_token(settings: ObjectiveSettings) -> Objective:
    return next_token(
        settings.loss, settings.normalize, settings.num_sources, settings.regularization
    )


def _distill(settings: ObjectiveSettings) -> Objective:
    if settings.distill.on_policy:
        return on_policy(
            settings.distill.temperature,
            settings.distill.kind,
            settings.normalize,
            settings.regularization,
            settings.distill.beta,
        )
    if settings.distill.stored is not None:
        return distill_stored(
            settings.distill,
            settings.loss,
            settings.normalize,
            settings.num_sources,
            settings.regularization,
        )
    return distill(
        settings.distill.temperature,
        settings.distill.weight,
        settings.distill.kind,
        settings.loss,
        settings.normalize,
        settings.num_sources,
        settings.regularization,
        settings.distill.beta,
    )


def _dpo(settings: ObjectiveSettings) -> Objective:
    if settings.dpo.loss_type in UNPAIRED:
        return kto(settings.dpo, settings.regularization)
    return dpo(settings.dpo, settings.regularization)


def _reward(settings: ObjectiveSettings) -> Objective:
    return reward(settings.reward, settings.regularization, settings.has_end_marks)


def _grpo(settings: ObjectiveSettings) -> Objective:
    return grpo(settings.grpo, settings.regularization, settings.is_exact)


def _ppo(settings: ObjectiveSettings) -> Objective:
    return ppo(settings.ppo, settings.grpo.temperature, settings.regularization, settings.is_exact)


OBJECTIVES: dict[str, Callable[[ObjectiveSettings], Objective]] = {
    "next_token": _next_token,
    "distill": _distill,
    "dpo": _dpo,
    "reward": _reward,
    "grpo": _grpo,
    "ppo": _ppo,
}


def make_objective(name: str, settings: ObjectiveSettings) -> Objective:
    """Build the objective of this name, with adversarial training if the config says so."""
    objective = OBJECTIVES[name](settings)
    if settings.loss.adversarial:
        return adversarial(objective, settings.loss)
    return objective
