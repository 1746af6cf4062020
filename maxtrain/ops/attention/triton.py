"""Flash attention for GPUs by Triton kernels, on each device's shard."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.share import on_each_device
from maxtrain.ops.attention.triton_kernels import TritonStaticArgs, attend, tile_of


def triton_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    dtype: str,
    scale: float,
    interpret: bool = False,
) -> Array:
    """Compute `attention`, only for training and evaluation. Scores and sums are float32;
    `interpret`: run without a GPU, slowly."""
    assert mask.in_order, "caches are for other kernels"
    share = functools.partial(
        _on_one_device, window=mask.window, dtype=dtype, scale=scale, interpret=interpret
    )
    return on_each_device(share, q, k, v, mask.q_segments)


def triton_on_one_device(q: Array, k: Array, v: Array, mask: Mask, **options: Any) -> Array:
    """Compute `triton_attention` for the rows and heads of one device."""
    options = {"interpret": False} | options
    return _on_one_device(q, k, v, mask.q_segments, window=mask.window, **options)


def _on_one_device(
    q: Array,
    k: Array,
    v: Array,
    segments: Array,
    *,
    window: int | None,
    dtype: str,
    scale: float,
    interpret: bool,
) -> Array:
    size = q.shape[-1]
    missing = tile_of(size) - size

    def filled(x: Array) -> Array:
        # Inputs are float32, so that their gradients are float32. Zero padding changes no score.
        return jnp.pad(x.astype(jnp.float32), ((0, 0), (0, 0), (0, 0), (0, missing)))

    form = TritonStaticArgs(dtype, scale, window, interpret)
    out = attend(filled(q), filled(k), filled(v), segments, form)
    return out[..., :size]
