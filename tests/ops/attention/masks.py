"""Masks that several tests of attention need."""

import jax
import jax.numpy as jnp

from maxtrain.ops.attention.mask import Mask


def of_cache(segments, start, num_queries):
    """Queries that are the newest columns of a cache.

    Args:
        segments: [B, S] of all its columns; negative where there is nothing yet.
        start: column of the first query.
        num_queries: how many columns have queries, T.
    """
    segments = jnp.asarray(segments)
    own = jax.lax.dynamic_slice_in_dim(segments, start, num_queries, axis=1)
    columns = jnp.arange(num_queries) + start
    return Mask(columns, jnp.arange(segments.shape[1]), own, segments)
