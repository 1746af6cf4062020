"""What an objective is: the contract between those who write one and those who train with it.

The loop and the step know an objective only by its terms: (total, weight) pairs, divided once.

The loss of a batch is the sum over terms of factor * total / denominator. The denominators belong
to the whole batch and are known before the first gradient is taken, so that a gradient is the same
however the batch is split; and each term has its own, so that one term's gradient does not shrink
because another one counts more tokens.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.models.decoder import Decoder
from maxtrain.ops.sums import Sum

# The model that is trained; every other one is frozen as a whole.
POLICY = "policy"
# inputs, targets, segment_ids, positions, loss_mask, each [B, T]; source [B]; in training also
# keys [B], of what is random; embedding_offset [B, T, D] where an objective wants one
Batch = dict[str, Array]
Models = Mapping[str, Decoder]
Scales = Mapping[str, Array | float]


class Result(NamedTuple):
    """Of one micro-batch: the loss to be differentiated, and what is recorded.

    The loss is the sum of scale * total over terms.
    """

    loss: Float[Array, ""]
    sums: dict[str, Sum]


class Quantity(NamedTuple):
    """One number that is recorded beside the loss, of a sum of `Result.sums` over the whole batch
    of a step, or over a whole evaluation."""

    # In `Result.sums` and in the records.
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


class Objective(NamedTuple):
    """A loss of named terms.

    factors: what each term's mean is multiplied with.
    denominators: of the terms of a whole batch, from the batch alone; they must add up over any
        split of its rows.
    forward: (models, micro-batch, scales) -> Result, where scales holds factor / denominator for
        each term. Its sums have at least `nll`, the summed negative log-likelihood of the targets
        and their summed loss mask.
    models: names of those that it needs, the policy among them. Only the policy is trained.
    recorded: what is recorded of a step beside `nll`, in the order of the record.
    evaluated: what is recorded of an evaluation beside `nll`.
    """

    factors: Mapping[str, float]
    denominators: Callable[[Batch], dict[str, Array]]
    forward: Callable[[Models, Batch, Scales], Result]
    models: tuple[str, ...] = (POLICY,)
    recorded: tuple[Quantity, ...] = ()
    evaluated: tuple[Quantity, ...] = ()

    def scales(self, batch: Batch, loss_scale: Array | float = 1.0) -> dict[str, Array]:
        """factor * loss_scale / denominator of each term.

        Where the whole batch has nothing of a term, the denominator is 1.
        """
        counts = self.denominators(batch)
        scales = {}
        for name, factor in self.factors.items():
            count = counts[name]
            scales[name] = factor * loss_scale / jnp.where(count > 0, count, 1.0)
        return scales

    def evaluate(self, models: Models, batch: Batch) -> dict[str, Sum]:
        """What is evaluated: `nll`, the negative log-likelihood of the targets, and what
        `evaluated` names. Nothing is random."""
        batch = {name: x for name, x in batch.items() if name != "keys"}
        sums = self.forward(models, batch, dict.fromkeys(self.factors, 0.0)).sums
        chosen = {"nll": sums["nll"]}
        for quantity in self.evaluated:
            chosen[quantity.name] = sums[quantity.name]
        return chosen
