"""Attention of one query of each row to a KV cache, for decoding.

There is one block of queries, so all scores fit in memory at once. The columns of a head are
contiguous in a cache, so keys are multiplied without a transpose. In the training layout, XLA first
transposes keys and values, which costs several times the products.
"""

import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.eager import MASKED
from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.einsum import contract


def is_for(q: Array, mask: Mask) -> bool:
    """Return whether this module supports these queries."""
    return q.shape[1] == 1 and not mask.in_order


def one_query_attention(
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
    """Compute `attention` for T = 1."""
    B, _, N, H = q.shape
    K = k.shape[2]
    q_BKGH = q.astype(dtype).reshape(B, K, N // K, H)
    k_BKSH = k.astype(dtype).swapaxes(1, 2)
    v_BKSH = v.astype(dtype).swapaxes(1, 2)
    scores_BKGS = contract("bkgh,bksh->bkgs", q_BKGH, k_BKSH, in_place=True) * scale
    if softcap is not None:
        scores_BKGS = softcap * jnp.tanh(scores_BKGS / softcap)
    visible = mask.visible()[:, None]
    scores_BKGS = jnp.where(visible, scores_BKGS, MASKED)
    top = scores_BKGS.max(-1, keepdims=True)
    sink = None
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(K, N // K, 1)
        top = jnp.maximum(top, sink)
    weights_BKGS = jnp.exp(scores_BKGS - top)
    total = weights_BKGS.sum(-1, keepdims=True)
    if sink is not None:
        total += jnp.exp(sink - top)
    out_BKGH = contract("bkgs,bksh->bkgh", weights_BKGS.astype(dtype), v_BKSH) / total
    return out_BKGH.reshape(B, 1, N, v.shape[-1])
