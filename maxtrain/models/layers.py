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
from maxtrain.models.specs import LayerSpec, MlpSpec, RopeSpec
from maxtrain.ops.attention import Dropout, attention, with_cache
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dot import Recipe
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise, fold
from maxtrain.ops.norm import rms_norm
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


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale, in the type that comes in; see ops.norm."""

    def __init__(self, size: int, eps: float, init: Initializer, role: Role = "norm"):
        self.scale = init.scale(size, role)
        self.eps = eps

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        norm = functools.partial(rms_norm, eps=self.eps)
        return elementwise(norm, x, self.scale[...])


def _norm(
    spec: LayerSpec, what: str, size: int, init: Initializer, role: Role = "norm"
) -> RMSNorm | None:
    """The norm of one thing in a layer, if its spec has one."""
    if what not in spec.norms:
        return None
    return RMSNorm(size, spec.norm_eps, init, role)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions.

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
        query_role: Role = "hidden" if "query" in spec.norms else "query"
        biases = spec.biases
        self.q = Linear(rngs.params(), width, heads, init, recipe, query_role, "q" in biases)
        self.k = Linear(rngs.params(), width, kv_heads, init, recipe, bias="k" in biases)
        self.v = Linear(rngs.params(), width, kv_heads, init, recipe, bias="v" in biases)
        self.o = Linear(rngs.params(), heads, width, init, recipe, "residual", "o" in biases)
        self.q_norm = _norm(spec, "query", size, init, "query_norm")
        self.k_norm = _norm(spec, "key", size, init)
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
        if self.q_norm is not None:
            q = self.q_norm(q)
        if self.k_norm is not None:
            k = self.k_norm(k)
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
        out = attention(q, k, v, mask, kernel=kernel, dtype=dtype, dropout=dropout)
        return self.o(out.astype(self.recipe.result)), cache


def _gated(gate: Array, up: Array) -> Array:
    """silu(gate) * up, float32."""
    return jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)


class SwiGLU(nnx.Module):
    """Gated feed-forward: (silu(x gate) * (x up)) down. Source: Shazeer 2020,
    https://arxiv.org/abs/2002.05202."""

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
        self.gate = Linear(rngs.params(), width, units, init, recipe, bias="gate" in biases)
        self.up = Linear(rngs.params(), width, units, init, recipe, bias="up" in biases)
        self.down = Linear(rngs.params(), units, width, init, recipe, "residual", "down" in biases)

    def __call__(self, x: Float[Array, "B T D"], context: Context) -> MlpOut:
        gate = self.gate(x)
        up = self.up(x)
        hidden = elementwise(_gated, gate, up)
        hidden = constrain(hidden, "activation_batch", "activation_length", "mlp")
        return MlpOut(self.down(hidden), {}, {}, {})


# By the type of `LayerSpec.mlp`, what makes the block; called like SwiGLU.
FEED_FORWARDS: dict[type, Callable[..., nnx.Module]] = {MlpSpec: SwiGLU}


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after.

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
        self.mlp_norm = _norm(spec, "mlp", embed_dim, init)
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
        if noise is not None:
            out = noise.added(out, 0)
        x = x + out
        inputs = x
        if self.mlp_norm is not None:
            inputs = self.mlp_norm(x)
        said = self.mlp(inputs, context)
        out = said.x
        if noise is not None:
            out = noise.added(out, 1)
        x = x + out
        x = constrain(x, "activation_batch", "activation_length", "activation_embed")
        observed = {f"mlp.{path}": value for path, value in said.observed.items()}
        return LayerOut(x, cache, said.terms, said.stats, observed)
