"""Flash attention for Hopper and Blackwell by tokamax's Mosaic kernel, on each device's shard.

The kernel takes the first visible key of each query, which expresses both documents and windows.
The forward pass skips blocks of keys before it; the backward pass of tokamax 0.0.17 computes all
earlier keys.

Source: see `maxtrain/ops/tokamax.py`; Shah et al. 2024, https://arxiv.org/abs/2407.08608.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from maxtrain.ops import tokamax
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.share import on_each_device
from maxtrain.ops.names import ATTENTION, named


def mosaic_attention(
    q: Array, k: Array, v: Array, mask: Mask, *, dtype: str, scale: float
) -> Array:
    """Compute `attention`, only for training and evaluation. Each document of a row must be
    contiguous. Scores and sums are float32."""
    assert mask.in_order, "caches are for other kernels"
    share = functools.partial(_on_one_device, window=mask.window, dtype=dtype, scale=scale)
    return on_each_device(share, q, k, v, mask.q_segments)


def mosaic_on_one_device(
    q: Array, k: Array, v: Array, mask: Mask, *, dtype: str, scale: float
) -> Array:
    """Compute `mosaic_attention` for the rows and heads of one device."""
    return _on_one_device(q, k, v, mask.q_segments, window=mask.window, dtype=dtype, scale=scale)


def first_keys(segments: Int[Array, "B T"], window: int | None) -> Int[Array, "B T"]:
    """Return the column of the first key that each query sees."""
    columns = jnp.arange(segments.shape[1], dtype=jnp.int32)
    before = jnp.pad(segments[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    first = jax.lax.cummax(jnp.where(segments != before, columns, 0), axis=1)
    if window is not None:
        first = jnp.maximum(first, columns - window + 1)
    return first


def _on_one_device(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    *,
    window: int | None,
    dtype: str,
    scale: float,
) -> Array:
    # Inputs are float32, so that their gradients are float32.
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return _attend(q, k, v, first_keys(segments, window), dtype, scale)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _attend(
    q: Array, k: Array, v: Array, first: Array, dtype: str, scale: float
) -> Float[Array, "B T N H"]:
    out, _ = _attend_forward(q, k, v, first, dtype, scale)
    return out


def _attend_forward(
    q: Array, k: Array, v: Array, first: Array, dtype: str, scale: float
) -> tuple[Array, tuple]:
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    out, sums = tokamax.attention_forward(q, k, v, first, scale)
    out = named(out, ATTENTION)
    sums = tuple(named(x, ATTENTION) for x in sums)
    return out.astype(jnp.float32), (q, k, v, first, out, sums)


def _attend_backward(dtype: str, scale: float, saved: tuple, g: Array) -> tuple:
    q, k, v, first, out, sums = saved
    gradients = tokamax.attention_backward(q, k, v, first, scale, out, sums, g.astype(dtype))
    return *(x.astype(jnp.float32) for x in gradients), None


_attend.defvjp(_attend_forward, _attend_backward)
