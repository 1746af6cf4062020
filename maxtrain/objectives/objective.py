"""The interface of objectives, between the code that defines them and the code that trains with
them.

The loop and the step know an objective only by its terms: (total, weight) pairs, divided once.

The loss of a batch is the sum over terms of factor * total / denominator. Denominators belong to
the whole batch and are known before the first gradient, so a gradient does not depend on how the
batch is split. Each term has its own denominator, so one term's gradient does not shrink because
another term counts more tokens.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.models.decoder import Decoder, DecoderOut
from maxtrain.models.scan_layers import LayerAux, added_by_name
from maxtrain.ops.quantity import NLL, Metric
from maxtrain.ops.sums import WeightedSum
from maxtrain.parallel.batches import PerToken

# The model that is trained; every other one is frozen as a whole.
POLICY = "policy"
# The model that the policy is compared with.
REFERENCE = "reference"
# The array of a batch with the stored reference log-probability, in nats, of the targets of each
# position's document.
REFERENCE_SUM = "reference_sum"
# inputs, targets, segment_ids, positions, loss_mask, each [B, T]; source [B]; in training also
# random keys [B]; steps [B], the number of the step; and embedding_offset [B, T, D] if an objective
# uses one
Batch = dict[str, Array]
Models = Mapping[str, Decoder]
Scales = Mapping[str, Array | float]


class ObjectiveOutput(NamedTuple):
    """The result of one micro-batch: the loss to differentiate, and the metrics.

    The loss is the sum of scale * total over terms.
    """

    loss: Float[Array, ""]
    # Sums by the names of metrics; `sources` has one entry for each source.
    sums: dict[str, WeightedSum]
    # Sums of the policy's layers, by the names of their metrics.
    of_layers: dict[str, WeightedSum]
    # Observations of the policy's layers, by the path of the buffer that they update.
    buffer_inputs: dict[str, Array]


# The loss term of all auxiliary losses of layers.
LAYERS = "layers"


def num_tokens(batch: Batch) -> Float[Array, ""]:
    """Return how many tokens a batch has, targets or not. It divides the layers' term."""
    return (batch["segment_ids"] > 0).sum().astype(jnp.float32)


def with_layers(
    loss: Float[Array, ""], sums: dict[str, WeightedSum], out: DecoderOut, scales: Scales
) -> ObjectiveOutput:
    """Return the result of a micro-batch, with the auxiliary losses and metrics of the policy's
    layers.

    Args:
        loss, sums: the objective's own.
        out: the forward pass of the policy.
        scales: the scale of each term; the objective's factors and denominators must include
            LAYERS.

    Raises:
        ValueError: an auxiliary loss and a metric have one name.
    """
    twice = out.aux_losses.keys() & out.metrics.keys()
    if twice:
        raise ValueError(
            f"layers give {sorted(twice)} both as a term of the loss and as a number to record. "
            "Give the number another name: terms are recorded, too."
        )
    loss = with_terms(loss, out.aux_losses, scales)
    return ObjectiveOutput(loss, sums, out.aux_losses | out.metrics, out.buffer_inputs)


def with_terms(
    loss: Float[Array, ""], terms: Mapping[str, WeightedSum], scales: Scales
) -> Float[Array, ""]:
    """Add the auxiliary losses of layers to the loss."""
    for term in terms.values():
        loss = loss + scales[LAYERS] * term.total
    return loss


def with_layer_aux(result: ObjectiveOutput, aux: LayerAux, scales: Scales) -> ObjectiveOutput:
    """Add the auxiliary losses, metrics and observations of further layers to a result."""
    return ObjectiveOutput(
        with_terms(result.loss, aux.aux_losses, scales),
        result.sums,
        added_by_name(result.of_layers, aux.aux_losses | aux.metrics),
        result.buffer_inputs | aux.buffer_inputs_in_model(),
    )


class FirstPass(NamedTuple):
    """A pass over the whole batch, without gradients, before its first gradient.

    Attributes:
        rows: returns the arrays that the pass reads, from the whole batch; their first dim is rows.
        measure: (models, some of these rows) -> sums, which add up over any split of the rows. The
            mean of each is in the batch of `forward`, by its name, [B], without a gradient.
    """

    rows: Callable[[Batch], Batch]
    measure: Callable[[Models, Batch], dict[str, WeightedSum]]


def means_of_rows(sums: Mapping[str, WeightedSum], rows: int) -> Batch:
    """Broadcast the mean of each sum to all rows, [B]."""
    return {name: jnp.broadcast_to(found.mean(), (rows,)) for name, found in sums.items()}


class Objective(NamedTuple):
    """A loss of named terms, with its metrics.

    Attributes:
        factors: the factor of each term's mean.
        denominators: returns the denominator of each term from the whole batch; they must add up
            over any split of its rows.
        forward: (models, micro-batch, scales) -> Result. `scales` holds factor / denominator for
            each term. The sums include the one that `counted` names. `with_layers` adds the terms
            of the policy's layers.
        models: names of the models that it needs, the policy among them. Only the policy is
            trained.
        loss: the metric whose mean is the loss of a run: it is recorded as `loss`, plotted, watched
            for anomalies, and decides the best evaluation. It is one of the evaluated sums.
        recorded: metrics of a step beside the loss, in the order of the record.
        evaluated: metrics of an evaluation beside `counted`.
        arrays: additional arrays of a training batch: float32, per token ("BT") or per row ("B"),
            or several numbers per token.
        first_pass: the pass over the whole batch that must come first; None: there is none.
        counted: the sum whose weight is the summed loss mask of the targets, and whose total is
            finite if the loss is: `nll`, the negative log-likelihood of the targets, if there is
            one.
    """

    factors: Mapping[str, float]
    denominators: Callable[[Batch], dict[str, Array]]
    forward: Callable[[Models, Batch, Scales], ObjectiveOutput]
    models: tuple[str, ...] = (POLICY,)
    loss: Metric = NLL
    recorded: tuple[Metric, ...] = ()
    evaluated: tuple[Metric, ...] = ()
    arrays: Mapping[str, str | PerToken] = MappingProxyType({})
    first_pass: FirstPass | None = None
    counted: str = NLL.name

    def scales(self, batch: Batch, loss_scale: Array | float = 1.0) -> dict[str, Array]:
        """Return factor * loss_scale / denominator of each term.

        The denominator is 1 if the whole batch has nothing to count for a term.
        """
        counts = self.denominators(batch)
        scales = {}
        for name, factor in self.factors.items():
            count = counts[name]
            scales[name] = factor * loss_scale / jnp.where(count > 0, count, 1.0)
        return scales

    def evaluate(self, models: Models, batch: Batch) -> dict[str, WeightedSum]:
        """Evaluate `counted` and the metrics in `evaluated`, without noise. The first pass treats
        this batch as the whole batch."""
        batch = {name: x for name, x in batch.items() if name not in ("keys", "steps")}
        if self.first_pass is not None:
            sums = self.first_pass.measure(models, self.first_pass.rows(batch))
            batch |= means_of_rows(sums, batch["inputs"].shape[0])
        sums = self.forward(models, batch, dict.fromkeys(self.factors, 0.0)).sums
        chosen = {self.counted: sums[self.counted]}
        for quantity in self.evaluated:
            chosen[quantity.name] = sums[quantity.name]
        return chosen
