"""What an objective is: the contract between those who write one and those who train with it.

The loop and the step know an objective only by its terms: (total, weight) pairs, divided once.

The loss of a batch is the sum over terms of factor * total / denominator. The denominators belong
to the whole batch and are known before the first gradient is taken, so that a gradient is the same
however the batch is split; and each term has its own, so that one term's gradient does not shrink
because another one counts more tokens.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.models.decoder import Decoder, Forward
from maxtrain.models.scan_layers import Said, added_by_name
from maxtrain.ops.quantity import NLL, Quantity
from maxtrain.ops.sums import Sum
from maxtrain.parallel.batches import PerToken

# The model that is trained; every other one is frozen as a whole.
POLICY = "policy"
# What the policy is compared with.
REFERENCE = "reference"
# The array of a batch with what the reference gives the targets of each position's document, the
# sum of their log-probabilities in nats, where that was found before.
REFERENCE_SUM = "reference_sum"
# inputs, targets, segment_ids, positions, loss_mask, each [B, T]; source [B]; in training also
# keys [B], of what is random; steps [B], the number of the step; and embedding_offset [B, T, D]
# where an objective wants one
Batch = dict[str, Array]
Models = Mapping[str, Decoder]
Scales = Mapping[str, Array | float]


class Result(NamedTuple):
    """Of one micro-batch: the loss to be differentiated, and what is recorded.

    The loss is the sum of scale * total over terms.
    """

    loss: Float[Array, ""]
    # By the names of quantities; `sources` has one of each source.
    sums: dict[str, Sum]
    # Of the policy's layers, by the names of their quantities.
    of_layers: dict[str, Sum]
    # What the policy's layers observed, by the path of the buffer that it is for.
    observed: dict[str, Array]


# The term of all that layers add to the loss.
LAYERS = "layers"


def num_tokens(batch: Batch) -> Float[Array, ""]:
    """How many tokens a batch has, targets or not, which is what the layers' term is divided by."""
    return (batch["segment_ids"] > 0).sum().astype(jnp.float32)


def with_layers(
    loss: Float[Array, ""], sums: dict[str, Sum], out: Forward, scales: Scales
) -> Result:
    """The result of a micro-batch, with what the policy's layers add to the loss and say.

    Args:
        loss, sums: the objective's own.
        out: the pass through the policy that they are of.
        scales: with that of LAYERS, which the objective's factors and denominators have.

    Raises:
        ValueError: a term and a number to record have one name.
    """
    twice = out.terms.keys() & out.stats.keys()
    if twice:
        raise ValueError(
            f"layers give {sorted(twice)} both as a term of the loss and as a number to record. "
            "Give the number another name: terms are recorded, too."
        )
    loss = with_terms(loss, out.terms, scales)
    return Result(loss, sums, out.terms | out.stats, out.observed)


def with_terms(
    loss: Float[Array, ""], terms: Mapping[str, Sum], scales: Scales
) -> Float[Array, ""]:
    """The loss with the terms that layers have."""
    for term in terms.values():
        loss = loss + scales[LAYERS] * term.total
    return loss


def also_said(result: Result, said: Said, scales: Scales) -> Result:
    """The result, and what further layers of the policy say."""
    return Result(
        with_terms(result.loss, said.terms, scales),
        result.sums,
        added_by_name(result.of_layers, said.terms | said.stats),
        result.observed | said.observed_in_model(),
    )


class FirstPass(NamedTuple):
    """What is found with the models over a whole batch, before its first gradient.

    rows: from the whole batch, the arrays that the pass reads, whose first dim is rows.
    measure: (models, some of these rows) -> sums, which add up over any split of the rows. The mean
        of each is in the batch that `forward` gets, by its name, [B], and has no gradient.
    """

    rows: Callable[[Batch], Batch]
    measure: Callable[[Models, Batch], dict[str, Sum]]


def means_of_rows(sums: Mapping[str, Sum], rows: int) -> Batch:
    """The mean of each sum for each row, [B]."""
    return {name: jnp.broadcast_to(found.mean(), (rows,)) for name, found in sums.items()}


class Objective(NamedTuple):
    """A loss of named terms.

    factors: what each term's mean is multiplied with.
    denominators: of the terms of a whole batch, from the batch alone; they must add up over any
        split of its rows.
    forward: (models, micro-batch, scales) -> Result, where scales holds factor / denominator for
        each term. Its sums have at least the one that `counted` names. What the policy's layers say
        is added by `with_layers`.
    models: names of those that it needs, the policy among them. Only the policy is trained.
    loss: the sum whose mean is the loss of a run: it is recorded as `loss`, drawn, watched for
        anomalies, and tells which evaluation is the best. One of the sums that are also evaluated.
    recorded: what is recorded of a step beside the loss, in the order of the record.
    evaluated: what is recorded of an evaluation beside what is counted.
    arrays: what a batch for training has beside what every batch has: float32, of each token ("BT")
        or of each row ("B"), or several numbers of each token.
    first_pass: what must be known of a whole batch before; None: nothing.
    counted: the sum whose weight is the summed loss mask of the targets, and whose total is finite
        if the loss is: `nll`, the negative log-likelihood of the targets, where there is one.
    """

    factors: Mapping[str, float]
    denominators: Callable[[Batch], dict[str, Array]]
    forward: Callable[[Models, Batch, Scales], Result]
    models: tuple[str, ...] = (POLICY,)
    loss: Quantity = NLL
    recorded: tuple[Quantity, ...] = ()
    evaluated: tuple[Quantity, ...] = ()
    arrays: Mapping[str, str | PerToken] = MappingProxyType({})
    first_pass: FirstPass | None = None
    counted: str = NLL.name

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
        """What is evaluated: what is counted, and what `evaluated` names. Nothing is random. The
        batch is a whole one to the first pass."""
        batch = {name: x for name, x in batch.items() if name not in ("keys", "steps")}
        if self.first_pass is not None:
            sums = self.first_pass.measure(models, self.first_pass.rows(batch))
            batch |= means_of_rows(sums, batch["inputs"].shape[0])
        sums = self.forward(models, batch, dict.fromkeys(self.factors, 0.0)).sums
        chosen = {self.counted: sums[self.counted]}
        for quantity in self.evaluated:
            chosen[quantity.name] = sums[quantity.name]
        return chosen
