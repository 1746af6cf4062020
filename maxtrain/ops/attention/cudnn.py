"""cuDNN's fused attention for GPUs through jax's interface, which supports causal order and
windows, but not documents."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask


def cudnn_attention(q: Array, k: Array, v: Array, mask: Mask, *, dtype: str, scale: float) -> Array:
    """Compute `attention` without regard to segments: a row must be one document, with its padding
    at the end.

    Only for training and evaluation: queries and keys are the same tokens, in order. jax raises an
    error without cuDNN.
    """
    assert mask.in_order, "caches are for other kernels"
    local_window_size = None
    if mask.window is not None:
        # The number of keys that a query sees before and after its own column.
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
