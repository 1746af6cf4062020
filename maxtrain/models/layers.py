"""The blocks of a decoder. Parameters carry the logical names of their dims as `axes`; layers stack a leading dim on top.

Every matrix product goes through ops.einsum.matmul, so that one place decides its precision. Activations between blocks
are float32.
"""

import functools
import math
import statistics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from maxtrain.config.schema import ModelConfig
from maxtrain.ops.attention import attention
from maxtrain.ops.einsum import matmul
from maxtrain.ops.norm import rms_norm
from maxtrain.ops.rope import apply_rope
from maxtrain.parallel.sharding import Axes, constrain


class KVCache(NamedTuple):
    """Keys and values of the columns seen so far, for generation; one layer's, or all layers' stacked on dim 0."""

    k: Float[Array, "*L B S K H"]
    v: Float[Array, "*L B S K H"]


class Context(NamedTuple):
    """What every layer of one forward pass shares."""

    cos: Float[Array, "B T F"]
    sin: Float[Array, "B T F"]
    q_segments: Int[Array, "B T"]
    kv_segments: Int[Array, "B S"]
    offset: Int[Array, ""] | int  # column of the first query in the cache; 0 without one


def head_dim(config: ModelConfig) -> int:
    """H: given, or embed_dim / num_heads."""
    return config.head_dim or config.embed_dim // config.num_heads


@functools.cache
def _quantiles() -> np.ndarray:
    """65,536 equally likely values of a normal distribution truncated at 2 deviations, scaled to deviation 1; float32."""
    normal = statistics.NormalDist()
    low, high = normal.cdf(-2.0), normal.cdf(2.0)
    values = np.array([normal.inv_cdf(low + (high - low) * (i + 0.5) / 65_536) for i in range(65_536)])
    return (values / values.std()).astype(np.float32)


def matrix(key: Array, shape: tuple[int, ...], axes: Axes, fan_in: int, dtype: str, scale: float) -> nnx.Param:
    """A parameter from a normal distribution, truncated at 2 deviations, with variance scale^2 / fan_in.

    The values are looked up by random integers: the inverse error function differs in its last bit with the vector width
    that XLA chooses, and so with the mesh; a table, and one product, don't.
    """
    index = jax.random.bits(key, shape, jnp.uint16).astype(jnp.int32)
    value = jnp.asarray(_quantiles())[index] * np.float32(scale / math.sqrt(fan_in))
    return nnx.Param(value.astype(dtype), axes=axes)


class RMSNorm(nnx.Module):
    """RMSNorm with a learned scale; see ops.norm."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones((size,), dtype), axes=("norm",))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        return rms_norm(x, self.scale[...], self.eps)


class Attention(nnx.Module):
    """Grouped-query attention with rotary positions; with `qk_norm`, each query and key head is normalised before rope."""

    def __init__(self, config: ModelConfig, qk_norm: bool, params: str, compute: str, rngs: nnx.Rngs):
        D, N, K, H = config.embed_dim, config.num_heads, config.num_kv_heads, head_dim(config)
        scale, out_scale = config.init_scale, config.init_scale / math.sqrt(2 * config.num_layers)
        self.q = matrix(rngs.params(), (D, N, H), ("embed", "heads", "head_dim"), D, params, scale)
        self.k = matrix(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), D, params, scale)
        self.v = matrix(rngs.params(), (D, K, H), ("embed", "kv_heads", "head_dim"), D, params, scale)
        self.o = matrix(rngs.params(), (N, H, D), ("heads", "head_dim", "embed"), N * H, params, out_scale)
        self.q_norm = RMSNorm(H, config.norm_eps, params) if qk_norm else None
        self.k_norm = RMSNorm(H, config.norm_eps, params) if qk_norm else None
        self.kernel, self.compute = config.attention, compute

    def _heads(self, x: Array, w: nnx.Param, axis: str) -> Array:
        """[B, T, D] by [D, N, H] -> [B, T, N, H]; the matrix product itself is two-dimensional, which is faster."""
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
            start = (0, context.offset, 0, 0)
            cache = KVCache(
                jax.lax.dynamic_update_slice(cache.k, k.astype(cache.k.dtype), start),
                jax.lax.dynamic_update_slice(cache.v, v.astype(cache.v.dtype), start),
            )
            k, v = cache
        out = attention(
            q, k, v, context.q_segments, context.kv_segments, offset=context.offset, kernel=self.kernel, dtype=self.compute
        )
        N, H, D = self.o.shape
        return matmul(out.reshape(*out.shape[:-2], N * H), self.o[...].reshape(N * H, D), self.compute), cache


class SwiGLU(nnx.Module):
    """Gated feed-forward: (silu(x gate) * (x up)) down. Source: Shazeer 2020, https://arxiv.org/abs/2002.05202."""

    def __init__(self, config: ModelConfig, params: str, compute: str, rngs: nnx.Rngs):
        D, F = config.embed_dim, config.mlp_dim
        scale, out_scale = config.init_scale, config.init_scale / math.sqrt(2 * config.num_layers)
        self.gate = matrix(rngs.params(), (D, F), ("embed", "mlp"), D, params, scale)
        self.up = matrix(rngs.params(), (D, F), ("embed", "mlp"), D, params, scale)
        self.down = matrix(rngs.params(), (F, D), ("mlp", "embed"), F, params, out_scale)
        self.compute = compute

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate, up = matmul(x, self.gate[...], self.compute), matmul(x, self.up[...], self.compute)
        hidden = constrain(jax.nn.silu(gate) * up, "activation_batch", "activation_length", "mlp")
        return matmul(hidden, self.down[...], self.compute)


class DecoderLayer(nnx.Module):
    """Attention and feed-forward, each normalised before and added to the residual stream after."""

    def __init__(self, config: ModelConfig, qk_norm: bool, params: str, compute: str, rngs: nnx.Rngs):
        self.attention_norm = RMSNorm(config.embed_dim, config.norm_eps, params)
        self.attention = Attention(config, qk_norm, params, compute, rngs)
        self.mlp_norm = RMSNorm(config.embed_dim, config.norm_eps, params)
        self.mlp = SwiGLU(config, params, compute, rngs)

    def __call__(
        self, x: Float[Array, "B T D"], context: Context, cache: KVCache | None
    ) -> tuple[Float[Array, "B T D"], KVCache | None]:
        out, cache = self.attention(self.attention_norm(x), context, cache)
        x = x + out
        x = x + self.mlp(self.mlp_norm(x))
        return constrain(x, "activation_batch", "activation_length", "activation_embed"), cache
