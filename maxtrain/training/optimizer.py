"""AdamW from optax and the learning-rate schedule, whose horizon is the plan's number of steps."""

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from maxtrain.config.schema import OptimizerConfig


def make_schedule(config: OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Learning rate of the update with index 0 ... num_steps - 1.

    Warm-up goes in equal parts from peak / warmup_steps to the peak. `cosine` then falls to min_learning_rate, reached
    with the last update; `wsd` stays at the peak and falls linearly over the last decay_fraction of the run.
    """
    peak, low, warmup = config.learning_rate, config.min_learning_rate, min(config.warmup_steps, num_steps)
    if config.schedule == "cosine":
        pieces = [optax.cosine_decay_schedule(peak, max(1, num_steps - warmup - 1), alpha=low / peak)]
    elif config.schedule == "wsd":
        decay = min(round(config.decay_fraction * num_steps), num_steps - warmup)
        stable = num_steps - warmup - decay
        down = optax.linear_schedule(peak, low, max(1, decay - 1))
        pieces = [optax.join_schedules([optax.constant_schedule(peak), down], [stable])]
    else:
        pieces = [optax.constant_schedule(peak)]
    if warmup:
        pieces.insert(0, optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)))
    return optax.join_schedules(pieces, [warmup] if warmup else [])


def decay_mask(params: PyTree) -> PyTree:
    """True for matrices; scales and other vectors are not decayed. Stacking over layers does not make a matrix."""
    return jax.tree.map(lambda v: len(v.get_metadata("axes")) > 1, params, is_leaf=lambda v: isinstance(v, nnx.Variable))


def make_optimizer(config: OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decoupled weight decay, as one optax transformation."""
    adamw = optax.adamw(
        make_schedule(config, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
