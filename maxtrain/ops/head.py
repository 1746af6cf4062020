"""The output matrix in a loss over chunks of tokens, of which each device has some.

A device gathers the matrix once, for all chunks, and adds up the gradient of its own tokens; what
devices have is summed once, behind the last chunk. XLA, left alone, does both for each chunk.
Memory: a device has the whole gradient, float32, of its part of the vocabulary.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from maxtrain.ops.einsum import contract
from maxtrain.parallel.sharding import LENGTH, batch_shards, constrain, length_shards


def gathered(head: Float[Array, "D V"], dtype: DTypeLike) -> Float[Array, "D V"]:
    """The matrix as products take it: rounded to their type, and whole but for the vocabulary."""
    return constrain(head.astype(dtype), None, "vocab")


class HeadGradient(NamedTuple):
    """The gradient of an output matrix while it is added up.

    Attributes:
        parts: that of the tokens of each device, float32; R and C are the parts that rows and
            their columns are split into.
    """

    parts: Float[Array, "R C D V"]

    @classmethod
    def nothing(cls, head: Float[Array, "D V"]) -> "HeadGradient":
        """Of no token."""
        shape = (batch_shards(), length_shards(), *head.shape)
        return cls(_placed(jnp.zeros(shape, jnp.float32)))

    def add(self, x: Float[Array, "B T D"], dlogits: Float[Array, "B T V"]) -> "HeadGradient":
        """With that of more tokens.

        Args:
            x: hidden states, of the type of products.
            dlogits: the gradient by their logits, of the same type.
        """
        R, C, D, V = self.parts.shape
        if R == C == 1:
            own = contract("btd,btv->dv", x, dlogits)
        else:
            B, T, _ = x.shape
            tokens = (R, B // R, C, T // C)
            split_x = x.reshape(*tokens, D)
            split_dlogits = dlogits.reshape(*tokens, V)
            own = contract("rbctd,rbctv->rcdv", split_x, split_dlogits)
        return HeadGradient(_placed(self.parts + own))

    def total(self) -> Float[Array, "D V"]:
        """Of all tokens, split over devices as the matrix is; float32."""
        return constrain(self.parts.sum((0, 1)), "embed", "vocab")


def _placed(parts: Float[Array, "R C D V"]) -> Float[Array, "R C D V"]:
    return constrain(parts, "activation_batch", LENGTH, None, "vocab")
