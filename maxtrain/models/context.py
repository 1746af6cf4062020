"""The context that all layers of one forward pass share, with the random operations of training."""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key

from maxtrain.config.schema import RegularizationConfig
from maxtrain.models.cache import CacheExtension
from maxtrain.models.specs import RopeSpec
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise, fold

# Places with random numbers of their own. Layers and their blocks count from 0.
_EMBEDDING = 1_000_000
_NOISE = 1_000_001
WEIGHTS = 1_000_002
_DEPTH = 1_000_003
ROUTER = 1_000_004
_ADAPTER = 1_000_005


class TrainNoise(NamedTuple):
    """The random operations of a training step."""

    config: RegularizationConfig
    keys: Key[Array, " B"]  # of the rows; in a layer: of the rows in this layer
    depth: Float[Array, ""] | float = 0.0  # of the layer: 1 / L ... 1
    # The remaining share of the router noise at this step, for each row.
    router_noise: Float[Array, "#B"] | float = 1.0

    def layer(self, index: Int[Array, ""] | int, num_layers: int) -> "TrainNoise":
        """Return the noise of one layer."""
        depth = (jnp.asarray(index, jnp.float32) + 1) / num_layers
        return self._replace(keys=fold(self.keys, index), depth=depth)

    def embedded(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Apply noise and dropout to embedded tokens."""
        x = embedding_noise(x, fold(self.keys, _NOISE), self.config.embedding_noise)
        return dropout(x, fold(self.keys, _EMBEDDING), self.config.embedding_dropout)

    def added(self, x: Float[Array, "B T D"], place: int) -> Float[Array, "B T D"]:
        """Apply dropout and stochastic depth to the output of block number `place` of a layer."""
        keys = fold(self.keys, place)
        rate = self.config.stochastic_depth
        x = dropout(x, keys, self.config.residual_dropout)
        if rate:
            x = drop_rows(x, fold(keys, _DEPTH), rate * self.depth)
        return x

    def of_adapter(self, x: Float[Array, "B *s"], place: int, rate: float) -> Float[Array, "B *s"]:
        """Apply dropout to the inputs of an adapter.

        Args:
            x: the inputs of the product.
            place: a number that is unique to the product in its layer, below 2^32.
            rate: dropout rate.
        """
        keys = fold(fold(self.keys, _ADAPTER), np.uint32(place))
        return dropout(x, keys, rate)


class Rotation(NamedTuple):
    """Cosines and sines of the rotary positions of each token."""

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]


class Context(NamedTuple):
    """The context that every layer of one forward pass shares."""

    rotations: Mapping[RopeSpec, Rotation]
    # The attention mask of this pass.
    mask: Mask
    noise: TrainNoise | None = None  # in training; each layer has its own
    # In generation: the tokens that this pass adds to the caches.
    extension: CacheExtension | None = None
