"""The section `optimizer`, and what must hold inside it."""

import dataclasses
import re
import warnings
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from maxtrain.config.limits import as_float32
from maxtrain.config.sections.loss import OF_NEXT_TOKEN


@dataclasses.dataclass(frozen=True)
class GroupConfig:
    """Parameters with other settings, selected by their paths, such as
    `layers.0.attention.q.kernel`."""

    pattern: str = key(
        "",
        "regular expression, searched in the path of a parameter; "
        "no parameter may be in two groups",
    )
    lr_factor: float = key(
        1.0, "factor of the learning rate; 0: these parameters do not change", low=0, high=1e6
    )
    weight_decay: float | None = key(
        None, "weight decay of this group, also for vectors; null: like the rest", low=0, high=1e6
    )


# They change each number by itself.
BY_NUMBER = ("adamw", "adam", "momentum", "nesterov", "lion")
WITH_BETAS = ("adamw", "adam", "lion", "muon")
_BETAS = UsedBy({"optimizer.name": WITH_BETAS})


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Update rule for gradients. The learning rate over the run is the section `schedule`."""

    name: Literal["adamw", "adam", "sgd", "momentum", "nesterov", "adafactor", "lion", "muon"] = (
        key(
            "adamw",
            "update rule; muon: for the matrices of layers, with AdamW for the rest; see "
            "docs/numerics.md",
        )
    )
    learning_rate: float = key(3e-4, "peak learning rate", above=0)
    momentum: float = key(
        0.95,
        "momentum: decay of the sum or mean of gradients",
        low=0,
        used_by=UsedBy({"optimizer.name": ("momentum", "nesterov", "muon")}),
    )
    beta1: float = key(0.9, "decay of the mean of gradients", low=0, used_by=_BETAS)
    beta2: float = key(0.95, "decay of the mean of squared gradients", low=0, used_by=_BETAS)
    eps: float = key(
        1e-8,
        "added to the root of the second moment (epsilon)",
        above=0,
        high=1e6,
        used_by=UsedBy({"optimizer.name": ("adamw", "adam", "muon")}),
    )
    weight_decay: float = key(
        0.1,
        "weight decay of matrices; decoupled, except for adam, sgd, momentum and nesterov, "
        "where it is part of the gradient",
        low=0,
        high=1e6,
    )
    no_decay: tuple[str, ...] = key(
        (), "regular expressions: parameters whose path contains a match have no weight decay"
    )
    groups: dict[str, GroupConfig] = key(
        {}, "groups of parameters with their own settings, by a name that you choose"
    )
    clip_norm: float | None = key(
        1.0, "clip the global norm of the gradient to this; null: no clipping", above=0
    )
    clip_value: float | None = key(
        None,
        "clip each element of the gradient to this, before clip_norm; null: no clipping",
        above=0,
    )
    clip_adaptive: float | None = key(
        None,
        "adaptive clipping: clip the norm of each output's gradient to this times the norm of"
        " its weights, before clip_norm; null: none",
        above=0,
    )
    accumulation: int | Literal["auto"] = key(
        1,
        "gradient accumulation: micro-batches in one step; must divide data.batch_size; auto:"
        " the fewest that fit into memory",
        low=1,
    )
    normalize: Literal["tokens", "sequences", "constant"] = key(
        "tokens",
        "divisor of the loss: tokens: number of targets; sequences: each document has the "
        "same weight; constant: all positions, with or without a target",
        used_by=OF_NEXT_TOKEN,
    )
    ema_decay: float | None = key(
        None,
        "decay of the moving average of the weights (EMA), which evaluation and generation "
        "use; null: no average",
        above=0,
    )
    stochastic_rounding: bool = key(
        False,
        "stochastic rounding: round updates up or down at random, so that they are right on "
        "average",
        used_by=UsedBy(
            {"precision.params": ("bfloat16",)},
            "{key}={value} is for bfloat16 weights, not {cause}. "
            "Set precision.params=bfloat16, or {key}=false.",
        ),
    )
    zero: int = key(
        0,
        "ZeRO stage over mesh.data: 0: none; 1: shards the optimizer state; 2: gradients too;"
        " 3: parameters too",
        low=0,
        high=3,
        used_by=UsedBy(
            {
                "mesh.data": AnyValueExcept(1),
                "mesh.dcn_data": AnyValueExcept(1),
                "mesh.preset": ("hsdp",),
            },
            "{key}={value} splits over mesh.data, which is 1. "
            "Set mesh.data=-1 and mesh.fsdp=1, for example, or {key}=0.",
            cause="mesh.data={config.mesh.data}",
        ),
    )
    on_host: bool = key(
        False,
        "keep the optimizer state and EMA in host memory; devices fetch it layer by layer",
        used_by=UsedBy({"optimizer.name": BY_NUMBER}),
    )

    @property
    def micro_batches(self) -> int:
        """accumulation, where it is a number by now: of a launch, or of a config without auto."""
        assert self.accumulation != "auto", "accumulation=auto has not been decided yet"
        return self.accumulation

    @property
    def least_micro_batches(self) -> int:
        """accumulation, or what it is at least: auto has yet to be decided."""
        if self.accumulation == "auto":
            return 1
        return self.accumulation


_USUAL_DECAYS = {"beta1": 0.9, "beta2": 0.95, "momentum": 0.95, "ema_decay": 0.999}


def decay_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Decays that round to 1 in float32: a mean would never change."""
    for name, usual in _USUAL_DECAYS.items():
        value = getattr(optimizer, name)
        if value is not None and as_float32(value) >= 1:
            yield (
                f"optimizer.{name}={value} must be less than 1. "
                f"Set for example optimizer.{name}={usual}."
            )


def pattern_problem(key: str, pattern: str) -> Iterator[str]:
    """A regular expression that Python refuses, or that a later Python will read differently."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", FutureWarning)
            re.compile(pattern)
    except (re.error, FutureWarning, RecursionError, OverflowError) as error:
        message = str(error) or type(error).__name__
        yield (
            f"{key}={pattern} must be a regular expression, but: {message}. Set {key} to part of "
            "a path, such as attention, with special characters after a backslash."
        )


def group_problems(optimizer: OptimizerConfig) -> Iterator[str]:
    """Groups without a pattern, which would select all parameters."""
    for name, group in optimizer.groups.items():
        if not group.pattern:
            key = f"optimizer.groups.{name}.pattern"
            yield (
                f"{key} is empty, and would select all parameters. "
                f"Set {key}=attention, for example, or =. for all parameters."
            )
