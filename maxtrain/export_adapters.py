"""`maxtrain export RUN OUT --format peft`: the adapters of a run alone, as PEFT loads them."""

import os
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from data_pipeline.errors import StorageError, UsageError
from maxtrain.models.adapt import split_adapters
from maxtrain.models.decoder import Decoder
from maxtrain.staging import publishing
from maxtrain.weights.peft import read_adapters, write_adapters


def export_adapters(model: Decoder, out: Path, base: str | None) -> dict[str, int]:
    """Write the adapters of a model, and see that they read back as what they are.

    Args:
        model: with its adapters, all on this process's devices.
        out: the directory to be made; an empty one may be there.
        base: where the weights are that they are for; None: the files do not say.

    Returns:
        Bytes of the files, by name.

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
    with publishing(out, "export") as directory:
        write_adapters(directory, adapters, model.config, base)
        abstract = jax.tree.map(_described, adapters)
        found = jax.tree.leaves(read_adapters(directory, abstract, model.config))
        for ours, theirs in zip(jax.tree.leaves(adapters), found, strict=True):
            if np.asarray(ours).tobytes() != np.asarray(theirs).tobytes():
                raise StorageError(
                    f"OUT={out}: what is read back is not what was written. Nothing was exported. "
                    "Look at the disk that it is on, then run the same command again."
                )
        return {path.name: path.stat().st_size for path in sorted(directory.iterdir())}


def _described(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)
