"""The blocks of a decoder. Parameters carry the logical names of their dims as `axes`; layers stack
a leading dim on top.

Every matrix product with a weight is a Linear, so that one place decides its precision.
Activations between blocks, and the results of products, are of the recipe's type; norms, rope,
softmax and silu are float32 inside.
"""

import functools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from maxtrain.config.schema import RegularizationConfig
from maxtrain.models.init import Initializer, Role
from maxtrain.models.linear import Linear
from maxtrain.models.specs import Activation, LayerSpec, MlpSpec, NormSpec, RopeSpec
from maxtrain.ops.attention import Dropout, attention, with_cache
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dot import Recipe
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise, fold
from maxtrain.ops.norm import layer_norm, rms_norm
from maxtrain.ops.rope import apply_rope
from maxtrain.ops.stored import elementwise
from maxtrain.ops.sums import Sum
from maxtrain.parallel.sharding import constrain

# Places that have their own random numbers; layers count from 0, and their blocks too.
_EMBEDDING = 1_000_000
_NOISE = 1_000_001
_WEIGHTS = 1_000_002
_DEPTH = 1_000_003


class KVCache(NamedTuple):
    """Keys and values of the columns seen so far, for generation; one layer's, or those of the
    layers at one place of the period, stacked on dim 0."""

    k: Float[Array, "*L B S K H"]
    v: Float[Array, "*L B S K H"]


class Noise(NamedTuple):
    """What is random in a training step."""

    config: RegularizationConfig
    keys: Key[Array, " B"]  # of the rows; in a layer: of the rows in this layer
    depth: Float[Array, ""] | float = 0.0  # of the layer: 1 / L ... 1

    def layer(self, index: Int[Array, ""] | int, num_layers: int) -> "Noise":
        """That of one layer."""
        depth = (jnp.asarray(index, jnp.float32) + 1) / num_layers
        return self._replace(keys=fold(self.keys, index), depth=depth)

    def embedded(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """Embedded tokens, with noise and dropout."""
        x = embedding_noise(x, fold(self.keys, _NOISE), self.config.embedding_noise)
        return dropout(x, fold(self.keys, _EMBEDDING), self.config.embedding_dropout)

    def added(self, x: Float[Array, "B T D"], place: int) -> Float[Array, "B T D"]:
        """What block number `place` of a layer adds to the residual stream, with dropout and
        stochastic depth."""
        keys = fold(self.keys, place)
        rate = self.config.stochastic_depth
        x = dropout(x, keys, self.config.residual_dropout)
        if rate:
            x = drop_rows(x, fold(keys, _DEPTH), rate * self.depth)
        return x


class Rotation(NamedTuple):
    """How rotary positions turn the heads of each token."""

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    rotations: Mapping[RopeSpec, Rotation]
    mask: Mask
    noise: Noise | None = None  # in training; in a layer its own
    # Where in the cache, if there is one, the keys of this pass are written: how many are in it.
    cached: Int[Array, ""] | int = 0


class MlpOut(NamedTuple):
    """What a feed-forward block gives back."""

    x: Float[Array, "B T D"]
    # Of the loss, each times its factor, and summed over tokens: the sum over layers is divided by
    # the number of the batch's tokens.
    terms: dict[str, Sum]
    # What is recorded.
    stats: dict[str, Sum]
    # What buffers are updated from, by their path in the block; summed over tokens.
    observed: dict[str, Array]


class LayerOut(NamedTuple):
    """What a layer gives back; `terms`, `stats` and `observed` as of its blocks."""

    x: Float[Array, "B T D"]
    cache: KVCache | None
    terms: dict[str, Sum]
    stats: dict[str, Sum]
    observed: dict[str, Array]


class Norm(nnx.Module):
    """A norm with a learned scale, and perhaps a bias, in the type that comes in; see ops.norm."""

    def __init__(self, size: int, spec: NormSpec, init: Initializer, role: Role = "norm"):
        self.scale = init.scale(size, role, spec.offset)
        # Assigned once: what is first None stays out of the module's parameters.
        bias = None
        if spec.kind == "layer":
            bias = init.bias((size,), ("norm",), role)
        self.bias = bias
        self.spec = spec

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        scale = self.scale[...]
        if self.spec.offset:
            # In float32, where 1 and a small scale are not rounded to 1.
            scale = self.spec.offset + scale.astype(jnp.float32)
        if self.bias is None:
            norm = functools.partial(rms_norm, eps=self.spec.eps)
            return elementwise(norm, x, scale)
        norm = functools.partial(layer_norm, eps=self.spec.eps)
        return elementwise(norm, x, scale, self.bias[...])


def _norm(
    spec: LayerSpec, what: str, size: int, init: Initializer, role: Role = "norm"
) -> Norm | None:
    """The norm of one thing in a layer, if its spec has one."""
    if what not in spec.norms:
        return None
    return Norm(size, spec.norm, init, role)


def _head_norm(
    spec: LayerSpec, one: str, whole: str, num_heads: int, init: Initializer, role: Role = "norm"
) -> Norm | None:
    """The norm of each head, or of all heads of a token as one, if the layer's spec has one."""
    size = spec.mixer.head_dim
    if whole in spec.norms:
        return _norm(spec, whole, num_heads * size, init, role)
    return _norm(spec, one, size, init, role)


def _normalised(norm: Norm | None, heads: Float[Array, "B T N H"]) -> Float[Array, "B T N H"]:
    """Heads, each for itself or all of a token as one, by the size of the norm."""
    if norm is None:
        return heads
    if norm.scale.shape[-1] == heads.shape[-1]:
        return norm(heads)
    return norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)


