"""Norm modules, and which of them a layer has."""

import functools

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from maxtrain.models.init import Initializer, Role
from maxtrain.models.specs import LayerSpec, NormSpec
from maxtrain.ops.norm import layer_norm, rms_norm
from maxtrain.ops.recompute import elementwise


class Norm(nnx.Module):
    """A norm with a learned scale, and an optional bias, in the type of its input; see ops.norm."""

    def __init__(self, size: int, spec: NormSpec, init: Initializer, role: Role = "norm"):
        self.scale = init.scale(size, role, spec.offset)
        # Assigned once, because an attribute that is None first is not registered as a parameter.
        bias = None
        if spec.kind == "layer":
            bias = init.bias((size,), ("norm",), role)
        self.bias = bias
        self.spec = spec

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = self.scale[...]
        if self.spec.offset:
            # The sum is float32, so that 1 plus a small scale is not rounded to 1.
            scale = self.spec.offset + scale.astype(jnp.float32)
        if self.bias is None:
            norm = functools.partial(rms_norm, eps=self.spec.eps)
            return elementwise(norm, x, scale)
        norm = functools.partial(layer_norm, eps=self.spec.eps)
        return elementwise(norm, x, scale, self.bias[...])


def norm_of(
    spec: LayerSpec, what: str, size: int, init: Initializer, role: Role = "norm"
) -> Norm | None:
    """Create the norm of one thing in a layer, if its spec has one."""
    if what not in spec.norms:
        return None
    return Norm(size, spec.norm, init, role)


def head_norm(
    spec: LayerSpec, one: str, whole: str, num_heads: int, init: Initializer, role: Role = "norm"
) -> Norm | None:
    """Create the norm of each head, or of all heads of a token as one, if the layer's spec has
    one."""
    size = spec.mixer.head_dim
    if whole in spec.norms:
        return norm_of(spec, whole, num_heads * size, init, role)
    return norm_of(spec, one, size, init, role)


def normalised(norm: Norm | None, heads: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Normalise each head, or all heads of a token as one, according to the size of the norm."""
    if norm is None:
        return heads
    if norm.scale.shape[-1] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
