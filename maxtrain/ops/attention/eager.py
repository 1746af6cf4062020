"""The oracle of attention: the equation itself, with all scores at once, differentiated by
autodiff."""

import jax
import jax.numpy as jnp
from jaxtyping import Array

from maxtrain.ops.attention.mask import Mask
from maxtrain.ops.dropout import dropout as drop

# The score of a masked key. It is finite, so that a row without visible keys gives a mean and not
# NaN.
MASKED = -1e30


def eager_attention(
    q: Array,
    k: Array,
    v: Array,
    mask: Mask,
    *,
    dtype: str,
    scale: float,
    softcap: float | None = None,
    sinks: Array | None = None,
    dropout: tuple[Array, float] | None = None,
) -> Array:
    """Compute `attention`; `dropout` is (keys, rate). Products are float32: inputs stay rounded,
    sums are exact."""
    B, T, N, H = q.shape
    K = k.shape[2]
    q = _rounded(q, dtype).reshape(B, T, K, N // K, H)
    k = _rounded(k, dtype)
    v = _rounded(v, dtype)
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k, precision="highest") * scale
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    visible = mask.visible()[:, None, None]
    scores = jnp.where(visible, scores, MASKED)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        weights = _softmax_with_sinks(scores, sinks)
    if dropout is not None:
        keys, rate = dropout
        weights = drop(weights, keys, rate)
    out = jnp.einsum("bkgts,bskh->btkgh", weights, v, precision="highest")
    return out.reshape(B, T, N, -1)


def _rounded(x: Array, dtype: str) -> Array:
    return x.astype(dtype).astype(jnp.float32)


def _softmax_with_sinks(scores: Array, sinks: Array) -> Array:
    """Return the softmax over the keys [B, K, G, T, S] and the sink of the head, without the sink's
    weight."""
    B, K, G, T, _ = scores.shape
    column = sinks.astype(jnp.float32).reshape(1, K, G, 1, 1)
    column = jnp.broadcast_to(column, (B, K, G, T, 1))
    weights = jax.nn.softmax(jnp.concatenate([scores, column], axis=-1), axis=-1)
    return weights[..., :-1]