class Attention(nnx.Module):
    """Grouped-query attention, with rotary positions if the layer has them.

    Args:
        spec: heads, window, positions, and what has norms and biases.
        embed_dim: D.
        kernel: of ops.attention.
        init: draws the weights.
        recipe: types of the products; its result is that of all activations.
        rngs: stream `params`.
    """

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        kernel: str,
        init: Initializer,
        recipe: Recipe,
        rngs: nnx.Rngs,
    ):
        size = spec.mixer.head_dim
        width = {"embed": embed_dim}
        heads = {"heads": spec.mixer.num_heads, "head_dim": size}
        kv_heads = {"kv_heads": spec.mixer.num_kv_heads, "head_dim": size}
        # The scale of muP is folded into what the scores are made of last.
        query_role: Role = "query"
        if "query" in spec.norms or "all_queries" in spec.norms:
            query_role = "hidden"
        biases = spec.biases
        self.q = Linear(rngs.params(), width, heads, init, recipe, query_role, "q" in biases)
        self.k = Linear(rngs.params(), width, kv_heads, init, recipe, bias="k" in biases)
        self.v = Linear(rngs.params(), width, kv_heads, init, recipe, bias="v" in biases)
        # Where the output is normalised, the norm's scale is what the residual stream gets.
        out_role: Role = "residual"
        if "attention_out" in spec.norms:
            out_role = "hidden"
        self.o = Linear(rngs.params(), heads, width, init, recipe, out_role, "o" in biases)
        num_heads = spec.mixer.num_heads
        num_kv_heads = spec.mixer.num_kv_heads
        self.q_norm = _head_norm(spec, "query", "all_queries", num_heads, init, "query_norm")
        self.k_norm = _head_norm(spec, "key", "all_keys", num_kv_heads, init)
        self.mixer = spec.mixer
        self.rope = spec.rope
        self.window = spec.window
        self.kernel = kernel
        self.recipe = recipe

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        q = constrain(self.q(x), "activation_batch", "activation_length", "heads", "head_dim")
        k = constrain(self.k(x), "activation_batch", "activation_length", "kv_heads", "head_dim")
        v = constrain(self.v(x), "activation_batch", "activation_length", "kv_heads", "head_dim")
        q = _normalised(self.q_norm, q)
        k = _normalised(self.k_norm, k)
        if self.rope is not None:
            rotation = context.rotations[self.rope]
            q = apply_rope(q, rotation.cos, rotation.sin)
            k = apply_rope(k, rotation.cos, rotation.sin)
        kernel = self.kernel
        if cache is not None:
            start = (0, context.cached, 0, 0)
            cache = KVCache(
                jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), start),
                jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), start),
            )
            k = cache.k
            v = cache.v
            kernel = with_cache(kernel)
        dropout = None
        noise = context.noise
        if noise is not None and noise.config.attention_dropout:
            dropout = Dropout(fold(noise.keys, _WEIGHTS), noise.config.attention_dropout)
        mask = context.mask.within(self.window)
        dtype = self.recipe.inputs
        out = attention(
            q,
            k,
            v,
            mask,
            kernel=kernel,
            dtype=dtype,
            scale=self.mixer.scale,
            softcap=self.mixer.softcap,
            dropout=dropout,
        )
        return self.o(out.astype(self.recipe.result)), cache


