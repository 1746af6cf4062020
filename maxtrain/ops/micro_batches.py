"""Micro-batches of a batch, whose rows stay on their devices."""

from typing import Any

import jax
from jaxtyping import Array, PyTree

from maxtrain.parallel.sharding import constrain


def micro_batches(batch: Any, count: int) -> Any:
    """Split arrays [B, ...] into micro-batches, [count, B // count, ...] each; `whole_batch` joins
    them again. Row r goes to micro-batch r mod count, so that no row leaves its device."""

    def split(x: Array) -> Array:
        x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return constrain(x, None, "activation_batch", *(None,) * (x.ndim - 2))

    return jax.tree.map(split, batch)


def whole_batch(micros: PyTree) -> PyTree:
    """Undo `micro_batches`."""

    def join(x: Array) -> Array:
        return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

    return jax.tree.map(join, micros)
