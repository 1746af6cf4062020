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

    def reduced(self, how: Literal["mean", "sum"]) -> Float[Array, "*s"]:
        """The number that is recorded: the mean, or the total."""
        if how == "sum":
            return self.total
        return self.mean()
