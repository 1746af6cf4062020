"""Attention from XLA's own matrix products, in blocks of queries, with a hand-written backward
pass.

A block of queries only meets the keys from the beginning of its window up to its own end. So nearly
half of the causal square, and most of it with a short window, is never computed. The forward pass
stores one logsumexp per query instead of the weights; the backward pass recomputes them. All five
products are written so that the large operand is never transposed ([t, s] scores times [s, h], or
[h, t] times [t, s]). The small one is transposed instead, which is several times faster on CPUs and
the same elsewhere.

Source: Dao et al. 2022, https://arxiv.org/abs/2205.14135, for the backward pass from logsumexp.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.eager import MASKED
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.one_query import is_for, one_query_attention
from maxtrain.ops.einsum import contract
from maxtrain.ops.names import ATTENTION, named

# Smaller blocks waste the matrix units.
MIN_BLOCK = 128
# More blocks compile slowly.
MAX_BLOCKS = 8


class _XlaStaticArgs(NamedTuple):
    """Static parameters; see `attention`."""

    dtype: str
    scale: float
    softcap: float | None


class _QueryBlock(NamedTuple):
    """Some queries, and the keys that they can see at most, by their indices."""

    queries: slice
    keys: slice


def _blocks(mask: Mask) -> list[_QueryBlock]:
    """Split all queries into blocks; a block may see all keys that are not in order, such as a
    cache."""
    num_queries = mask.q_segments.shape[1]
    num_keys = mask.kv_segments.shape[1]
    size = max(MIN_BLOCK, math.ceil(num_queries / MAX_BLOCKS))
    blocks = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        keys = slice(0, num_keys)
        if mask.in_order:
            keys = slice(_first_key(start, mask.window), stop)
        blocks.append(_QueryBlock(slice(start, stop), keys))
    return blocks


def _first_key(start: int, window: int | None) -> int:
    """Return the first key that a query at column `start` sees, rounded down: slices that begin at
    multiples of the smallest block need no shifting of lanes."""
    if window is None:
        return 0
    first = max(0, start - window + 1)
    return first - first % MIN_BLOCK


def _scores(q_BKMH: Array, k_BKHS: Array, mask: Mask, form: _XlaStaticArgs) -> Array:
    """Return the scaled, soft-capped and masked scores of one block [B, K, G * t, s]; the queries
    of a group are consecutive."""
    scores = contract("bkmh,bkhs->bkms", q_BKMH, k_BKHS, in_place=True) * form.scale
    if form.softcap is not None:
        scores = form.softcap * jnp.tanh(scores / form.softcap)
    B, K, _, s = scores.shape
    t = mask.q_segments.shape[1]
    grouped = scores.reshape(B, K, -1, t, s)
    visible = mask.visible()[:, None, None]
    return jnp.where(visible, grouped, MASKED).reshape(scores.shape)


def _group(x_BTNH: Array, num_kv_heads: int) -> Array:
    """Reshape [B, t, N, H] to [B, K, G * t, H]."""
    B, t, N, H = x_BTNH.shape
    x_BTKGH = x_BTNH.reshape(B, t, num_kv_heads, N // num_kv_heads, H)
    return x_BTKGH.transpose(0, 2, 3, 1, 4).reshape(B, num_kv_heads, -1, H)


def _ungroup(x_BKMH: Array, t: int) -> Array:
    """Reshape [B, K, G * t, H] to [B, t, N, H]."""
    B, K, M, H = x_BKMH.shape
    x_BKGTH = x_BKMH.reshape(B, K, M // t, t, H)
    return x_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, t, -1, H)


def _group_sinks(sinks: Array, num_kv_heads: int, t: int) -> Array:
    """Repeat sinks [N] to [K, G * t, 1]: the sink of each query of a block."""
    sinks_KG = sinks.reshape(num_kv_heads, -1)
    return jnp.repeat(sinks_KG, t, axis=1)[..., None]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask, form: _XlaStaticArgs
) -> Array:
    out, _ = _attend_forward(q, k, v, sinks, mask, form)
    return out


def _attend_forward(
    q: Array, k: Array, v: Array, sinks: Array | None, mask: Mask, form: _XlaStaticArgs
) -> tuple[Array, tuple]:
    dtype = form.dtype
    q = q.astype(dtype)
    k = k.astype(dtype)
    v = v.astype(dtype)
    K = k.shape[2]
    k_BKHS = k.transpose(0, 2, 3, 1)
    v_BKSH = v.transpose(0, 2, 1, 3)
    outputs = []
    lses = []
    for queries, keys in _blocks(mask):
        q_block = q[:, queries]
        t = q_block.shape[1]
        q_BKMH = _group(q_block, K)
        if outputs:
            # A barrier serialises the blocks; XLA would otherwise hold the scores of all of them at
            # once.
            q_BKMH, outputs[-1] = jax.lax.optimization_barrier((q_BKMH, outputs[-1]))
        scores = _scores(q_BKMH, k_BKHS[..., keys], mask.part(queries, keys), form)
        top = scores.max(-1, keepdims=True)
        sink = None
        if sinks is not None:
            sink = _group_sinks(sinks, K, t)
            top = jnp.maximum(top, sink)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        if sink is not None:
            total += jnp.exp(sink - top)
        out = contract("bkms,bksh->bkmh", weights.astype(dtype), v_BKSH[:, :, keys]) / total
        outputs.append(_ungroup(out, t))
        lses.append(top + jnp.log(total))
    out = named(jnp.concatenate(outputs, axis=1), ATTENTION)
    lses = [named(lse, ATTENTION) for lse in lses]
    return out, (q, k, v, sinks, mask, lses)


def _attend_backward(form: _XlaStaticArgs, saved: tuple, g: Array) -> tuple:
    dtype = form.dtype
    q, k, v, sinks, mask, lses = saved
    B, S, K, H = k.shape
    k_BKHS = k.transpose(0, 2, 3, 1)
    k_BKSH = k.transpose(0, 2, 1, 3)
    v_BKHS = v.transpose(0, 2, 3, 1)
    dq = []
    dk_BKHS = jnp.zeros((B, K, H, S), jnp.float32)
    dv_BKHS = jnp.zeros((B, K, v.shape[-1], S), jnp.float32)
    dsinks_of_blocks = []
    for (queries, keys), lse in zip(_blocks(mask), lses, strict=True):
        q_block = q[:, queries]
        t = q_block.shape[1]
        q_BKMH = _group(q_block, K)
        g_BKMH = _group(g[:, queries], K).astype(dtype)
        q_BKMH, dk_BKHS, dv_BKHS = jax.lax.optimization_barrier((q_BKMH, dk_BKHS, dv_BKHS))
        scores = _scores(q_BKMH, k_BKHS[..., keys], mask.part(queries, keys), form)
        p = jnp.exp(scores - lse)
        dp = contract("bkmh,bkhs->bkms", g_BKMH, v_BKHS[..., keys], in_place=True)
        mean_dp = (p * dp).sum(-1, keepdims=True)
        slope = form.scale
        if form.softcap is not None:
            # The slope of tanh. Masked scores are far outside, where it is 0.
            bounded = jnp.clip(scores / form.softcap, -1.0, 1.0)
            slope *= 1.0 - bounded * bounded
        ds = (p * (dp - mean_dp) * slope).astype(dtype)
        dq_BKMH = contract("bkms,bksh->bkmh", ds, k_BKSH[:, :, keys])
        dq.append(_ungroup(dq_BKMH, t))
        dk_block = contract("bkhm,bkms->bkhs", q_BKMH.swapaxes(2, 3), ds)
        dk_BKHS = dk_BKHS.at[..., keys].add(dk_block)
        dv_block = contract("bkhm,bkms->bkhs", g_BKMH.swapaxes(2, 3), p.astype(dtype))
        dv_BKHS = dv_BKHS.at[..., keys].add(dv_block)
        if sinks is not None:
            # The gradient of a score whose key has the value 0.
            p_sink = jnp.exp(_group_sinks(sinks, K, t) - lse)
            dsink_BKM = -(p_sink * mean_dp)[..., 0]
            dsinks_of_blocks.append(dsink_BKM.reshape(B, -1, t).sum((0, 2)))
    # A barrier before the rotation is undone: fused with that, the transposes would be read element
    # by element.
    dq, dk = jax.lax.optimization_barrier(
        (jnp.concatenate(dq, axis=1), dk_BKHS.transpose(0, 3, 1, 2))
    )
    dv = dv_BKHS.transpose(0, 3, 1, 2)
    dsinks = None
    if sinks is not None:
        dsinks = jnp.stack(dsinks_of_blocks).sum(0)
    return dq, dk, dv, dsinks, None


_attend.defvjp(_attend_forward, _attend_backward)


def xla_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    dtype: str,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
) -> Array:
    """Compute `attention`. One query per row has its own code path. Memory: a few times the scores
    of one block, B * N * max(128, T / 8) * S float32."""
    # Inputs are float32, so that their gradients are float32.
    q = q.astype(jnp.float32)
    k = k.astype(jnp.float32)
    v = v.astype(jnp.float32)
    if sinks is not None:
        sinks = sinks.astype(jnp.float32)

    if is_for(q, mask):
        options = {"dtype": dtype, "scale": scale, "softcap": softcap, "sinks": sinks}
        return one_query_attention(q, k, v, mask, **options)
    return _attend(q, k, v, sinks, mask, _XlaStaticArgs(dtype, scale, softcap))
