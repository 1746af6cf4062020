"""Checks that arrays are finite, on their devices."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from maxtrain.ops.digest import compiler_options, leaf_names
from maxtrain.parallel.host_memory import by_layer, lies_in_layers, on_device
from maxtrain.parallel.sharding import constrain


def finite_leaves(tree: PyTree[Array]) -> Bool[Array, " leaves"]:
    """Return for each leaf whether all its numbers are finite; integers always are. Call it inside
    jit.

    Zero times a finite number is zero, and NaN for NaN and infinity, so the sum of these is finite
    or NaN. A sum is one vectorised pass over memory, and keeps NaN when it is reduced over devices.
    A maximum over devices may drop NaN, depending on which device comes first.
    """
    leaves = jax.tree.leaves(tree)
    if not leaves:
        return jnp.ones(0, bool)
    return jnp.stack([_is_finite(leaf) for leaf in leaves])


def _is_finite(x: Array) -> Bool[Array, ""]:
    if not jnp.issubdtype(x.dtype, jnp.inexact) or x.size == 0:
        return jnp.ones((), bool)
    return jnp.isfinite((x * 0).sum())


def begin_finite(tree: PyTree[Array]) -> Bool[Array, " leaves"]:
    """Start `finite_leaves` for arrays outside of jit: on the device, without waiting for it; the
    result is replicated."""
    leaves = jax.tree.leaves(tree)
    return _program_for(leaves)(leaves)


def compiler_of_finite(tree: PyTree[jax.ShapeDtypeStruct]) -> Callable[[], object]:
    """Return a function that compiles the program of `begin_finite` for arrays of these shapes and
    shardings, in any thread, so that a later call finds it."""
    leaves = jax.tree.leaves(tree)
    return _program_for(leaves).lower(leaves).compile


def non_finite_names(tree: PyTree[Array]) -> list[str]:
    """Return names of the leaves that hold NaN or infinity, such as
    `params.layers.0.mlp.up.kernel`; waits for the device."""
    found = jax.device_get(begin_finite(tree)).tolist()
    return [name for name, finite in zip(leaf_names(tree), found, strict=True) if not finite]


# The exponent bits of these types, which are all set in infinity and NaN.
_EXPONENTS = {
    "float64": 0x7FF0000000000000,
    "float32": 0x7F800000,
    "bfloat16": 0x7F80,
    "float16": 0x7C00,
}


def _is_finite_at_rest(x: Array) -> Bool[Array, ""]:
    """Compute `_is_finite` without memory. For a sum over several arrays of one shape, XLA's CPU
    backend would write the products to memory. A maximum of integers drops nothing."""
    mask = _EXPONENTS.get(str(x.dtype))
    if mask is None or x.size == 0:
        return _is_finite(x)
    words = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    exponents = jax.lax.bitcast_convert_type(x, words) & jnp.asarray(mask, words)
    # All dims but the last one are reduced first, as vectors.
    rows = tuple(range(x.ndim - 1))
    return exponents.max(rows).max() != jnp.asarray(mask, words)


def _program_for(leaves: list[Any]) -> jax.stages.Wrapped:
    return _program(jax.default_backend(), tuple(map(lies_in_layers, leaves)))


@functools.cache
def _program(platform: str, in_layers: tuple[bool, ...]) -> jax.stages.Wrapped:
    def is_finite(leaf: Array, in_layers: bool) -> Array:
        if in_layers:
            return by_layer(_is_finite_at_rest, leaf).all()
        return _is_finite_at_rest(on_device(leaf))

    def of_all(leaves: list[Array]) -> Array:
        return constrain(jnp.stack(list(map(is_finite, leaves, in_layers))), None)

    return jax.jit(of_all, compiler_options=compiler_options(platform))
