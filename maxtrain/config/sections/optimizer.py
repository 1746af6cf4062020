"""The section `optimizer`, and what must hold inside it."""

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Literal

from data_pipeline.config_key import AllBut, UsedBy, key
from maxtrain.config.limits import as_float32


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Parameters that are updated in another way, chosen by their paths, such as
    `layers.0.attention.q.kernel`."""

    pattern: str = key(
        "",
        "regular expression, searched in the path of a parameter; "
        "no parameter may be in two groups",
    )
    lr_factor: float = key(
        1.0, "multiplies the learning rate; 0: left as they are", low=0, high=1e6
    )
    weight_decay: float | None = key(
        None, "of these, vectors too; null: as the rest", low=0, high=1e6
    )


WITH_BETAS = ("adamw", "adam", "lion", "muon")
_BETAS = UsedBy({"optimizer.name": WITH_BETAS})


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """How gradients become updates. The learning rate over the run is the section `schedule`."""

    name: Literal["adamw", "adam", "sgd", "momentum", "nesterov", "adafactor", "lion", "muon"] = (
        key(
            "adamw",
            "update rule; muon: of the layers' matrices, AdamW of the rest; see docs/numerics.md",
        )
    )
    learning_rate: float = key(3e-4, "peak", above=0)
    momentum: float = key(
        0.95,
        "decay of the sum or mean of gradients",
        low=0,
        used_by=UsedBy({"optimizer.name": ("momentum", "nesterov", "muon")}),
    )
    beta1: float = key(0.9, "decay of the mean of gradients", low=0, used_by=_BETAS)
    beta2: float = key(0.95, "decay of the mean of squared gradients", low=0, used_by=_BETAS)
    eps: float = key(
        1e-8,
        "added to the root of the second moment",
        above=0,
        high=1e6,
        used_by=UsedBy({"optimizer.name": ("adamw", "adam", "muon")}),
    )
    weight_decay: float = key(
        0.1,
        "of matrices, decoupled, or in the gradient for adam, sgd, momentum and nesterov",
        low=0,
        high=1e6,
    )
    no_decay: tuple[str, ...] = key(
        (), "regular expressions: no decay for parameters in whose path one is found"
    )
    groups: dict[str, GroupConfig] = key(
        {}, "parameters with rates of their own, by a name of yours"
    )
    clip_norm: float | None = key(
        1.0, "largest global norm of the gradient; null: no such clipping", above=0
    )
    clip_value: float | None = key(
        None, "largest size of each number of the gradient, before clip_norm; null: any", above=0
    )
    clip_adaptive: float | None = key(
        None,
        "largest norm of each output's gradient, relative to its weights' norm, "
        "before clip_norm; null: any",
        above=0,
    )
    accumulation: int = key(1, "micro-batches in one step; must divide data.batch_size", low=1)
    normalize: Literal["tokens", "sequences", "constant"] = key(
        "tokens",
        "what the loss is a mean of: all targets, documents whatever their length, or positions, "
        "targets or not",
    )
    ema_decay: float | None = key(
        None, "of an average of the weights, for evaluation and generation; null: none", above=0
    )
    stochastic_rounding: bool = key(
        False,
        "round updates up or down at random, right on average",
        used_by=UsedBy(
            {"precision.params": ("bfloat16",)},
            "{key}={value} is for bfloat16 weights, not {cause}. "
            "Set precision.params=bfloat16, or {key}=false.",
        ),
    )
    zero: int = key(
        0,
        "over mesh.data, split: 1 optimizer state, 2 gradients too, 3 parameters too",
        low=0,
        high=3,
        used_by=UsedBy(
            {"mesh.data": AllBut(1)},
            "{key}={value} splits over mesh.data, which is 1. "
            "Set mesh.data=-1 and mesh.fsdp=1, for example, or {key}=0.",
        ),
    )


_USUAL_DECAYS = {"beta1": 0.9, "beta2": 0.95, "momentum": 0.95, "ema_decay": 0.999}


def decay_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Decays that are 1 on a device: a mean would stay what it is."""
    for name, usual in _USUAL_DECAYS.items():
        value = getattr(optimizer, name)
        if value is not None and as_float32(value) >= 1:
            yield (
                f"optimizer.{name}={value} must be less than 1. "
                f"Set for example optimizer.{name}={usual}."
            )


def pattern_problem(key: str, pattern: str) -> Iterator[str]:
    """A regular expression that Python does not take, or that a later one will read otherwise."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
    except (re.error, FutureWarning, RecursionError, OverflowError) as error:
        said = str(error) or type(error).__name__
        yield (
            f"{key}={pattern} must be a regular expression, but: {said}. Set {key} to part of "
            "a path, such as attention, with special characters after a backslash."
        )


def group_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Groups that would choose all parameters."""
    for name, group in optimizer.groups.items():
        if not group.pattern:
            key = f"optimizer.groups.{name}.pattern"
            yield (
                f"{key} is empty, and would choose all parameters. "
                f"Set {key}=attention, for example, or =. for all parameters."
            )
