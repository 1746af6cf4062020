"""Numbers of a step that no sum over layers gives, such as the load of the busiest expert: they are
computed from the observations of all layers in the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.quantity import Metric


class Summary(NamedTuple):
    """The numbers that are computed from one observation of the layers.

    Attributes:
        name: name of the observation in the block's `buffer_inputs`.
        dims: number of dims of the observation of one layer.
        quantities: the resulting metrics.
        function: computes these metrics, in their order, from the observations of all layers,
            [layers, ...].
    """

    name: str
    dims: int
    quantities: tuple[Metric, ...]
    function: Callable[[Array], Sequence[Array]]


class SummaryResult(NamedTuple):
    """The numbers by name, and the remaining observations, which are for buffers."""

    numbers: dict[str, Array]
    of_buffers: dict[str, Array]


def summarise(summaries: Sequence[Summary], observed: Mapping[str, Array]) -> SummaryResult:
    """Return the numbers of these summaries.

    Args:
        summaries: the summaries of the layers.
        observed: observations by path; [R, ...] for a place in the period.
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
