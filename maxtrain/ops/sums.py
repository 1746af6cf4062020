"""Weighted sums: means are computed once, at the end, never from other means."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class WeightedSum(NamedTuple):
    """A total and its weight, which are summed first and divided once, at the end; with dims,
    several at once."""

    total: Float[Array, "*s"]
    weight: Float[Array, "*s"]

    def mean(self) -> Float[Array, "*s"]:
        """Return total / weight; 0 if the weight is 0."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)

    def reduced(self, how: Literal["mean", "sum"]) -> Float[Array, "*s"]:
        """Return the number to record: the mean, or the total."""
        if how == "sum":
            return self.total
        return self.mean()


def added(total: Array, part: Array) -> Array:
    """Add one more part to a total, in float32 or as integers; the result has the type of the
    total."""
    if jnp.issubdtype(total.dtype, jnp.integer):
        return total + part
    return (total.astype(jnp.float32) + part.astype(jnp.float32)).astype(total.dtype)


def sums_of_documents(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B S"]:
    """Sum values over each document of each row, by segment number; S is T + 1, because each
    document has a token, and 0 is padding."""

    def of_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, segments.size + 1)

    return jax.vmap(of_row)(values, segments)


def sums_of_pairs(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B P 2"]:
    """Sum values over each document of each row, by pair: documents 2 k - 1 and 2 k of a row are a
    pair.

    A row has at most T // 2 pairs, because each document has a token.
    """
    return by_pair(sums_of_documents(values, segments))


def numbers_of_documents(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B S"]:
    """Return the number that all positions of a document have, for each document of each row, by
    segment number, bit for bit; 0 for missing documents. S as for `sums_of_documents`."""

    def of_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_max(values, segments, segments.size + 1)

    found = jax.vmap(of_row)(values, segments)
    return jnp.where(jnp.isneginf(found), 0.0, found)


def by_pair(of_documents: Float[Array, "B S"]) -> Float[Array, "B P 2"]:
    """Reshape numbers of documents, by segment number, to numbers of pairs."""
    rows, size = of_documents.shape
    most = (size - 1) // 2
    return of_documents[:, 1 : 2 * most + 1].reshape(rows, most, 2)
