"""Normalisation, always computed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def layer_norm(
    x: Float[Array, "*b D"], scale: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*b D"]:
    """Return (x - mean(x)) / sqrt(var(x) + eps) * scale + bias over the last dim, float32.

    Source: Ba et al. 2016, https://arxiv.org/abs/1607.06450.
    """
    x = x.astype(jnp.float32)
    centred = x - jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
    normalised = centred * jax.lax.rsqrt(variance + eps)
    return normalised * scale.astype(jnp.float32) + bias.astype(jnp.float32)


def rms_norm(
    x: Float[Array, "*b D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*b D"]:
    """Return x / sqrt(mean(x^2) + eps) * scale over the last dim, float32.

    Source: Zhang and Sennrich 2019, https://arxiv.org/abs/1910.07467.
    """
    x = x.astype(jnp.float32)
    mean_square = jnp.mean(x * x, axis=-1, keepdims=True)
    normalised = x * jax.lax.rsqrt(mean_square + eps)
    return normalised * scale.astype(jnp.float32)
