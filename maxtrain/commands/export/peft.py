"""`maxtrain export RUN OUT --format peft`: the adapters of a run alone, as PEFT loads them."""

import os
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from data_pipeline.base.errors import StorageError, UsageError
from data_pipeline.tokenizer import Tokenizer
from maxtrain.config.schema import TrainConfig
from maxtrain.models.adapt import split_adapters
from maxtrain.models.decoder import Decoder
from maxtrain.storage.publish import publishing
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.trainable import frozen_paths, split_buffers
from maxtrain.weights.hf_export import file_sizes, write_tokenizer
from maxtrain.weights.peft import read_adapters, write_adapters


class TokenizerFiles(NamedTuple):
    """The tokenizer that goes with adapters.

    Attributes:
        tokenizer: of the model.
        place: as for `load_tokenizer`, from where it came.
        template: a chat template; None: the one beside the tokenizer, if there is one.
    """

    tokenizer: Tokenizer
    place: str
    template: bytes | None = None


def export_adapters(
    model: Decoder, out: Path, base: str | None, beside: TokenizerFiles | None = None
) -> tuple[dict[str, int], list[str]]:
    """Write the adapters of a model, and see that they read back as what they are.

    Args:
        model: with its adapters, all on this process's devices.
        out: the directory to be made; an empty one may be there.
        base: where the weights are that they are for; None: the files do not say.
        beside: the tokenizer that is written beside them; None: none is.

    Returns:
        Bytes of the files, by name; and what a user must know of the tokenizer.

    Raises:
        UsageError: the model has no adapters, or PEFT has no form for one; `out` is not free.
        StorageError: what was read back is not what was written.
    """
    out = Path(os.path.abspath(out))
    if model.config.lora.rank is None:
        raise UsageError(
            "--format peft: the run has no adapters (model.lora.rank=null). Use --format hf."
        )
    _, adapters = split_adapters(nnx.state(model))
    notes: list[str] = []
    with publishing(out, "export") as directory:
        if beside is not None:
            notes = write_tokenizer(
                directory, beside.place, beside.tokenizer, model.config, beside.template
            )
        write_adapters(directory, adapters, model.config, base)
        abstract = jax.tree.map(_described, adapters)
        found = jax.tree.leaves(read_adapters(directory, abstract, model.config))
        for ours, theirs in zip(jax.tree.leaves(adapters), found, strict=True):
            if np.asarray(ours).tobytes() != np.asarray(theirs).tobytes():
                raise StorageError(
                    f"OUT={out}: what is read back is not what was written. Nothing was exported. "
                    "Look at the disk that it is on, then run the same command again."
                )
        return file_sizes(directory), notes


def require_base_as_it_was(
    model: Decoder, train: TrainConfig, init_partial: tuple[str, ...]
) -> None:
    """UsageError: the weights that the adapters are for are not those that the run began with, so
    that adapters alone would not be what it has learnt.

    Args:
        model: with its adapters.
        train: of the run.
        init_partial: of the run, what was not read from the weights it began with.
    """
    instead = "Use --format hf, which writes all weights."
    if init_partial:
        raise UsageError(
            f"--format peft: checkpoint.init_partial={list(init_partial)} began with new weights "
            f"beside those of checkpoint.init_from, which adapters alone leave out. {instead}"
        )
    params, buffers = split_buffers(nnx.state(model))
    weights, _ = split_adapters(params)
    trained = sorted(paths(weights).keys() - frozen_paths(train, params))
    if trained:
        raise UsageError(
            f"--format peft: beside the adapters the run has trained {', '.join(trained)} "
            f"(train.only={list(train.only)}), which adapters alone leave out. {instead}"
        )
    rate = model.config.routing.correction_rate
    if jax.tree.leaves(buffers) and rate > 0:
        raise UsageError(
            f"--format peft: model.routing.correction_rate={rate} has changed the biases of "
            f"routers, which adapters alone leave out. {instead}"
        )


def _described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
