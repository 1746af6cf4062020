"""Elementwise functions of arrays that are stored in a smaller type than the function computes
in."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def elementwise(
    function: Callable[..., Array], x: Float[Array, "*s"], *others: Any
) -> Float[Array, "..."]:
    """Return function(x, *others), rounded to the type of x.

    For float32, this is the function itself. Otherwise only the arguments are stored for the
    backward pass, which recomputes the function. So float32 intermediates are never stored.

    Args:
        function: a function of any float type that computes in float32.
        x: activations.
        others: arrays.
    """
    if x.dtype == jnp.float32:
        return function(x, *others)

    def rounded(*arguments: Array) -> Array:
        return function(*arguments).astype(x.dtype)

    return jax.checkpoint(rounded)(x, *others)
