"""Cross-entropy of the next token: what pre-training and fine-tuning minimise."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from maxtrain.config.schema import LossConfig, RegularizationConfig
from maxtrain.models.context import TrainNoise
from maxtrain.models.decoder import Decoder, DecoderOut
from maxtrain.objectives.objective import (
    LAYERS,
    POLICY,
    Batch,
    Models,
    Objective,
    ObjectiveOutput,
    Scales,
    num_tokens,
    with_layers,
)
from maxtrain.ops.chunks import num_chunks
from maxtrain.ops.cross_entropy import cross_entropy
from maxtrain.ops.gumbel_sample import drawn_tokens
from maxtrain.ops.log_probs import LogProbsStaticArgs, TokenLogProbs, token_log_probs
from maxtrain.ops.quantity import Metric
from maxtrain.ops.sums import WeightedSum, sums_of_documents
from maxtrain.parallel.sharding import batch_shards, length_shards

PLAIN = LossConfig()
NO_NOISE = RegularizationConfig()


def next_token(
    loss: LossConfig = PLAIN,
    normalize: str = "tokens",
    num_sources: int = 0,
    regularization: RegularizationConfig = NO_NOISE,
) -> Objective:
    """Build the objective: cross-entropy of the next token, with optional label smoothing and
    z-loss.

    Args:
        loss: factors of label smoothing and z-loss.
        normalize: what the cross-entropy is averaged over. `tokens`: all targets have the same
            weight; `sequences`: all documents of all rows have the same weight (a document that is
            cut by a row's end counts in each row); `constant`: divide by the number of positions,
            targets or not.
        num_sources: number of sources whose losses are also recorded, in `sources`; 0: none.
        regularization: noise and dropout, applied if the batch has keys.
    """
    factors = {"nll": 1.0, LAYERS: 1.0}
    recorded = ()
    if loss.z_loss:
        factors["z"] = loss.z_loss
        recorded = (Metric("z", "squared nats per target"),)

    def denominators(batch: Batch) -> dict[str, Array]:
        targets = batch["loss_mask"].astype(jnp.float32).sum()
        return {
            "nll": num_targets(batch, normalize),
            "z": targets,
            LAYERS: num_tokens(batch),
        }

    def forward(models: Models, batch: Batch, scales: Scales) -> ObjectiveOutput:
        model = models[POLICY]
        out = noisy_forward(model, batch, regularization)
        return loss_of_hidden(out, model, batch, scales, loss, normalize, num_sources)

    return Objective(factors, denominators, forward, recorded=recorded)


def num_targets(batch: Batch, normalize: str) -> Float[Array, ""]:
    """Return the divisor of a sum over targets; `normalize` as for `next_token`."""
    mask = batch["loss_mask"].astype(jnp.float32)
    match normalize:
        case "tokens":
            return mask.sum()
        case "sequences":
            # Documents are counted, because weights of 1 / n only sum to approximately 1.
            return (_targets_of_documents(batch) > 0).sum().astype(jnp.float32)
        case "constant":
            return jnp.float32(mask.size)
        case _:
            raise ValueError(f"normalize={normalize} is none of tokens, sequences, constant.")


def target_weights(batch: Batch, normalize: str) -> Float[Array, "B T"]:
    """Return the weight of each target in a sum that `num_targets` divides."""
    if normalize == "sequences":
        return _sequences(batch)
    return batch["loss_mask"].astype(jnp.float32)


def chunks_of(batch: Batch, model: Decoder) -> int:
    """Return the number of chunks that sequences are cut into for the logits."""
    rows, length = batch["targets"].shape
    # Rounded up.
    rows_of_shard = -(-rows // batch_shards())
    return num_chunks(length // length_shards(), rows_of_shard, model.config.loss_chunk)


def target_log_probs(
    model: Decoder, hidden: Float[Array, "B T D"], batch: Batch, temperature: float = 1.0
) -> TokenLogProbs:
    """Return the log-probability of each target, and the entropy of its distribution.

    Args:
        hidden: the model's last hidden states.
        temperature: divides the logits.
    """
    form = _form(model, batch, temperature)
    return token_log_probs(hidden, model.output_matrix(), batch["targets"], **form._asdict())


def target_draws(
    model: Decoder,
    hidden: Float[Array, "B T D"],
    keys: Key[Array, "B T"],
    batch: Batch,
    temperature: float = 1.0,
) -> Int[Array, "B T"]:
    """Draw a token with each key at each target, from the distribution of `target_log_probs`."""
    form = _form(model, batch, temperature)
    return drawn_tokens(hidden, model.output_matrix(), keys, form)


def _form(model: Decoder, batch: Batch, temperature: float) -> LogProbsStaticArgs:
    """Return the form in which a model's logits are computed."""
    return LogProbsStaticArgs(
        chunks_of(batch, model),
        model.precision.compute,
        model.precision.output,
        model.spec.logit_softcap,
        temperature,
    )


def document_log_probs(model: Decoder, batch: Batch) -> Float[Array, "B S"]:
    """Return the log-probability of the targets of each document of each row in nats, by segment
    number, without a gradient."""
    mask = batch["loss_mask"].astype(jnp.float32)
    hidden = model.hidden(batch["inputs"], batch["segment_ids"], batch["positions"])
    found = target_log_probs(model, hidden, batch).log_probs
    return jax.lax.stop_gradient(sums_of_documents(found * mask, batch["segment_ids"]))


def noisy_forward(model: Decoder, batch: Batch, regularization: RegularizationConfig) -> DecoderOut:
    """Run the forward pass of a training model: with noise if the batch has keys, and with an
    embedding offset if the batch has one."""
    noise = None
    lora = model.config.lora
    has_dropout = lora.rank is not None and lora.dropout > 0
    if (regularization != NO_NOISE or has_dropout) and "keys" in batch:
        left = 1.0
        if regularization.router_noise_steps is not None:
            passed = batch["steps"].astype(jnp.float32) / regularization.router_noise_steps
            left = jnp.maximum(1.0 - passed, 0.0)
        noise = TrainNoise(regularization, batch["keys"], router_noise=left)
    offset = batch.get("embedding_offset")
    return model.forward(batch["inputs"], batch["segment_ids"], batch["positions"], offset, noise)


def loss_of_hidden(
    out: DecoderOut,
    model: Decoder,
    batch: Batch,
    scales: Scales,
    loss: LossConfig,
    normalize: str,
    num_sources: int,
) -> ObjectiveOutput:
    """Compute the terms of `next_token` from a forward pass, with those of the layers."""
    mask = batch["loss_mask"].astype(jnp.float32)
    z_scale = None
    if "z" in scales:
        z_scale = jnp.float32(scales["z"])
    tokens = cross_entropy(
        out.hidden,
        model.output_matrix(),
        batch["targets"],
        target_weights(batch, normalize) * scales["nll"],
        chunks=chunks_of(batch, model),
        dtype=model.precision.compute,
        mask=mask,
        z_scale=z_scale,
        smoothing=loss.label_smoothing,
        logits=model.precision.output,
        softcap=model.spec.logit_softcap,
    )
    targets = mask.sum(-1)
    sums = {"nll": WeightedSum(tokens.nll.sum(), targets.sum())}
    if loss.z_loss:
        sums["z"] = WeightedSum(tokens.z.sum(), targets.sum())
    if num_sources:
        totals = jax.ops.segment_sum(tokens.nll, batch["source"], num_sources)
        counts = jax.ops.segment_sum(targets, batch["source"], num_sources)
        sums["sources"] = WeightedSum(totals, counts)
    return with_layers(tokens.loss, sums, out, scales)


def _sequences(batch: Batch) -> Float[Array, "B T"]:
    """Return the loss mask, divided by its sum over the token's own document in the row.

    So the weights of every document with a target sum to 1.
    """
    mask = batch["loss_mask"].astype(jnp.float32)
    sums = jnp.take_along_axis(_targets_of_documents(batch), batch["segment_ids"], axis=1)
    return mask / jnp.where(sums > 0, sums, 1.0)


def _targets_of_documents(batch: Batch) -> Float[Array, "B S"]:
    """Return the summed loss mask of each document of each row, by segment."""
    return sums_of_documents(batch["loss_mask"].astype(jnp.float32), batch["segment_ids"])
