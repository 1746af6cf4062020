"""cuDNN's fused attention, for GPUs: jax's own door to it, which knows causal order but no
documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array


def cudnn_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    *,
    offset: Array | int,
    dtype: str,
) -> Array:
    """See `attention`, but for segments, which are not looked at: a row must be one document, with
    its padding at the end.

    For training and evaluation: queries are as many as keys. jax raises where there is no cuDNN.
    """
    assert isinstance(offset, int) and offset == 0 and q.shape[1] == k.shape[1], (
        "caches are for other kernels"
    )
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn").astype(
        jnp.float32
    )
