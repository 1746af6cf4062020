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


def scale_by_factors(factors: PyTree) -> optax.GradientTransformation:
    """Multiplies the update of each parameter by its factor; `factors` has a number where the parameters have a variable."""

    def scale(updates: PyTree, _: PyTree) -> PyTree:
        return jax.tree.map(lambda factor, update: jax.tree.map(lambda x: x * factor, update), factors, updates)

    return optax.stateless(scale)


def make_optimizer(
    config: OptimizerConfig, schedule: ScheduleConfig, num_steps: int, factors: PyTree | None = None
) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with decoupled weight decay, as one optax transformation.

    `factors` multiply the learning rate of each parameter, but not its decay (models.init.learning_rate_factors).
    """
    adamw = optax.chain(
        optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps),
        *([] if factors is None else [scale_by_factors(factors)]),
        optax.add_decayed_weights(config.weight_decay, mask=decay_mask),
        optax.scale_by_learning_rate(make_schedule(schedule, config.learning_rate, num_steps)),
    )
    return adamw if config.clip_norm is None else optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)
