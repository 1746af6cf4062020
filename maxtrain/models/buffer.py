"""Buffers: arrays of a layer that change without a gradient, such as the bias of a router."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

# (value, observation of the whole batch) -> value
Update = Callable[[Array, Array], Array]


class Buffer(nnx.Variable):
    """An array that a step updates from observations of its layer, without a gradient.

    It is saved, restored and sharded like a parameter. Evaluation, generation and steps that are
    not applied leave it unchanged.

    Args:
        value: the value of one layer.
        axes: the logical axes.
        update: maps the value of one layer before the step, and the sum of the layer's observation
            over all micro-batches and devices, to the new value of the same shape. It must be
            comparable, such as a function of a module, so that equal models are recognised.
    """

    def __init__(self, value: Array, *, axes: tuple[str | None, ...], update: Update):
        super().__init__(value, axes=axes, update=update)
