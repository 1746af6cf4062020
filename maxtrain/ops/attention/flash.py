"""Flash attention for TPUs: jax's splash kernel, which separates documents and skips masked blocks,
on each device's shard.

Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022,
    https://arxiv.org/abs/2205.14135.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.attention.share import on_each_device
from maxtrain.ops.names import ATTENTION

# Rows are multiples of the lanes of the vector unit.
LANES = 128
# Larger blocks need more of the vector unit's memory.
MAX_BLOCK = 512


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    dtype: str,
    scale: float,
    softcap: float | None = None,
    interpret: bool = False,
) -> Array:
    """Compute `attention`, only for training and evaluation. Scores and sums are float32;
    `interpret`: run without a TPU, slowly."""
    assert mask.in_order, "caches are for other kernels"
    share = functools.partial(
        _on_one_device,
        window=mask.window,
        dtype=dtype,
        scale=scale,
        softcap=softcap,
        interpret=interpret,
    )
    return on_each_device(share, q, k, v, mask.q_segments)


def flash_on_one_device(q: Array, k: Array, v: Array, mask: Mask, **options: Any) -> Array:
    """Compute `flash_attention` for the rows and heads of one device."""
    options = {"softcap": None, "interpret": False} | options
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
    softcap: float | None,
    interpret: bool,
) -> Array:
    # The import is slow, and few runs need it.
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415

    T, N, _ = q.shape[1:]
    if window is None:
        head_mask = splash.CausalMask((T, T))
    else:
        # The number of keys that a query sees before and after its own column.
        head_mask = splash.LocalMask((T, T), window_size=(window - 1, 0), offset=0)
    block = _largest_block(T)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([head_mask] * N),
        block_sizes=splash.BlockSizes(
            block_q=block,
            block_kv=block,
            block_kv_compute=block,
            block_q_dkv=block,
            block_kv_dkv=block,
            block_kv_dkv_compute=block,
            block_q_dq=block,
            block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=softcap,
        residual_checkpoint_name=ATTENTION,
        interpret=interpret,
    )

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        out = kernel(q, k, v, splash.SegmentIds(segments, segments))
        return jnp.asarray(out, jnp.float32)

    # The kernel needs heads first, and scaled queries.
    q = (q * scale).astype(dtype).swapaxes(1, 2)
    k = k.astype(dtype).swapaxes(1, 2)
    v = v.astype(dtype).swapaxes(1, 2)
    return jax.vmap(row)(q, k, v, segments).swapaxes(1, 2)


def _largest_block(length: int) -> int:
    """Return the largest multiple of the lanes that divides a row's length."""
    for size in range(MAX_BLOCK, 0, -LANES):
        if length % size == 0:
            return size
    raise AssertionError(f"rows of {length} tokens are no multiple of {LANES}")
