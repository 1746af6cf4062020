"""What is minimised.

The loop and the step know an objective only by its terms: (total, weight) pairs, divided once.

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
from maxtrain.models.layers import Noise
from maxtrain.ops.cross_entropy import cross_entropy, num_chunks
from maxtrain.ops.sums import Sum
from maxtrain.parallel.sharding import batch_shards
from maxtrain.training.partition import POLICY, Models

# inputs, targets, segment_ids, positions, loss_mask, each [B, T]; source [B]; in training also
# keys [B], of what is random; embedding_offset [B, T, D] where an objective wants one
Batch = dict[str, Array]
Scales = Mapping[str, Array | float]


class Result(NamedTuple):
    """Of one micro-batch: the loss to be differentiated, and what is recorded.

    The loss is the sum of scale * total over terms.
    """

    loss: Float[Array, ""]
    sums: dict[str, Sum]


class Objective(NamedTuple):
    """A loss of named terms.

    factors: what each term's mean is multiplied with.
    denominators: of the terms of a whole batch, from the batch alone; they must add up over any
        split of its rows.
    forward: (models, micro-batch, scales) -> Result, where scales holds factor / denominator for
        each term, and the model "policy" is the one that trains. Its sums have at least `nll`,
        the summed negative log-likelihood of the targets and their summed loss mask.
    """

    factors: Mapping[str, float]
    denominators: Callable[[Batch], dict[str, Array]]
    forward: Callable[[Models, Batch, Scales], Result]

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

    def nll(self, models: Models, batch: Batch) -> Sum:
        """Negative log-likelihood of the targets, for evaluation: no other term, nothing random."""
        batch = {name: x for name, x in batch.items() if name != "keys"}
        return self.forward(models, batch, dict.fromkeys(self.factors, 0.0)).sums["nll"]


PLAIN = LossConfig()
NO_NOISE = RegularizationConfig()


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
            by a row's end counts in each row); `constant`: it is divided by the number of
            positions, targets or not.
        num_sources: also record the loss of each of so many sources, in `sources`; 0: don't.
        regularization: what is random where the batch has keys.
    """
    factors = {"nll": 1.0}
    if loss.z_loss:
        factors["z"] = loss.z_loss

    def denominators(batch: Batch) -> dict[str, Array]:
        mask = batch["loss_mask"].astype(jnp.float32)
        match normalize:
            case "tokens":
                count = mask.sum()
            case "sequences":
                count = _sequences(batch).sum()
            case "constant":
                count = jnp.float32(mask.size)
            case _:
                raise ValueError(f"normalize={normalize} is none of tokens, sequences, constant.")
        return {"nll": count, "z": mask.sum()}

    def forward(models: Models, batch: Batch, scales: Scales) -> Result:
        model = models[POLICY]
        offset = batch.get("embedding_offset")
        noise = None
        if regularization != NO_NOISE and "keys" in batch:
            noise = Noise(regularization, batch["keys"])
        hidden = model.hidden(
            batch["inputs"], batch["segment_ids"], batch["positions"], offset, noise
        )
        rows, length = batch["targets"].shape
        mask = batch["loss_mask"].astype(jnp.float32)
        weights = mask
        if normalize == "sequences":
            weights = _sequences(batch)
        z_scale = None
        if "z" in scales:
            z_scale = jnp.float32(scales["z"])
        # Rounded up.
        rows_of_shard = -(-rows // batch_shards())
        tokens = cross_entropy(
            hidden,
            model.output_matrix(),
            batch["targets"],
            weights * scales["nll"],
            chunks=num_chunks(length, rows_of_shard, model.config.loss_chunk),
            dtype=model.precision.compute,
            mask=mask,
            z_scale=z_scale,
            smoothing=loss.label_smoothing,
            logits=model.precision.output,
        )
        targets = mask.sum(-1)
        sums = {"nll": Sum(tokens.nll.sum(), targets.sum())}
        if "z" in factors:
            sums["z"] = Sum(tokens.z.sum(), targets.sum())
        if num_sources:
            totals = jax.ops.segment_sum(tokens.nll, batch["source"], num_sources)
            counts = jax.ops.segment_sum(targets, batch["source"], num_sources)
            sums["sources"] = Sum(totals, counts)
        return Result(tokens.loss, sums)

    return Objective(factors, denominators, forward)


def _sequences(batch: Batch) -> Float[Array, "B T"]:
    """The loss mask, divided by its sum over the token's own document in the row.

    So every document with a target sums to 1.
    """
    mask = batch["loss_mask"].astype(jnp.float32)
    segments = batch["segment_ids"]

    def of_row(mask: Array, segments: Array) -> Array:
        return jax.ops.segment_sum(mask, segments, segments.size + 1)[segments]

    sums = jax.vmap(of_row)(mask, segments)
    return mask / jnp.where(sums > 0, sums, 1.0)
