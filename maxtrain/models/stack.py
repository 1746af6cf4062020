"""The layers of a decoder as modules: a prefix, a period whose layers are stacked, and a rest.

The parameters of a place in the period are stacked over its repeats, [R, ...], and have the place's
number as their name: `layers.0.attention.q.kernel`. A layer of the prefix or of the rest has its
own: `layers.prefix_0.mlp.up.kernel`.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import nnx
from jaxtyping import Array, Key

from maxtrain.models.cache import PAGE, Caches, empty, ring_size
from maxtrain.models.init import Initializer
from maxtrain.models.layers import DecoderLayer
from maxtrain.models.specs import LayerSpec, StackSpec
from maxtrain.ops.dot import MatmulPrecision


class LayerLocation(NamedTuple):
    """The location of a layer's parameters: the name, and the index in the stacked arrays of that
    name, or None if they are not stacked."""

    name: str
    repeat: int | None


def layer_names(spec: StackSpec) -> list[LayerLocation]:
    """Return the location of each layer, in order."""
    places = [LayerLocation(f"prefix_{i}", None) for i in range(len(spec.prefix))]
    for repeat in range(spec.repeats):
        places += [LayerLocation(str(i), repeat) for i in range(len(spec.period))]
    places += [LayerLocation(f"rest_{i}", None) for i in range(len(spec.rest))]
    return places


class LayerStack(nnx.Module):
    """All layers of a decoder; models/scan_layers.py runs them.

    Args:
        spec: specification of each layer.
        embed_dim: D.
        kernel: kernel of ops.attention.
        init: draws the weights.
        recipe: types of the products; its result type is that of all activations.
        key: random key of the weights, split by the number of the layer.
    """

    def __init__(
        self,
        spec: StackSpec,
        embed_dim: int,
        kernel: str,
        init: Initializer,
        recipe: MatmulPrecision,
        key: Key[Array, ""],
    ):
        self.spec = spec
        # Replacement for the run through the period where nothing is generated: called with the
        # function of some repeats, x, the context and the inputs of the layers. None: `run_layers`
        # runs them.
        self.run_period: Callable[..., Array] | None = None
        keys = jax.random.split(key, spec.num_layers)

        def make(layer: LayerSpec, key: Array) -> DecoderLayer:
            rngs = nnx.Rngs(params=key)
            return DecoderLayer(layer, embed_dim, kernel, init, recipe, rngs)

        number = 0
        for name, layer in zip(self.prefix_names(), spec.prefix, strict=True):
            setattr(self, name, make(layer, keys[number]))
            number += 1
        end = number + len(spec.period) * spec.repeats
        for name, layer in zip(self.period_names(), spec.period, strict=True):
            make_each = nnx.vmap(functools.partial(make, layer), in_axes=0, out_axes=0)
            setattr(self, name, make_each(keys[number : end : len(spec.period)]))
            number += 1
        number = end
        for name, layer in zip(self.rest_names(), spec.rest, strict=True):
            setattr(self, name, make(layer, keys[number]))
            number += 1

    def prefix_names(self) -> list[str]:
        return [f"prefix_{i}" for i in range(len(self.spec.prefix))]

    def period_names(self) -> list[str]:
        return [str(i) for i in range(len(self.spec.period))]

    def rest_names(self) -> list[str]:
        return [f"rest_{i}" for i in range(len(self.spec.rest))]

    def paged_names(self) -> frozenset[str]:
        """Return the names of the layers, or places of the period, whose caches can be paged: those
        without a window."""
        names = (*self.prefix_names(), *self.period_names(), *self.rest_names())
        layers = (*self.spec.prefix, *self.spec.period, *self.spec.rest)
        windows = zip(names, layers, strict=True)
        return frozenset(name for name, layer in windows if layer.window is None)

    def new_caches(
        self, rows: int, columns: int, most_tokens: int, dtype: str, pages: int | None = None
    ) -> Caches:
        """Return empty caches; those of a place are [R, B, K, S, H].

        Args:
            rows: B.
            columns: maximum number of columns of a row.
            most_tokens: maximum number of tokens that a pass adds to a row.
            dtype: type of keys and values.
            pages: number of pages that layers without a window have for all rows; None: a ring for
                each row.
        """
        spec = self.spec

        def shapes(layer: LayerSpec) -> tuple[tuple[int, ...], tuple[int, ...]]:
            if pages is not None and layer.window is None:
                return layer.mixer.cache_shapes(pages, PAGE)
            size = ring_size(columns, layer.window, most_tokens)
            return layer.mixer.cache_shapes(rows, size)

        caches = {}
        for name, layer in zip(self.prefix_names(), spec.prefix, strict=True):
            caches[name] = empty(shapes(layer), dtype)
        for name, layer in zip(self.period_names(), spec.period, strict=True):
            keys, values = shapes(layer)
            stacked = ((spec.repeats, *keys), (spec.repeats, *values))
            caches[name] = empty(stacked, dtype)
        for name, layer in zip(self.rest_names(), spec.rest, strict=True):
            caches[name] = empty(shapes(layer), dtype)
        return caches
