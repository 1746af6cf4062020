"""Element-wise mathematics of arrays that are stored in fewer bits than it is done in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def elementwise(
    function: Callable[..., Array], x: Float[Array, "*s"], *others: Any
) -> Float[Array, "..."]:
    """function(x, *others), rounded to the type of x.

    Where that is float32, this is the function itself. Otherwise the backward pass finds the
    arguments alone, as they are stored, and computes the function again: what is float32 inside
    the function is never kept for it.

    Args:
        function: takes any float type, computes in float32.
        x: activations.
        others: arrays.
    """
    if x.dtype == jnp.float32:
        return function(x, *others)

    def rounded(*arguments: Array) -> Array:
        return function(*arguments).astype(x.dtype)

    return jax.checkpoint(rounded)(x, *others)
