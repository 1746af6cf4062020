"""`maxtrain export RUN OUT.gguf --format gguf`: a model as one file that llama.cpp loads.

The file is written under a hidden name and read again. Every tensor and key must be what was
written, and parameters and logits must be, bit for bit, those of the run's parameters rounded to
the type of the file. Only then does the file get its name.

How far the rounding itself moves logits is reported, and judged by the parameters alone: in a
model with experts, a small change of a router's scores sends a token to other experts, so that
logits may differ a lot although the file is right.
"""

import dataclasses
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx

from data_pipeline.base.errors import StorageError, UsageError, UserError
from data_pipeline.chat.chat import CHATML, own_sources
from data_pipeline.tokenizer import (
    JsonTokenizer,
    Tokenizer,
    read_settings,
    tokenizer_path,
)
from maxtrain.commands.verify import forget_arrays, logits, some_tokens
from maxtrain.config.schema import MeshConfig
from maxtrain.inference.chat import Chat
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.models.hf_mapping import LazyArray, ParamMapping, in_memory, tensors_in_order
from maxtrain.models.specs import MoeSpec
from maxtrain.ops.digest import leaf_names, tree_digests
from maxtrain.parallel.mesh import make_mesh
from maxtrain.storage.publish import publishing_file
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.gguf.architecture import describe, frequency_factors
from maxtrain.weights.gguf.field import GgufField
from maxtrain.weights.gguf.file import (
    QUANTS,
    GgufTensor,
    library,
    plan_tensors,
    read_gguf,
    round_trip,
    write_gguf,
)
from maxtrain.weights.gguf.tensors import ROPE_FACTORS, gguf_table
from maxtrain.weights.gguf.tokenizer import describe_tokenizer
from maxtrain.weights.hf_export import lazy_parameters, tensor_dtypes

SUFFIX = ".gguf"


# The largest relative error (root of the mean square) of a tensor that is rounded correctly, by
# type: half a step for each number of a block whose largest number is all of its size.
_MOST_ERROR = {
    "f16": 1e-3,
    "bf16": 8e-3,
    "q8_0": 0.025,
    "q5_1": 0.2,
    "q5_0": 0.2,
    "q4_1": 0.4,
    "q4_0": 0.4,
}
# Of what is stored as it is, where 1 is added to scales.
_MOST_OFFSET_ERROR = 1e-6
# Smaller numbers, and scales of them, have fewer bits in float16.
_SMALLEST = 1e-4


class GgufExportResult(NamedTuple):
    """Result of writing a GGUF file.

    Attributes:
        size: of the file, in bytes.
        notes: notes for the user.
        difference: largest difference of the logits from those of the run, by rounding alone.
        largest: largest magnitude of the run's logits.
        error: largest relative error of a tensor by rounding.
    """

    size: int
    notes: list[str]
    difference: float
    largest: float
    error: float


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
    template: str = "",
    rule: str | None = None,
) -> GgufExportResult:
    """Write a model as a GGUF file, and see that it reads back as what it is.

    The model's arrays are given up: while the file is read again, they are not in memory.

    Args:
        model: with its parameters, all on this process's devices.
        tokenizer: that belongs to it.
        place: as for `load_tokenizer`, from where the tokenizer came.
        out: the file to be made.
        quant: how numbers are stored, one of `QUANTS`.
        name: of the model, for people.
        template: file of a chat template, or "chatml"; empty: those beside the tokenizer, if there
            are some.
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
        name_of_program = GgufField("general.architecture", "string", description.architecture)
        stored = read_gguf(path, sums, [name_of_program, *fields])
        compared = _compare(model, table, plans, stored)
        _require_same(out, compared, quant)
        size = path.stat().st_size
    layers = FAMILIES[config.family].spec(config).stack.layers()
    if compared.difference and any(isinstance(layer.mlp, MoeSpec) for layer in layers):
        notes.append(
            "Logits of a model with experts change much wherever rounding sends a token to "
            "another expert."
        )
    return GgufExportResult(
        size,
        [*description.notes, *notes],
        compared.difference,
        compared.largest,
        max(compared.errors.values(), default=0.0),
    )


def _require_same(out: Path, compared: "_GgufRoundTrip", quant: str) -> None:
    """StorageError: the file does not hold the run's parameters in its type."""
    problem = ""
    if compared.different:
        names = ", ".join(compared.different[:3])
        problem = f"{len(compared.different)} parameters ({names}) differ from the rounded ones"
    elif not compared.has_same_logits:
        problem = "its logits are not those of the rounded parameters"
    for name, error in compared.errors.items():
        if error > _MOST_ERROR.get(quant, _MOST_OFFSET_ERROR):
            problem = f"rounding to {quant} has changed {name} by {error:.2g} of its size"
    if problem:
        raise StorageError(
            f"OUT={out}: what is read back is not what was written: {problem}. Nothing was "
            "exported. Run the same command again; if it says the same, please report it."
        )


