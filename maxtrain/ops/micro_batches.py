"""A batch in micro-batches, whose rows stay on their devices."""

from typing import Any

import jax
from jaxtyping import Array, PyTree

from maxtrain.parallel.sharding import constrain


def micro_batches(batch: Any, count: int) -> Any:
    """The micro-batches of arrays [B, ...], each [count, B // count, ...]; `whole_batch` puts them
    together again. Row r goes to micro-batch r mod count, so that no row leaves its device."""

    def split(x: Array) -> Array:
        x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "activation_batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)


def whole_batch(micros: PyTree) -> PyTree:
    """What `micro_batches` has split."""

    def join(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(join, micros)
