"""Sums with weights: means are made at the end, once, never of means."""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Sum(NamedTuple):
    """A total and its weight, to be added up first and divided once, at the end; several at once
    where there are dims."""

    total: Float[Array, "*s"]
    weight: Float[Array, "*s"]

    def mean(self) -> Float[Array, "*s"]:
        """total / weight; 0 where there is no weight."""
        return self.total / jnp.where(self.weight > 0, self.weight, 1.0)


class Quantity(NamedTuple):
    """One number that is recorded beside the loss, of a sum over the whole batch of a step, or over
    a whole evaluation."""

    # In the records.
    name: str
    # Such as "nats per target".
    unit: str
    # mean: the total divided once by its weight; sum: the total.
    reduction: Literal["mean", "sum"] = "mean"

    def of(self, found: Sum) -> Float[Array, ""]:
        """The number that is recorded of this sum."""
        if self.reduction == "sum":
            return found.total
        return found.mean()
