"""`maxtrain export RUN OUT.gguf --format gguf`: a model as one file that llama.cpp loads.

The file is written under a hidden name and read again: every tensor and key must be what was
written, and what the numbers are worth after rounding is seen from logits. Only then does it get
its name.
"""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from data_pipeline.chat import own_sources
from data_pipeline.errors import StorageError, UsageError, UserError
from data_pipeline.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    read_settings,
    tokenizer_path,
)
from maxtrain.config.schema import MeshConfig
from maxtrain.models.decoder import Decoder
from maxtrain.ops.digest import leaf_names
from maxtrain.parallel.mesh import make_mesh
from maxtrain.serve.chat import Chat
from maxtrain.staging import publishing_file
from maxtrain.training.state import abstract_model
from maxtrain.verify import forget_arrays, logits, some_tokens
from maxtrain.weights.codec import Entry, LazyArray, Offset, in_memory, tensors_in_order
from maxtrain.weights.gguf.architecture import describe, frequency_factors
from maxtrain.weights.gguf.field import Field
from maxtrain.weights.gguf.file import QUANTS, library, plan_tensors, read_gguf, write_gguf
from maxtrain.weights.gguf.tensors import ROPE_FACTORS, gguf_table
from maxtrain.weights.gguf.tokenizer import describe_tokenizer
from maxtrain.weights.hf_export import lazy_parameters, tensor_dtypes

SUFFIX = ".gguf"


class Written(NamedTuple):
    """What was written."""

    size: int  # bytes
    notes: list[str]  # what a user must know
    # Largest difference of the logits from those of the run, and their largest magnitude.
    difference: float
    largest: float


def require_suffix(out: Path) -> None:
    """UsageError: not the name of a GGUF file."""
    if out.suffix != SUFFIX:
        raise UsageError(
            f"OUT={out}: a GGUF file is one file, whose name ends with {SUFFIX}. "
            f"Name it {out.name or 'model'}{SUFFIX}."
        )


def export_gguf(
    model: Decoder,
    tokenizer: Tokenizer,
    place: str,
    out: Path,
    quant: str = "f32",
    name: str = "",
    template: Path | None = None,
    rule: str | None = None,
) -> Written:
    """Write a model as a GGUF file, and see that it reads back as what it is.

    The model's arrays are given up: while the file is read again, they are not in memory.

    Args:
        model: with its parameters, all on this process's devices.
        tokenizer: that belongs to it.
        place: as for `load_tokenizer`, from where the tokenizer came.
        out: the file to be made.
        quant: how numbers are stored, one of `QUANTS`.
        name: of the model, for people.
        template: file of a chat template; None: the one beside the tokenizer, if there is one.
        rule: llama.cpp's name of how the tokenizer finds words; None: it is found out.

    Raises:
        UsageError: the model or its tokenizer is none of llama.cpp's, or rows do not fit `quant`.
        DataError: a number is not finite as it would be stored.
        StorageError: what was read back is not what was written.
    """
    out = Path(os.path.abspath(out))
    config = model.config
    description = describe(config)
    fields, notes = _tokenizer_fields(tokenizer, place, template, config.vocab_size, rule)
    fields = [*_general_fields(name, quant), *description.fields, *fields]
    table = gguf_table(config)
    _, params = nnx.split(model)
    ours = lazy_parameters(params)
    tensors = tensors_in_order(table, ours)
    exact = {name for name, dtype in tensor_dtypes(table, ours, "").items() if dtype}
    factors = frequency_factors(config)
    if factors is not None:
        tensors[ROPE_FACTORS] = in_memory(np.array(factors, np.float32))
    plans = plan_tensors(tensors, exact, quant)
    with publishing_file(out, "export") as path:
        sums = write_gguf(path, description.architecture, fields, plans)
        name_of_program = Field("general.architecture", "string", description.architecture)
        stored = read_gguf(path, sums, [name_of_program, *fields])
        difference, largest = _compare(model, table, stored)
        if quant == "f32" and difference > _allowed(table) * largest:
            raise StorageError(
                f"OUT={out}: logits of what is read back differ by up to {difference:.3g} from the "
                "run's, though nothing was rounded. Nothing was exported. Run the same command "
                "again; if it says the same, please report it."
            )
        size = path.stat().st_size
    return Written(size, [*description.notes, *notes], difference, largest)


def _allowed(table: Sequence[Entry]) -> float:
    """What may be between the logits of a file that was not rounded and the run's, relative."""
    if any(isinstance(step, Offset) for entry in table for step in entry.steps):
        # 1 is added to scales there, which rounds.
        return 1e-4
    return 0.0


def _general_fields(name: str, quant: str) -> list[Field]:
    fields = [
        Field("general.type", "string", "model"),
        Field("general.file_type", "uint32", QUANTS[quant]),
    ]
    if name:
        fields.append(Field("general.name", "string", name))
    if quant.startswith("q"):
        version = library().GGML_QUANT_VERSION
        fields.append(Field("general.quantization_version", "uint32", version))
    return fields


def _tokenizer_fields(
    tokenizer: Tokenizer,
    place: str,
    template: Path | None,
    vocab_size: int | None,
    rule: str | None,
) -> tuple[list[Field], list[str]]:
    """The keys of a tokenizer and of its chat template, and notes."""
    assert vocab_size is not None
    settings: Mapping[str, Any] = {}
    text = None
    if isinstance(tokenizer, JsonTokenizer):
        settings = read_settings(tokenizer_path(place))
        own, _ = own_sources(tokenizer_path(place), settings)
        text = own.get("default")
    if template is not None:
        text = template.read_text()
    end_of_turn = None
    more = []
    if text is not None:
        try:
            end_of_turn = Chat(tokenizer, place, str(template or "")).end_of_turn()
        except UserError as error:
            more.append(
                "The file does not say which token ends an answer, since the chat template can't "
                f"be used here: {error}"
            )
    fields, notes = describe_tokenizer(tokenizer, settings, vocab_size, text, end_of_turn, rule)
    return fields, [*notes, *more]


def _compare(
    model: Decoder, table: Sequence[Entry], stored: Mapping[str, LazyArray]
) -> tuple[float, float]:
    """The largest difference between logits of the model, whose arrays are given up, and of what is
    stored; and the largest magnitude of the model's."""
    _, params = nnx.split(model)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    # Whatever kernel the run has: one that takes rows of any length.
    plain = dataclasses.replace(model.config, attention="xla")
    graphdef, abstract = abstract_model(plain, model.precision, mesh)
    tokens = some_tokens(model.config)
    expected = np.asarray(logits(graphdef, params, tokens))
    forget_arrays(nnx.state(model))
    del params
    leaves, structure = jax.tree.flatten(abstract)
    named = dict(zip(leaf_names(abstract), leaves, strict=True))
    arrays = {}
    for entry in table:
        shapes = [named[name].shape for name in entry.ours]
        for name, lazy in entry.inverse(stored, shapes).items():
            numbers = lazy.whole().astype(named[name].dtype)
            arrays[name] = jax.device_put(numbers, named[name].sharding)
    loaded = jax.tree.unflatten(structure, [arrays[name] for name in named])
    found = np.asarray(logits(graphdef, loaded, tokens))
    return float(np.abs(found - expected).max()), float(np.abs(expected).max())
