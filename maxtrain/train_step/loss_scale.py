"""Loss scaling for float16, whose smallest numbers would underflow in the backward pass.

The scale multiplies the loss, and float32 gradients are divided by it. If anything overflows, the
step is skipped on all devices alike. After `hysteresis` overflows since the scale last grew or was
lowered, it is lowered; after `window` finite steps in a row it grows.

Source: Micikevicius et al., https://arxiv.org/abs/1710.03740, section 3.2; the hysteresis is from
    Megatron-LM.
"""

import dataclasses
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.config.schema import LossScaleConfig


class LossScale(NamedTuple):
    """The loss scale, and the counters that decide when it changes."""

    scale: Float[Array, ""]
    # Finite steps since the last overflow or growth.
    finite_in_row: Int[Array, ""]
    # Remaining overflows until the scale is lowered.
    patience: Int[Array, ""]


def resolve(config: LossScaleConfig, compute: str) -> LossScaleConfig | None:
    """Resolve the mode `auto`: dynamic for float16, whose smallest number is 6e-8, else none.

    Returns None if the loss is not scaled.
    """
    mode = config.mode
    if mode == "auto":
        mode = "dynamic" if compute == "float16" else "none"
    if mode == "none":
        return None
    return dataclasses.replace(config, mode=mode)


def initial(config: LossScaleConfig | None) -> LossScale | None:
    """Return the loss scale of a new run, for a resolved config."""
    if config is None:
        return None
    return LossScale(jnp.float32(config.initial), jnp.int32(0), jnp.int32(config.hysteresis))


def advance(state: LossScale, finite: Bool[Array, ""], config: LossScaleConfig) -> LossScale:
    """Return the loss scale after a step whose scaled gradients were all finite, or not."""
    if config.mode == "static":
        return state
    if config.mode != "dynamic":
        raise AssertionError(f"loss_scale.mode={config.mode} does not say how to advance")
    patience = jnp.where(finite, state.patience, jnp.maximum(state.patience - 1, 0))
    row = jnp.where(finite, state.finite_in_row + 1, 0)
    grow = row >= config.window
    lower = ~finite & (patience == 0)
    scale = jnp.where(grow, jnp.minimum(state.scale * config.factor, config.max), state.scale)
    scale = jnp.where(lower, jnp.maximum(scale * config.backoff, config.min), scale)
    return LossScale(scale, jnp.where(grow, 0, row), jnp.where(grow, config.hysteresis, patience))


def at_its_end(state: LossScale, config: LossScaleConfig) -> Bool[Array, ""]:
    """Return whether there is no lower scale to try."""
    return jnp.asarray(config.mode == "static") | (state.scale <= config.min)


def after_step(
    state: LossScale | None,
    finite: Bool[Array, ""],
    loss_finite: Bool[Array, ""],
    config: LossScaleConfig | None,
) -> tuple[LossScale | None, Bool[Array, ""]]:
    """Return the loss scale after a step, and whether the step is lost.

    A step is lost if it is not finite and a lower scale would not make it finite.
    """
    if state is None or config is None:
        return None, ~finite
    after = advance(state, finite, config)
    lost = ~finite & (at_its_end(state, config) | ~loss_finite)
    return after, lost
