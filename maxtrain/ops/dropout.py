"""Random operations of training, with a random key for each row.

A row's draws depend on its key and its shape only. They are the same on every mesh, in any batch of
rows and for every split into micro-batches, and repeat when a layer is recomputed. Computation is
in float32, and rounded to the type of the input.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Key


def fold(keys: Key[Array, " B"], place: Array | np.uint32 | int) -> Key[Array, " B"]:
    """Fold one place, such as a layer's index, into the key of each row."""
    return jax.vmap(jax.random.fold_in, (0, None))(keys, place)


def dropout(x: Float[Array, "B *s"], keys: Key[Array, " B"], rate: float) -> Float[Array, "B *s"]:
    """Set each number to 0 with this probability, else divide it by 1 - rate, so that the mean
    stays.

    Source: Srivastava et al. 2014, https://jmlr.org/papers/v15/srivastava14a.html.
    """
    if rate == 0:
        return x

    def kept(key: Array) -> Array:
        return jax.random.bernoulli(key, 1 - rate, x.shape[1:])

    keep = jax.vmap(kept)(keys)
    scaled = x.astype(jnp.float32) / (1 - rate)
    return jnp.where(keep, scaled, 0.0).astype(x.dtype)


def drop_rows(
    x: Float[Array, "B *s"], keys: Key[Array, " B"], rate: Float[Array, ""] | float
) -> Float[Array, "B *s"]:
    """Set each row to 0 with this probability, else divide it by 1 - rate.

    Source: Huang et al. 2016, https://arxiv.org/abs/1603.09382. Differs: scaled in training, not in
        evaluation.
    """

    def kept(key: Array) -> Array:
        return jax.random.bernoulli(key, 1 - rate)

    other_dims = (1,) * (x.ndim - 1)
    keep = jax.vmap(kept)(keys).reshape(-1, *other_dims)
    scaled = x.astype(jnp.float32) / (1 - rate)
    return jnp.where(keep, scaled, 0.0).astype(x.dtype)


def embedding_noise(
    x: Float[Array, "B T D"], keys: Key[Array, " B"], alpha: float
) -> Float[Array, "B T D"]:
    """Add uniform noise of at most alpha / sqrt(T * D).

    Source: NEFTune, Jain et al. 2023, https://arxiv.org/abs/2310.05914. T is the row's length,
        padding and all.
    """
    if alpha == 0:
        return x
    T, D = x.shape[1:]

    def drawn(key: Array) -> Array:
        return jax.random.uniform(key, (T, D), minval=-1.0, maxval=1.0)

    noise = jax.vmap(drawn)(keys)
    noisy = x.astype(jnp.float32) + noise * (alpha / (T * D) ** 0.5)
    return noisy.astype(x.dtype)
