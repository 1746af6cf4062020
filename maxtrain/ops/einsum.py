"""Matrix products with low-precision inputs and float32 accumulation, in the forward and in the backward pass.

Plain autodiff of `einsum(x.astype(bf16), w.astype(bf16))` rounds what it accumulates, and on CPUs leaves the fast kernels.
Here both operands are rounded once, each product accumulates and returns float32, and what is kept for the backward pass
is the rounded activation and the unrounded weight (which is alive anyway).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def contract(spec: str, a: Array, b: Array) -> Array:
    """einsum accumulated and returned in float32; float32 inputs are multiplied exactly (no TF32 or bf16 passes)."""
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jnp.einsum(spec, a, b, precision=precision, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(x: Float[Array, "*b i"], w: Float[Array, "i o"], dtype: str) -> Float[Array, "*b o"]:
    """x @ w.

    Args:
        x: activations [..., I], any float type.
        w: weights [I, O], any float type.
        dtype: "float32" or "bfloat16", the type that both are rounded to before they are multiplied.

    Returns:
        [..., O] float32.

    Differs: gradients are rounded to `dtype` before they are multiplied, and accumulate in float32. The leading dims of
    x are never flattened: flattening halves the speed of the weight gradient on CPUs.
    """
    return contract("...i,io->...o", x.astype(dtype), w.astype(dtype))


def _matmul_forward(x: Array, w: Array, dtype: str) -> tuple[Array, tuple[Array, Array, Array]]:
    rounded = x.astype(dtype)
    return contract("...i,io->...o", rounded, w.astype(dtype)), (rounded, w, jnp.zeros((), x.dtype))


def _matmul_backward(dtype: str, saved: tuple, g: Array) -> tuple[Array, Array]:
    x, w, like_x = saved
    g = g.astype(dtype)
    batch = "abcdefgh"[: x.ndim - 1]
    dx = contract("...o,io->...i", g, w.astype(dtype))
    dw = contract(f"{batch}i,{batch}o->io", x, g)
    return dx.astype(like_x.dtype), dw.astype(w.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)
