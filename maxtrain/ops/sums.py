"""Sums with weights: means are made at the end, once, never of means."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class WeightedSum(NamedTuple):
    """A total and its weight, to be added up first and divided once, at the end; several at once
    where there are dims."""

    total: Float[Array, "*s"]
    weight: Float[Array, "*s"]

    def mean(self) -> Float[Array, "*s"]:
        """total / weight; 0 where there is no weight."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)

    def reduced(self, how: Literal["mean", "sum"]) -> Float[Array, "*s"]:
        """The number that is recorded: the mean, or the total."""
        if how == "sum":
            return self.total
        return self.mean()


def added(total: Array, part: Array) -> Array:
    """A total, in whose type it stays, and one more part; added in float32, or as integers."""
    if jnp.issubdtype(total.dtype, jnp.integer):
        return total + part
    return (total.astype(jnp.float32) + part.astype(jnp.float32)).astype(total.dtype)


def sums_of_documents(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B S"]:
    """The sum of values over each document of each row, at the number of its segment; S is T + 1,
    since each document has a token, and 0 is padding's."""

    def of_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(values, segments, segments.size + 1)

    return jax.vmap(of_row)(values, segments)


def sums_of_pairs(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B P 2"]:
    """The sum of values over each document of each row, by pair: documents 2 k - 1 and 2 k of a row
    are a pair.

    A row has T // 2 pairs at most, since each document has a token.
    """
    return by_pair(sums_of_documents(values, segments))


def numbers_of_documents(
    values: Float[Array, "B T"], segments: Int[Array, "B T"]
) -> Float[Array, "B S"]:
    """The number that all positions of a document have, of each document of each row, at the
    number of its segment, bit for bit; 0 where there is none. S as of `sums_of_documents`."""

    def of_row(values: Array, segments: Array) -> Array:
        return jax.ops.segment_max(values, segments, segments.size + 1)

    found = jax.vmap(of_row)(values, segments)
    return jnp.where(jnp.isneginf(found), 0.0, found)


def by_pair(of_documents: Float[Array, "B S"]) -> Float[Array, "B P 2"]:
    """Numbers of documents, at the numbers of their segments, as those of pairs."""
    rows, size = of_documents.shape
    most = (size - 1) // 2
    return of_documents[:, 1 : 2 * most + 1].reshape(rows, most, 2)
