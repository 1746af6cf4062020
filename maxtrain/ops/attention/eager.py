"""The oracle: attention as the equation says it, every score at once, differentiated by
autodiff."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from maxtrain.ops.dropout import dropout as drop

MASKED = -1e30  # finite, so that a row that sees nothing gives a mean and no NaN


def attention_mask(
    q_segments: Int[Array, "B T"],
    kv_segments: Int[Array, "B S"],
    offset: Int[Array, ""] | np.integer | int,
) -> Bool[Array, "B T S"]:
    """True where query t may see key s: not later than itself, and of the same segment.

    A constant offset may come as a numpy number: jax makes one of what it saves for a backward
    pass.
    """
    columns = jnp.arange(q_segments.shape[1]) + offset
    causal = jnp.arange(kv_segments.shape[1])[None, :] <= columns[:, None]
    return causal[None] & (q_segments[:, :, None] == kv_segments[:, None, :])


def eager_attention(
    q: Array,
    k: Array,
    v: Array,
    q_segments: Array,
    kv_segments: Array,
    *,
    offset: Array | int,
    dtype: str,
    dropout: tuple[Array, float] | None = None,
) -> Array:
    """See `attention`; `dropout` is (keys, rate). Products are float32: rounded inputs stay
    rounded, sums are exact."""
    B, T, N, H = q.shape
    q, k, v = (x.astype(dtype).astype(jnp.float32) for x in (q, k, v))
    q = q.reshape(B, T, k.shape[2], -1, H)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * H**-0.5
    mask = attention_mask(q_segments, kv_segments, offset)[:, None, None]
    weights = jax.nn.softmax(jnp.where(mask, scores, MASKED), axis=-1)
    if dropout is not None:
        weights = drop(weights, *dropout)
    return jnp.einsum("bkgts,bskh->btkgh", weights, v, precision="highest").reshape(B, T, N, H)
