"""Flash attention for TPUs: jax's splash kernel, which keeps documents apart and skips what is
masked, on each device's share.

Source: jax.experimental.pallas.ops.tpu.splash_attention; Dao et al. 2022,
    https://arxiv.org/abs/2205.14135.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.parallel.sharding import partition_spec

LANES, MAX_BLOCK = (
    128,
    512,
)  # rows are multiples of the lanes of the vector unit; larger blocks need more of its memory


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    *,
    offset: Array | int,
    dtype: str,
    interpret: bool = False,
) -> Array:
    """See `attention`; for training and evaluation. Scores and sums are float32; `interpret`:
    without a TPU, slowly."""
    assert isinstance(offset, int) and offset == 0 and q.shape[1] == k.shape[1], (
        "caches are for other kernels"
    )
    one = functools.partial(_on_one_device, dtype=dtype, interpret=interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return one(q, k, v, q_segments)
    # XLA can't split a kernel that it did not write: each device is given its rows and heads.
    rows = ("activation_batch", "activation_length")
    names = [(*rows, "heads", "head_dim"), *[(*rows, "kv_heads", "head_dim")] * 2, rows]
    specs = [partition_spec(axes, mesh.shape) for axes in names]
    return jax.shard_map(one, in_specs=tuple(specs), out_specs=specs[0], check_vma=False)(
        q, k, v, q_segments
    )


def _on_one_device(
    q: Array, k: Array, v: Array, segments: Array, *, dtype: str, interpret: bool
) -> Array:
    from jax.experimental.pallas.ops.tpu import splash_attention as splash  # noqa: PLC0415 - takes its time, and few need it

    T, N, H = q.shape[1:]
    block = next(size for size in range(MAX_BLOCK, 0, -LANES) if T % size == 0)
    forward = splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=block)
    backward = {"block_q_dkv": block, "block_kv_dkv": block, "block_kv_dkv_compute": block}
    sizes = dataclasses.replace(forward, **backward, block_q_dq=block, block_kv_dq=block)
    kernel = splash.make_splash_mha(
        splash.MultiHeadMask([splash.CausalMask((T, T))] * N),
        block_sizes=sizes,
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )
    q, k, v = (x.astype(dtype).swapaxes(1, 2) for x in (q * H**-0.5, k, v))

    def row(q: Array, k: Array, v: Array, segments: Array) -> Array:
        return jnp.asarray(kernel(q, k, v, splash.SegmentIds(segments, segments)), jnp.float32)

    return jax.vmap(row)(q, k, v, segments).swapaxes(1, 2)
