"""The blocks of a decoder. Parameters carry the logical names of their dims as `axes`; layers stack
a leading dim on top.

Every matrix product goes through ops.einsum.matmul, so that one place decides its precision.
Activations between blocks are float32.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int, Key

from maxtrain.config.schema import ModelConfig, RegularizationConfig
from maxtrain.models.init import Initializer, Role, head_dim
from maxtrain.ops.attention import Dropout, attention, with_cache
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dropout import drop_rows, dropout, embedding_noise, fold
from maxtrain.ops.einsum import matmul
from maxtrain.ops.norm import rms_norm
from maxtrain.ops.rope import apply_rope
from maxtrain.parallel.sharding import constrain

# Places that have their own random numbers; layers count from 0, and their blocks too.
_EMBEDDING, _NOISE, _WEIGHTS, _DEPTH = 1_000_000, 1_000_001, 1_000_002, 1_000_003


class KVCache(NamedTuple):
    """Keys and values of the columns seen so far, for generation; one layer's, or all layers'
    stacked on dim 0."""

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
        keys, rate = fold(self.keys, place), self.config.stochastic_depth
        x = dropout(x, keys, self.config.residual_dropout)
        return drop_rows(x, fold(keys, _DEPTH), rate * self.depth) if rate else x


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]
    mask: Mask
    noise: Noise | None = None  # in training; in a layer its own
    # Where in the cache, if there is one, the keys of this pass are written: how many are in it.
    cached: Int[Array, ""] | int = 0


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale; see ops.norm."""

    def __init__(self, size: int, eps: float, init: Initializer, role: Role = "norm"):
        self.scale = init.scale(size, role)
        self.eps = eps

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; with `qk_norm`, each query and key head is
    normalised before rope; with a `window`, a query sees that many columns, its own the last."""

    def __init__(
        self,
        config: ModelConfig,
        qk_norm: bool,
        init: Initializer,
        compute: str,
        rngs: nnx.Rngs,
        window: int | None = None,
    ):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, head_dim(config)
        self.q = init.matrix(
            rngs.params(),
            (D, N, H),
            ("embed", "heads", "head_dim"),
            "hidden" if qk_norm else "query",
        )
        self.k = init.matrix(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.v = init.matrix(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"))
        self.o = init.matrix(rngs.params(), (N, H, D), ("heads", "head_dim", "embed"), "residual")
        self.q_norm = RMSNorm(H, config.norm_eps, init, "query_norm") if qk_norm else None
        self.k_norm = RMSNorm(H, config.norm_eps, init) if qk_norm else None
        self.kernel = config.attention
        self.compute = compute
        self.window = window

    def _heads(self, x: Array, w: nnx.Param, axis: str) -> Array:
        """[B, T, D] by [D, N, H] -> [B, T, N, H]; the matrix product itself is two-dimensional,
        which is faster."""
        D, N, H = w.shape
        out = matmul(x, w[...].reshape(D, N * H), self.compute).reshape(*x.shape[:-1], N, H)
        return constrain(out, "activation_batch", "activation_length", axis, "head_dim")

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        q = self._heads(x, self.q, "heads")
        k = self._heads(x, self.k, "kv_heads")
        v = self._heads(x, self.v, "kv_heads")
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = apply_rope(q, context.cos, context.sin), apply_rope(k, context.cos, context.sin)
        if cache is not None:
            start = (0, context.cached, 0, 0)
            cache = KVCache(
                jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), start),
                jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), start),
            )
            k, v = cache
        noise, dropout = context.noise, None
        if noise is not None and noise.config.attention_dropout:
            dropout = Dropout(fold(noise.keys, _WEIGHTS), noise.config.attention_dropout)
        out = attention(
            q,
            k,
            v,
            context.mask.within(self.window),
            kernel=self.kernel if cache is None else with_cache(self.kernel),
            dtype=self.compute,
            dropout=dropout,
        )
        N, H, D = self.o.shape
        return matmul(
            out.reshape(*out.shape[:-2], N * H), self.o[...].reshape(N * H, D), self.compute
        ), cache


class SwiGLU(nnx.Module):
    """Gated feed-forward: (silu(x gate) * (x up)) down. Source: Shazeer 2020,
    https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: ModelConfig, init: Initializer, compute: str, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        self.gate = init.matrix(rngs.params(), (D, F), ("embed", "mlp"))
        self.up = init.matrix(rngs.params(), (D, F), ("embed", "mlp"))
        self.down = init.matrix(rngs.params(), (F, D), ("mlp", "embed"), "residual")
        self.compute = compute

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = matmul(x, self.gate[...], self.compute), matmul(x, self.up[...], self.compute)
        hidden = constrain(jax.nn.silu(gate) * up, "activation_batch", "activation_length", "mlp")
        return matmul(hidden, self.down[...], self.compute)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    def __init__(
        self, config: ModelConfig, qk_norm: bool, init: Initializer, compute: str, rngs: nnx.Rngs
    ):
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps, init)
        self.attention = Attention(config, qk_norm, init, compute, rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps, init)
        self.mlp = SwiGLU(config, init, compute, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        out, cache = self.attention(self.attention_norm(x), context, cache)
        x = x + (out if context.noise is None else context.noise.added(out, 0))
        out = self.mlp(self.mlp_norm(x))
        x = x + (out if context.noise is None else context.noise.added(out, 1))
        return constrain(x, "activation_batch", "activation_length", "activation_embed"), cache
