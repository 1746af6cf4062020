"""The models of a recipe as tensors that are read one by one: Hugging Face directories, or
checkpoints of runs."""

import concurrent.futures
import contextlib
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx

from data_pipeline.base.errors import DataError
from data_pipeline.base.hub import download_hint
from data_pipeline.base.remote import is_url
from data_pipeline.shards import write_atomic
from data_pipeline.tokenizer import GENERATION, files_beside, load_tokenizer
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_config, read_json, stored_as
from maxtrain.models.hf_mapping import LazyArray, tensors_in_order
from maxtrain.models.merged import merged
from maxtrain.storage.reading import readable_model
from maxtrain.trainer.saved_run import (
    load_run,
    print_on_stderr,
    read_run_config,
    step_of,
    tokenizer_place,
)
from maxtrain.weights.hf import open_directory, require_head_is_embedding
from maxtrain.weights.hf_export import (
    lazy_parameters,
    tensor_dtypes,
    write_config,
    write_tokenizer,
)
from maxtrain.weights.tensor_file import DTYPES, StoredTensor, read_part

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
_FLOATS = {"F64": "float32", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


class SourceModel(NamedTuple):
    """A model that is merged."""

    place: str
    # By name, in the order of names.
    tensors: Mapping[str, LazyArray]
    # Of each tensor.
    dtypes: Mapping[str, str]
    # Of config.json, without what only says how it was made.
    config: Mapping[str, Any]
    # The hash of its tokenizer; None: there is none that is known here.
    tokenizer: str | None
    # Quantization of the weights in its files; empty: plain floats.
    stored_as: str
    # Writes config.json into a directory, for tensors of this type.
    write_config: Callable[[Path, str], object]
    # Writes the tokenizer into a directory.
    write_tokenizer: Callable[[Path], object]


def open_model(place: str, held: contextlib.ExitStack) -> SourceModel:
    """The model at a place: a Hugging Face directory, or `RUN` or `RUN@STEP`; `held` closes its
    files.

    Raises:
        UserError: there is none, or something is wrong with it.
    """
    url, _, step = place.partition("@")
    directory = Path(place).expanduser()
    run = directory
    if is_url(place):
        directory = readable_model(url)
        run = directory
    elif step:
        run = Path(url).expanduser()
    if (directory / "config.json").exists():
        return _open_directory(place, directory, held)
    if (run / "config.yaml").exists():
        return _open_run(place, run, step)
    raise DataError(
        f"{place}: is neither a directory with config.json and model.safetensors, nor a run. Name "
        f"a directory, RUN, or RUN@STEP.{download_hint(place)}"
    )


def _open_directory(place: str, directory: Path, held: contextlib.ExitStack) -> SourceModel:
    config = read_json(directory / "config.json")
    # What is written is plain.
    config.pop("quantization_config", None)
    threads = held.enter_context(concurrent.futures.ThreadPoolExecutor(os.cpu_count()))
    found = {}
    dtypes = {}
    opened = open_directory(directory, held)
    for note in opened.notes:
        print_on_stderr(f"{place}: {note}")
    for name, there in _without_copied_head(directory, config, opened.tensors).items():
        if there.kind not in _FLOATS:
            raise DataError(
                f"{place}: {name} is of type {there.kind}, and only floats of 16 or more bits are "
                "merged. Take the model in bfloat16, for example."
            )
        read = functools.partial(read_part, there, jnp.dtype(DTYPES[there.kind]), threads)
        found[name] = LazyArray(there.shape, read)
        dtypes[name] = _FLOATS[there.kind]
    tokenizer = None
    if any((directory / name).exists() for name in _TOKENIZER_FILES[:3]):
        tokenizer = load_tokenizer(directory).sha256
    ordered = {name: found[name] for name in sorted(found)}
    return SourceModel(
        place,
        ordered,
        dtypes,
        config,
        tokenizer,
        stored_as(directory),
        functools.partial(_copy_config, directory, config),
        functools.partial(_copy_tokenizer, directory),
    )


def _without_copied_head(
    directory: Path, config: Mapping[str, Any], tensors: Mapping[str, StoredTensor]
) -> Mapping[str, StoredTensor]:
    """The tensors of a model without a head that is a copy of the embedding. If both were merged,
    a method that draws random numbers would make two different ones of them.

    DataError: the head of a model that ties both is no such copy.
    """
    heads = [name for name in tensors if re.search(r"(^|\.)lm_head\.weight$", name)]
    embeddings = [name for name in tensors if re.search(r"(^|\.)(embed_tokens|wte)\.weight$", name)]
    if not _is_tied(directory, config) or len(heads) != 1 or len(embeddings) != 1:
        return tensors
    require_head_is_embedding(tensors[heads[0]], tensors[embeddings[0]], directory)
    return {name: tensor for name, tensor in tensors.items() if name != heads[0]}


def _is_tied(directory: Path, config: Mapping[str, Any]) -> bool:
    """Return whether the head of a model is its embedding, also if the model is of no family
    here.
    """
    try:
        return read_config(directory).tie_embeddings
    except DataError:
        return config.get("tie_word_embeddings") is True


def _copy_config(directory: Path, config: Mapping[str, Any], out: Path, dtype: str) -> None:
    """config.json with another type, and what lies beside it for generation."""
    values = {**config, "dtype": dtype, "torch_dtype": dtype}
    text = json.dumps(values, indent=2, sort_keys=True) + "\n"
    write_atomic(out / "config.json", text.encode())
    if (directory / "generation_config.json").exists():
        shutil.copyfile(directory / "generation_config.json", out / "generation_config.json")


def _copy_tokenizer(directory: Path, out: Path) -> None:
    """All files of a tokenizer, as they are."""
    for name in _TOKENIZER_FILES:
        if (directory / name).exists():
            shutil.copyfile(directory / name, out / name)
    for name, content in files_beside(directory / "tokenizer.json").items():
        # Goes with config.json.
        if name != GENERATION:
            (out / name).parent.mkdir(exist_ok=True)
            (out / name).write_bytes(content)


def _open_run(place: str, run: Path, step: str) -> SourceModel:
    wanted = None
    if step:
        if not step.isdecimal():
            raise DataError(f"{place}: {step} is no number of a step. Write RUN@100, for example.")
        wanted = int(step)
    config = read_run_config(run)
    model, tokenizer = load_run(run, step_of(run, wanted))
    # What adapters do is a part of the model.
    model = merged(model)
    family = FAMILIES[model.config.family]
    _, params = nnx.split(model)
    ours = lazy_parameters(params)
    table = family.tensors(model.config)
    found = tensors_in_order(table, ours)
    dtypes = tensor_dtypes(table, ours, config.precision.params)
    ordered = {name: found[name] for name in sorted(found)}

    def write_own_config(out: Path, dtype: str) -> None:
        write_config(out, model.config, dtype, tokenizer)

    def write_own_tokenizer(out: Path) -> None:
        write_tokenizer(out, tokenizer_place(run), tokenizer, model.config)

    return SourceModel(
        place,
        ordered,
        dtypes,
        family.write(model.config),
        tokenizer.sha256,
        "",
        write_own_config,
        write_own_tokenizer,
    )