def _general_fields(name: str, quant: str) -> list[GgufField]:
    fields = [
        GgufField("general.type", "string", "model"),
        GgufField("general.file_type", "uint32", QUANTS[quant]),
    ]
    if name:
        fields.append(GgufField("general.name", "string", name))
    if quant.startswith("q"):
        version = library().GGML_QUANT_VERSION
        fields.append(GgufField("general.quantization_version", "uint32", version))
    return fields


def _tokenizer_fields(
    tokenizer: Tokenizer,
    place: str,
    template: str,
    vocab_size: int | None,
    rule: str | None,
) -> tuple[list[GgufField], list[str]]:
    """The keys of a tokenizer and of its chat template, and notes."""
    assert vocab_size is not None
    settings: Mapping[str, Any] = {}
    text = None
    named: dict[str, str] = {}
    if isinstance(tokenizer, JsonTokenizer):
        settings = read_settings(tokenizer_path(place))
        own, _ = own_sources(tokenizer_path(place), settings)
        text = own.pop("default", None)
        # Names that no key of a GGUF file can have are left out.
        named = {name: own[name] for name in sorted(own) if re.fullmatch(r"[a-z0-9_]+", name)}
    if template:
        # Templates by names belong to the one that this replaces.
        named = {}
    if template == "chatml":
        text = CHATML
    elif template:
        text = Path(template).expanduser().read_text()
    end_of_turn = None
    more = []
    if text is not None:
        try:
            end_of_turn = Chat(tokenizer, place, template).end_of_turn()
        except UserError as error:
            more.append(
                "The file does not say which token ends an answer, since the chat template can't "
                f"be used here: {error}"
            )
    fields, notes = describe_tokenizer(tokenizer, settings, vocab_size, text, end_of_turn, rule)
    for key, content in named.items():
        fields.append(GgufField(f"tokenizer.chat_template.{key}", "string", content))
    if named:
        fields.append(GgufField("tokenizer.chat_templates", "strings", sorted(named)))
    return fields, [*notes, *more]


class _GgufRoundTrip(NamedTuple):
    """Result of reading a GGUF file again.

    Attributes:
        different: parameters that are not, bit for bit, the rounded ones of the run.
        has_same_logits: whether its logits are those of the rounded parameters.
        errors: of each tensor, the relative error by rounding (root of the mean square).
        difference: largest difference between logits of the file and of the run as it is.
        largest: largest magnitude of the run's logits.
    """

    different: list[str]
    has_same_logits: bool
    errors: dict[str, float]
    difference: float
    largest: float


def _compare(
    model: Decoder,
    table: Sequence[ParamMapping],
    plans: Mapping[str, GgufTensor],
    stored: Mapping[str, LazyArray],
) -> _GgufRoundTrip:
    """Hold the tensors of a file against a model, whose arrays are given up."""
    _, params = nnx.split(model)
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    # Whatever kernel the run has: one that takes rows of any length.
    plain = dataclasses.replace(model.config, attention="xla")
    graphdef, abstract = abstract_model(plain, model.precision, mesh)
    tokens = some_tokens(model.config)
    exact = np.asarray(logits(graphdef, params, tokens))
    errors: dict[str, float] = {}

    def rounded(name: str) -> LazyArray:
        numbers = plans[name].tensor.whole().astype(np.float32)
        found = round_trip(name, numbers, plans[name].quant)
        errors[name] = _relative_error(found, numbers)
        return in_memory(found)

    expected = _parameters(table, abstract, rounded)
    forget_arrays(nnx.state(model))
    del params
    of_rounded = np.asarray(logits(graphdef, expected, tokens))
    digests = tree_digests(expected)
    forget_arrays(expected)
    del expected
    loaded = _parameters(table, abstract, stored.__getitem__)
    different = [name for name, digest in tree_digests(loaded).items() if digest != digests[name]]
    found = np.asarray(logits(graphdef, loaded, tokens))
    return _GgufRoundTrip(
        different,
        found.tobytes() == of_rounded.tobytes(),
        errors,
        float(np.abs(found - exact).max()),
        float(np.abs(exact).max()),
    )


def _relative_error(found: np.ndarray, numbers: np.ndarray) -> float:
    """The root of the mean square of what rounding changes, as a share of that of the numbers."""
    error = float(np.linalg.norm(found - numbers))
    smallest = _SMALLEST * numbers.size**0.5
    return error / max(float(np.linalg.norm(numbers)), smallest)


def _parameters(
    table: Sequence[ParamMapping], abstract: nnx.State, read: Callable[[str], LazyArray]
) -> nnx.State:
    """The parameters that tensors of a file stand for; one entry is in memory at a time."""
    leaves, structure = jax.tree.flatten(abstract)
    named = dict(zip(leaf_names(abstract), leaves, strict=True))
    arrays = {}
    for entry in table:
        shapes = [named[name].shape for name in entry.params]
        tensors = {name: read(name) for name in entry.names(shapes)}
        for name, lazy in entry.inverse(tensors, shapes).items():
            numbers = lazy.whole().astype(named[name].dtype)
            arrays[name] = jax.device_put(numbers, named[name].sharding)
    return jax.tree.unflatten(structure, [arrays[name] for name in named])
