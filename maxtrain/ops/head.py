"""The output matrix in a loss over chunks of tokens that are sharded over devices.

A device gathers the matrix once, for all chunks, and accumulates the gradient of its own tokens.
The devices' gradients are summed once, after the last chunk. XLA alone would do both for each
chunk. Memory: a device has the whole gradient, float32, of its part of the vocabulary.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float

from maxtrain.ops.einsum import contract
from maxtrain.parallel.sharding import LENGTH, batch_shards, constrain, length_shards


def gathered(head: Float[Array, "D V"], dtype: DTypeLike) -> Float[Array, "D V"]:
    """Return the matrix for products: rounded to their type, and sharded over the vocabulary
    only."""
    return constrain(head.astype(dtype), None, "vocab")


class HeadGradient(NamedTuple):
    """The gradient of an output matrix while it is accumulated.

    Attributes:
        parts: the gradient of the tokens of each device, float32; R and C are the numbers of shards
            of rows and columns.
    """

    parts: Float[Array, "R C D V"]

    @classmethod
    def nothing(cls, head: Float[Array, "D V"]) -> "HeadGradient":
        """Return the gradient of no tokens."""
        shape = (batch_shards(), length_shards(), *head.shape)
        return cls(_placed(jnp.zeros(shape, jnp.float32)))

    def add(self, x: Float[Array, "B T D"], dlogits: Float[Array, "B T V"]) -> "HeadGradient":
        """Add the gradient of more tokens.

        Args:
            x: hidden states, in the type of products.
            dlogits: the gradient with respect to their logits, in the same type.
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
        """Return the gradient of all tokens, sharded like the matrix; float32."""
        return constrain(self.parts.sum((0, 1)), "embed", "vocab")


def _placed(parts: Float[Array, "R C D V"]) -> Float[Array, "R C D V"]:
    return constrain(parts, "activation_batch", LENGTH, None, "vocab")