# GELU in the form with tanh: Hendrycks and Gimpel 2016, https://arxiv.org/abs/1606.08415.
_ACTIVATIONS: dict[Activation, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def _activated(activation: Activation, x: Array) -> Array:
    """activation(x), float32."""
    return _ACTIVATIONS[activation](x.astype(jnp.float32))


def _gated(activation: Activation, gate: Array, up: Array) -> Array:
    """activation(gate) * up, float32."""
    return _activated(activation, gate) * up.astype(jnp.float32)


class Mlp(nnx.Module):
    """Feed-forward: (activation(x gate) * (x up)) down, or without gates activation(x up) down.

    Source: Shazeer 2020, https://arxiv.org/abs/2002.05202.
    """

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        init: Initializer,
        recipe: Recipe,
        rngs: nnx.Rngs,
    ):
        width = {"embed": embed_dim}
        units = {"mlp": spec.mlp.width}
        biases = spec.biases
        gate = None
        if spec.mlp.gated:
            gate = Linear(rngs.params(), width, units, init, recipe, bias="gate" in biases)
        self.gate = gate
        self.activation: Activation = spec.mlp.activation
        self.up = Linear(rngs.params(), width, units, init, recipe, bias="up" in biases)
        out_role: Role = "residual"
        if "mlp_out" in spec.norms:
            out_role = "hidden"
        self.down = Linear(rngs.params(), units, width, init, recipe, out_role, "down" in biases)

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> MlpOut:
        if self.gate is None:
            activated = functools.partial(_activated, self.activation)
            hidden = elementwise(activated, self.up(x))
        else:
            gated = functools.partial(_gated, self.activation)
            hidden = elementwise(gated, self.gate(x), self.up(x))
        hidden = constrain(hidden, "activation_batch", "activation_length", "mlp")
        return MlpOut(self.down(hidden), {}, {}, {})


# By the type of `LayerSpec.mlp`, what makes the block; called like Mlp.
FEED_FORWARDS: dict[type, Callable[..., nnx.Module]] = {MlpSpec: Mlp}


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each normalised before or after, and added to the residual
    stream.

    Args:
        as of `Attention`.
    """

    def __init__(
        self,
        spec: LayerSpec,
        embed_dim: int,
        kernel: str,
        init: Initializer,
        recipe: Recipe,
        rngs: nnx.Rngs,
    ):
        self.attention_norm = _norm(spec, "attention", embed_dim, init)
        self.attention_out_norm = _norm(spec, "attention_out", embed_dim, init, "residual_norm")
        self.mlp_norm = _norm(spec, "mlp", embed_dim, init)
        self.mlp_out_norm = _norm(spec, "mlp_out", embed_dim, init, "residual_norm")
        self.attention = Attention(spec, embed_dim, kernel, init, recipe, rngs)
        self.mlp = FEED_FORWARDS[type(spec.mlp)](spec, embed_dim, init, recipe, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> LayerOut:
        noise = context.noise
        inputs = x
        if self.attention_norm is not None:
            inputs = self.attention_norm(x)
        out, cache = self.attention(inputs, context, cache)
        if self.attention_out_norm is not None:
            out = self.attention_out_norm(out)
        if noise is not None:
            out = noise.added(out, 0)
        x = x + out
        inputs = x
        if self.mlp_norm is not None:
            inputs = self.mlp_norm(x)
        said = self.mlp(inputs, context)
        out = said.x
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        if noise is not None:
            out = noise.added(out, 1)
        x = x + out
        x = constrain(x, "activation_batch", "activation_length", "activation_embed")
        observed = {f"mlp.{path}": value for path, value in said.observed.items()}
        return LayerOut(x, cache, said.terms, said.stats, observed)
