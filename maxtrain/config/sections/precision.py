"""The sections `precision` and `loss_scale`."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key


@dataclasses.dataclass(frozen=True)
class PrecisionConfig:
    """Number formats. Norms, softmax, rope and the loss are always float32."""

    params: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of master weights and optimizer state"
    )
    compute: Literal["float32", "bfloat16", "float16"] = key(
        "bfloat16", "dtype of the inputs of matrix products, which accumulate in float32"
    )
    activations: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of stored activations: the residual stream and the results of products"
    )
    accumulate: Literal["float32", "bfloat16"] = key(
        "float32", "dtype in which gradients of micro-batches are accumulated"
    )
    output: Literal["float32", "bfloat16"] = key(
        "float32", "dtype of the logits before the softmax"
    )


def activation_problems(precision: PrecisionConfig) -> Iterator[str]:
    """Activations in bfloat16 with products of another type."""
    if precision.activations == "bfloat16" and precision.compute != "bfloat16":
        yield (
            f"precision.activations=bfloat16 rounds the inputs of products to bfloat16, but "
            f"precision.compute={precision.compute}. "
            "Set precision.compute=bfloat16, or precision.activations=float32."
        )


_NOT_SCALED = (
    "{key}={number:g} is not used by {cause}. Set loss_scale.mode=dynamic, or leave it out."
)
_MODE = "loss_scale.mode={config.loss_scale.mode} with precision.compute={config.precision.compute}"
_SCALED = UsedBy({"loss_scale.mode": ("auto", "static", "dynamic")}, _NOT_SCALED, _MODE)
_DYNAMIC = UsedBy({"loss_scale.mode": ("auto", "dynamic")}, _NOT_SCALED, _MODE)
# The mode auto scales for float16 alone.
_AUTO_SCALED = UsedBy(
    {"loss_scale.mode": AnyValueExcept("auto"), "precision.compute": ("float16",)},
    _NOT_SCALED,
    _MODE,
    help="precision.compute=float16 if it is auto",
)


@dataclasses.dataclass(frozen=True)
class LossScaleConfig:
    """Loss scaling, which keeps small gradients from underflow in float16."""

    mode: Literal["auto", "none", "static", "dynamic"] = key(
        "auto", "loss scaling; auto: dynamic if precision.compute=float16, else none"
    )
    initial: float = key(
        2.0**16,
        "loss scale of the first step, and of every step if static",
        above=0,
        used_by=(_SCALED, _AUTO_SCALED),
    )
    window: int = key(
        1000,
        "finite steps in a row after which the scale grows",
        low=1,
        used_by=(_DYNAMIC, _AUTO_SCALED),
    )
    factor: float = key(
        2.0, "factor by which the scale grows", above=1, used_by=(_DYNAMIC, _AUTO_SCALED)
    )
    backoff: float = key(
        0.5,
        "factor by which the scale is multiplied after overflows",
        above=0,
        used_by=(_DYNAMIC, _AUTO_SCALED),
    )
    hysteresis: int = key(
        2,
        "overflows after which the scale is lowered, counted since it last grew",
        low=1,
        used_by=(_DYNAMIC, _AUTO_SCALED),
    )
    min: float = key(1.0, "smallest loss scale", above=0, used_by=(_DYNAMIC, _AUTO_SCALED))
    max: float = key(2.0**32, "largest loss scale", above=0, used_by=(_DYNAMIC, _AUTO_SCALED))


def loss_scale_problems(loss_scale: LossScaleConfig, compute: str) -> Iterator[str]:
    """A dynamic scale that starts outside its own limits, or that never gets lower.

    Args:
        loss_scale: the section.
        compute: precision.compute, on which the mode auto depends.
    """
    mode = loss_scale.mode
    if mode == "auto" and compute == "float16":
        mode = "dynamic"
    if mode != "dynamic":
        return
    if not loss_scale.min <= loss_scale.initial <= loss_scale.max:
        yield (
            f"loss_scale.initial={loss_scale.initial:g} must be between "
            f"loss_scale.min={loss_scale.min:g} and loss_scale.max={loss_scale.max:g}. "
            "Set it in between, or loss_scale.mode=static."
        )
    if loss_scale.backoff >= 1:
        yield (
            f"loss_scale.backoff={loss_scale.backoff:g} must be less than 1. "
            "Set for example loss_scale.backoff=0.5."
        )
