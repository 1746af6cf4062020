"""Numbers of a step that no sum over layers gives, such as the load of the busiest expert: they are
made of what layers observed in the whole batch, once it is known."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.quantity import Metric


class Summary(NamedTuple):
    """What is made of one thing that layers observe.

    Attributes:
        name: that it is observed by, in the block's `observed`.
        dims: of what one layer observes.
        quantities: the numbers that are made.
        function: from what all layers observed, [layers, ...], to these numbers, in their order.
    """

    name: str
    dims: int
    quantities: tuple[Metric, ...]
    function: Callable[[Array], Sequence[Array]]


class SummaryResult(NamedTuple):
    """Numbers by name, and what else was observed: that is for buffers."""

    numbers: dict[str, Array]
    of_buffers: dict[str, Array]


def summarise(summaries: Sequence[Summary], observed: Mapping[str, Array]) -> SummaryResult:
    """The numbers of these summaries.

    Args:
        summaries: of the layers.
        observed: by path; [R, ...] for a place in the period.
    """
    rest = dict(observed)
    numbers = {}
    for summary in summaries:
        found = []
        for path, array in observed.items():
            if path.rpartition(".")[2] != summary.name:
                continue
            del rest[path]
            # A layer of the prefix or of the rest has no leading dim.
            found.append(array.reshape(-1, *array.shape[array.ndim - summary.dims :]))
        values = summary.function(jnp.concatenate(found))
        for quantity, value in zip(summary.quantities, values, strict=True):
            numbers[quantity.name] = value
    return SummaryResult(numbers, rest)
