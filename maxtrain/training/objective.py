"""What is minimised. The loop and the step know an objective only by its terms: (total, weight)
pairs, divided once.

The loss of a batch is the sum over terms of factor * total / denominator. The denominators belong
to the whole batch and are known before the first gradient is taken, so that a gradient is the same
however the batch is split; and each term has its own, so that one term's gradient does not shrink
because another one counts more tokens.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.config.schema import LossConfig, RegularizationConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.layers import Noise
from maxtrain.ops.cross_entropy import cross_entropy, num_chunks
from maxtrain.ops.sums import Sum
from maxtrain.parallel.sharding import batch_shards

# inputs, targets, segment_ids, positions, loss_mask, each [B, T]; source [B]; in training also
# keys [B], of what is random; embedding_offset [B, T, D] where an objective wants one
Batch = dict[str, Array]
Scales = Mapping[str, Array | float]


class Result(NamedTuple):
    """Of one micro-batch: `loss`, the sum of scale * total over terms, to be differentiated; and
    what is recorded."""

    loss: Float[Array, ""]
    sums: dict[str, Sum]


class Objective(NamedTuple):
    """A loss of named terms.

    factors: what each term's mean is multiplied with.
    denominators: of the terms of a whole batch, from the batch alone; they must add up over any
        split of its rows.
    forward: (model, micro-batch, scales) -> Result, where scales holds factor / denominator for
        each term. Its sums have at least `nll`, the summed negative log-likelihood of the targets
        and their summed loss mask.
    """

    factors: Mapping[str, float]
    denominators: Callable[[Batch], dict[str, Array]]
    forward: Callable[[Decoder, Batch, Scales], Result]

    def scales(self, batch: Batch, loss_scale: Array | float = 1.0) -> dict[str, Array]:
        """factor * loss_scale / denominator of each term; a term that the whole batch has nothing
        of gets factor."""
        counts = self.denominators(batch)
        return {
            name: factor * loss_scale / jnp.where(counts[name] > 0, counts[name], 1.0)
            for name, factor in self.factors.items()
        }

    def nll(self, model: Decoder, batch: Batch) -> Sum:
        """Negative log-likelihood of the targets, for evaluation: no other term, nothing random."""
        batch = {name: x for name, x in batch.items() if name != "keys"}
        return self.forward(model, batch, dict.fromkeys(self.factors, 0.0)).sums["nll"]


PLAIN, NO_NOISE = LossConfig(), RegularizationConfig()


def next_token(
    loss: LossConfig = PLAIN,
    normalize: str = "tokens",
    num_sources: int = 0,
    regularization: RegularizationConfig = NO_NOISE,
) -> Objective:
    """Cross-entropy of the next token, with label smoothing and z-loss if the config asks for them.

    Args:
        loss: factors.
        normalize: what the cross-entropy is a mean of. `tokens`: all targets weigh the same;
            `sequences`: all documents of all rows do, whatever their length (a document that is cut
                by a row's end counts in each row); `constant`:
            divided by the number of positions, targets or not.
        num_sources: also record the loss of each of so many sources, in `sources`; 0: don't.
        regularization: what is random where the batch has keys.
    """
    factors = {"nll": 1.0} | ({"z": loss.z_loss} if loss.z_loss else {})

    def denominators(batch: Batch) -> dict[str, Array]:
        mask = batch["loss_mask"].astype(jnp.float32)
        counts = {
            "tokens": mask.sum,
            "sequences": lambda: _sequences(batch).sum(),
            "constant": lambda: jnp.float32(mask.size),
        }
        return {"nll": counts[normalize](), "z": mask.sum()}

    def forward(model: Decoder, batch: Batch, scales: Scales) -> Result:
        offset = batch.get("embedding_offset")
        noise = (
            Noise(regularization, batch["keys"])
            if regularization != NO_NOISE and "keys" in batch
            else None
        )
        hidden = model.hidden(
            batch["inputs"], batch["segment_ids"], batch["positions"], offset, noise
        )
        rows, length = batch["targets"].shape
        mask = batch["loss_mask"].astype(jnp.float32)
        weights = mask if normalize != "sequences" else _sequences(batch)
        tokens = cross_entropy(
            hidden,
            model.output_matrix(),
            batch["targets"],
            weights * scales["nll"],
            chunks=num_chunks(length, -(-rows // batch_shards()), model.config.loss_chunk),
            dtype=model.precision.compute,
            mask=mask,
            z_scale=jnp.float32(scales["z"]) if "z" in scales else None,
            smoothing=loss.label_smoothing,
            logits=model.precision.output,
        )
        targets = mask.sum(-1)
        sums = {
            "nll": Sum(tokens.nll.sum(), targets.sum()),
            "z": Sum(tokens.z.sum(), targets.sum()),
        }
        if num_sources:
            sums["sources"] = Sum(
                *(
                    jax.ops.segment_sum(x, batch["source"], num_sources)
                    for x in (tokens.nll, targets)
                )
            )
        return Result(
            tokens.loss, {name: sums[name] for name in ("nll", *factors, "sources") if name in sums}
        )

    return Objective(factors, denominators, forward)


def _sequences(batch: Batch) -> Float[Array, "B T"]:
    """The loss mask, divided by its sum over the token's own document in the row: every document
    with a target sums to 1."""
    mask, segments = batch["loss_mask"].astype(jnp.float32), batch["segment_ids"]

    def of_row(mask: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(mask, segments, segments.size + 1)[segments]

    sums = jax.vmap(of_row)(mask, segments)
    return mask / jnp.where(sums > 0, sums, 1.0)
