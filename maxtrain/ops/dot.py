"""The product of activations with a weight: what is rounded to which type, forward and backward.

Plain autodiff of `x.astype(bf16) @ w.astype(bf16)` rounds what it accumulates, and on CPUs leaves
the fast kernels. Here both operands are rounded once, each product accumulates in float32, and what
is kept for the backward pass is the rounded activation and the unrounded weight (which is alive
anyway). The forms of products that CPUs have kernels for are those of ops/einsum.py.

Every product of activations with a weight is a `dot`, but for those of the files below: nothing
else in maxtrain multiplies matrices (tests/test_architecture.py holds it to this list).

* `maxtrain/ops/einsum.py`: what `dot` is made of.
* `maxtrain/ops/quantized.py`: the weight is codes, which have no gradient, and are turned into
  numbers again in the backward pass.
* `maxtrain/ops/experts.py`: a weight for each group of rows, forward and backward; and what adds
  the bias of each row's expert in one order.
* `maxtrain/ops/cross_entropy.py`, `maxtrain/ops/divergence.py`, `maxtrain/ops/top_divergence.py`,
  `maxtrain/ops/log_probs.py`, `maxtrain/ops/head.py`: a loss over chunks of positions makes the
  gradients of the head chunk by chunk, before the backward pass. The logits are a `dot`.
* `maxtrain/ops/attention/`: both factors are activations.
* `maxtrain/models/mla.py`: keys and values stay in the cache as latents, so that the weight of
  each head is multiplied with its queries and its results instead. Nothing is differentiated.
* `maxtrain/models/lora_bank.py`: each row has a weight of its own, its adapter's. Nothing is
  differentiated.
* `maxtrain/models/lora.py`, `maxtrain/models/multi_lora.py`: both factors are weights, A and B
  of an adapter, whose product is added to a kernel.
* `maxtrain/models/expert_products.py`: sums what experts made, weighted by how much each was
  chosen.
* `maxtrain/parallel/hardware.py`: measures how fast this device multiplies.
* `maxtrain/commands/doctor/devices.py`: measures that for each device, and whether the products are
  right.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.ops.einsum import contract
from maxtrain.ops.names import PRODUCT, named


@dataclasses.dataclass(frozen=True)
class MatmulPrecision:
    """The types of one matrix product and of its backward pass.

    Args:
        inputs: type that activations and weights are rounded to before the product.
        gradient: type that the gradient of the result is rounded to before it is multiplied.
        result: type of the result of the product, which always accumulates in float32.
    """

    inputs: str
    gradient: str
    result: str = "float32"

    @classmethod
    def of(cls, dtype: str, result: str = "float32") -> "MatmulPrecision":
        """Return the precision in which all inputs are rounded to one type."""
        return cls(inputs=dtype, gradient=dtype, result=result)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def dot(
    x: Float[Array, "*b i"], w: Float[Array, "i o"], recipe: MatmulPrecision
) -> Float[Array, "*b o"]:
    """Return x @ w.

    Args:
        x: activations [..., I], any float type.
        w: weights [I, O], any float type.
        recipe: types of the product.

    Returns:
        [..., O] of the recipe's type.

    Differs: gradients are rounded before they are multiplied, and accumulate in float32.
    """
    out = contract("...i,io->...o", x.astype(recipe.inputs), w.astype(recipe.inputs))
    return out.astype(recipe.result)


def _forward(
    x: Array, w: Array, recipe: MatmulPrecision
) -> tuple[Array, tuple[Array, Array, Array]]:
    rounded = x.astype(recipe.inputs)
    out = contract("...i,io->...o", rounded, w.astype(recipe.inputs))
    out = named(out.astype(recipe.result), PRODUCT)
    like_x = jnp.zeros((), x.dtype)
    return out, (rounded, w, like_x)


def _backward(recipe: MatmulPrecision, saved: tuple, g: Array) -> tuple[Array, Array]:
    x, w, like_x = saved
    g = g.astype(recipe.gradient)
    batch = "abcdefgh"[: x.ndim - 1]
    # Both inputs of a product have one type: that of the gradient.
    dx = contract("...o,io->...i", g, w.astype(recipe.gradient))
    dw = contract(f"{batch}i,{batch}o->io", x.astype(recipe.gradient), g)
    return dx.astype(like_x.dtype), dw.astype(w.dtype)


dot.defvjp(_forward, _backward)
