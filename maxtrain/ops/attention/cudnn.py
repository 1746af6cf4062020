"""cuDNN's fused attention, for GPUs: jax's own door to it, which knows causal order and windows,
but no documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask


def cudnn_attention(q: Array, k: Array, v: Array, mask: Mask, *, dtype: str, scale: float) -> Array:
    """See `attention`, but for segments, which are not looked at: a row must be one document, with
    its padding at the end.

    For training and evaluation: queries and keys are the same tokens, in order. jax raises where
    there is no cuDNN.
    """
    assert mask.in_order, "caches are for other kernels"
    local_window_size = None
    if mask.window is not None:
        # How many keys before its own column a query sees, and how many after.
        local_window_size = (mask.window - 1, 0)
    out = jax.nn.dot_product_attention(
        q.astype(dtype),
        k.astype(dtype),
        v.astype(dtype),
        scale=scale,
        is_causal=True,
        local_window_size=local_window_size,
        implementation="cudnn",
    )
    return out.astype(jnp.float32)
