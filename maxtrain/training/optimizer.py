"""AdamW from optax."""

import jax
import optax
from flax import nnx
from jaxtyping import PyTree

from maxtrain.config.schema import OptimizerConfig, ScheduleConfig
from maxtrain.training.schedule import make_schedule


def decay_mask(params: PyTree) -> PyTree:
    """True for matrices; scales and other vectors are not decayed. Stacking over layers does not make a matrix."""
    return jax.tree.map(lambda v: len(v.get_metadata("axes")) > 1, params, is_leaf=lambda v: isinstance(v, nnx.Variable))


def make_optimizer(config: OptimizerConfig, schedule: ScheduleConfig, num_steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decoupled weight decay, as one optax transformation."""
    adamw = optax.adamw(
        make_schedule(schedule, config.learning_rate, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=decay_mask,
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
