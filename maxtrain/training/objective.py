"""What is minimised. The loop and the step know an objective only as a function of (model, batch)."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from maxtrain.models.decoder import Decoder
from maxtrain.ops.cross_entropy import cross_entropy, num_chunks
from maxtrain.parallel.sharding import batch_shards

Batch = dict[str, Array]  # inputs, targets, segment_ids, positions, loss_mask, each [B, T]


class Sum(NamedTuple):
    """A total and its weight, to be added up first and divided once, at the end."""

    total: Float[Array, ""]
    weight: Float[Array, ""]


Objective = Callable[[Decoder, Batch], Sum]


def next_token(model: Decoder, batch: Batch) -> Sum:
    """Cross-entropy of the next token: nats summed over targets, and the summed loss mask."""
    hidden = model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
    rows, length = batch["targets"].shape
    chunks = num_chunks(length, -(-rows // batch_shards()), model.config.loss_chunk)
    mask = batch["loss_mask"].astype(jnp.float32)
    total = cross_entropy(hidden, model.output_matrix(), batch["targets"], mask, chunks=chunks, dtype=model.compute)
    return Sum(total, mask.sum())
