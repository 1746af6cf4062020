"""Arrays of a layer that change without a gradient, such as the bias of a router."""

from collections.abc import Callable

from flax import nnx
from jaxtyping import Array

# (value, what was observed in the whole batch) -> value
Update = Callable[[Array, Array], Array]


class Buffer(nnx.Variable):
    """An array that a step updates from what its layer observed, and no gradient does.

    It is saved, restored and split over the mesh like a parameter. Evaluation and generation read
    it and leave it as it is, as does a step that is not applied.

    Args:
        value: of one layer.
        axes: the logical names of its dims.
        update: of one layer: from the value before the step, and the sum of what the layer said of
            it in `observed` over all micro-batches and devices, the value after it; of the same
            shape. A function of a module, so that two models are known to be alike.
    """

    def __init__(self, value: Array, *, axes: tuple[str | None, ...], update: Update):
        super().__init__(value, axes=axes, update=update)
