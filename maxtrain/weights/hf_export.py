"""Writes the files of a Hugging Face directory: config.json, tensors in shards, tokenizer.

Tensors are written one after the other, so that at most one of them is in memory beside the
parameters. Names, order and division into shards are those of transformers' `save_pretrained`, and
so are the bytes of model.safetensors. The caller chooses the directory and checks its content.
"""

import contextlib
import json
import math
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from data_pipeline.base.errors import DataError, UserError
from data_pipeline.base.remote import RemotePath
from data_pipeline.shards import MANIFEST, TOKENIZER, Manifest, write_atomic
from data_pipeline.tokenizer import (
    CARRIED,
    CHAT_TEMPLATE,
    GENERATION,
    MORE_TEMPLATES,
    SETTINGS,
    JsonTokenizer,
    Tokenizer,
    TokenizerRecord,
    files_beside,
    named_token,
    read_settings,
    tokenizer_path,
)
from maxtrain.config.schema import ModelConfig
from maxtrain.inference.chat import Chat, ends_of_generation
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_json
from maxtrain.models.hf_mapping import LazyArray, ParamMapping, Part, tensors_in_order
from maxtrain.ops.digest import leaf_names
from maxtrain.weights.memory_order import in_c_order

# Names of types in a file.
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_weights(
    directory: Path,
    params: nnx.State,
    config: ModelConfig,
    dtype: str,
    max_shard_bytes: int,
    tell: Callable[[str], object] = print,
) -> None:
    """Write model.safetensors, or several shards and their index.

    Args:
        directory: an existing directory.
        params: parameters of a model.
        config: configuration of that model.
        dtype: type of the tensors, "float32", "bfloat16" or "float16".
        max_shard_bytes: maximum bytes of the tensors in one file; a larger tensor has a file of its
            own.
        tell: called with a line for each file, if there are several.

    Raises:
        DataError: a number is not finite in `dtype`.
    """
    ours = lazy_parameters(params)
    table = FAMILIES[config.family].tensors(config)
    tensors = tensors_in_order(table, ours)
    write_tensors(directory, tensors, tensor_dtypes(table, ours, dtype), max_shard_bytes, tell)


def lazy_parameters(params: nnx.State) -> dict[str, LazyArray]:
    """Return parameters by path, read from their devices piece by piece."""
    leaves = zip(leaf_names(params), jax.tree.leaves(params), strict=True)
    return {name: _on_device(leaf) for name, leaf in leaves}


def write_tensors(
    directory: Path,
    tensors: Mapping[str, LazyArray],
    dtypes: Mapping[str, str],
    max_shard_bytes: int,
    tell: Callable[[str], object] = print,
    written: Callable[[str, memoryview], object] | None = None,
) -> None:
    """Write tensors as `write_weights` does.

    Args:
        directory: an existing directory.
        tensors: tensors by name, in the model's order; each is read once.
        dtypes: type of each tensor.
        max_shard_bytes, tell: as in `write_weights`.
        written: called with the name and the bytes of each tensor; optional.

    Raises:
        DataError: a number is not finite in its type.
    """
    sizes = {}
    for name, tensor in tensors.items():
        sizes[name] = math.prod(tensor.shape) * jnp.dtype(dtypes[name]).itemsize
    shards = divide(sizes, max_shard_bytes)
    weight_map = {}
    for number, names in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tell(f"{file}: {sum(sizes[name] for name in names) / 1e6:,.1f} MB")
        # The order of safetensors: tensors of the widest type first.
        names = sorted(names, key=lambda name: (-jnp.dtype(dtypes[name]).itemsize, name))
        of_file = {name: tensors[name] for name in names}
        _write_shard(directory / file, of_file, dtypes, written)
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        count = sum(math.prod(tensor.shape) for tensor in tensors.values())
        metadata = {"total_parameters": count, "total_size": sum(sizes.values())}
        index = {"metadata": metadata, "weight_map": weight_map}
        write_atomic(directory / "model.safetensors.index.json", _as_json(index))


def tensor_dtypes(
    table: Sequence[ParamMapping], ours: Mapping[str, LazyArray], dtype: str
) -> dict[str, str]:
    """Return the type of each tensor in a file of `dtype`."""
    dtypes = {}
    for entry in table:
        names = entry.names([ours[name].shape for name in entry.params])
        dtypes |= dict.fromkeys(names, entry.dtype or dtype)
    return dtypes


def _on_device(leaf: jax.Array) -> LazyArray:
    def read(part: Part) -> np.ndarray:
        starts = [indices.start for indices in part]
        sizes = [len(indices) for indices in part]
        # Starts are arguments of the compiled program: one for all layers.
        return np.asarray(jax.lax.dynamic_slice(leaf, starts, sizes))

    return LazyArray(leaf.shape, read)


def divide(sizes: Mapping[str, int], most: int) -> list[list[str]]:
    """Return the names of tensors, file by file: each file is filled until the next tensor would
    exceed the limit.

    Args:
        sizes: bytes of each tensor, in the model's order.
        most: maximum bytes of a file; a larger tensor has a file of its own.

    Source: huggingface_hub, `split_state_dict_into_shards_factory`.
    """
    shards: list[list[str]] = []
    current: list[str] = []
    filled = 0
    for name, size in sizes.items():
        if size > most:
            shards.append([name])
            continue
        if filled + size > most:
            shards.append(current)
            current = []
            filled = 0
        current.append(name)
        filled += size
    if current:
        shards.append(current)
    return shards


def _write_shard(
    path: Path,
    tensors: Mapping[str, LazyArray],
    dtypes: Mapping[str, str],
    written: Callable[[str, memoryview], object] | None,
) -> None:
    """Write a file of tensors and sync it to disk.

    Source: https://huggingface.co/docs/safetensors, the format: the length of the header, the
    header in JSON, and the numbers.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        dtype = dtypes[name]
        end = offset + math.prod(tensor.shape) * jnp.dtype(dtype).itemsize
        shape = list(tensor.shape)
        header[name] = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for name, tensor in tensors.items():
            numbers = in_c_order(tensor.whole(), jnp.dtype(dtypes[name]))
            if not np.isfinite(numbers).all():
                raise DataError(
                    f"{name} holds NaN or infinity in {dtypes[name]}, so nobody could use it. "
                    "Take another checkpoint with --step, or --dtype float32."
                )
            content = numbers.reshape(-1).view(np.uint8).data
            file.write(content)
            if written is not None:
                written(name, content)
        file.flush()
        os.fsync(file.fileno())


def write_config(directory: Path, config: ModelConfig, dtype: str, tokenizer: Tokenizer) -> None:
    """Write config.json and generation_config.json into a directory that has the tokenizer's files.

    An existing generation_config.json keeps its content, except for the tokens around texts. The
    token that texts begin with is the one that the tokenizer's settings name, or else that of
    generation_config.json. Tokenizers of this program alone have no settings, and their documents
    begin after the token that ends the previous one.

    The token for padding is the one that the tokenizer's settings name. Nothing here reads it:
    lengths decide which tokens are trained. In config.json, transformers uses it as a row of the
    embedding that has no gradient; so it is left out there if it also ends documents, or if the
    embedding has no such row.
    """
    begin = _named_token_id(directory, tokenizer, "bos_token")
    pad = _named_token_id(directory, tokenizer, "pad_token")
    if pad is not None and pad >= (config.vocab_size or 0):
        pad = None
    pad_row = pad
    if pad == tokenizer.eod_id:
        pad_row = None
    generation: dict[str, Any] = {"_from_model_config": True}
    has_generation = (directory / GENERATION).exists()
    if has_generation:
        generation = read_json(directory / GENERATION)
    if begin is None:
        begin = generation.get("bos_token_id")
    if begin is None and not isinstance(tokenizer, JsonTokenizer):
        begin = tokenizer.eod_id
    family = FAMILIES[config.family]
    values = family.write(config)
    if config.score:
        # One label tells transformers that the score is one number.
        values |= {"architectures": [family.scored_architecture()]}
        values |= {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    values |= {"bos_token_id": begin, "eos_token_id": tokenizer.eod_id, "pad_token_id": pad_row}
    # Both spellings: transformers 5 reads `dtype`, older versions read `torch_dtype`.
    values |= {"dtype": dtype, "torch_dtype": dtype}
    write_atomic(directory / "config.json", _as_json(values))
    if not has_generation and pad is not None:
        generation["pad_token_id"] = pad
    if generation.get("pad_token_id") != pad_row:
        # It differs from config.json, which transformers would otherwise read in its place.
        generation.pop("_from_model_config", None)
    ends = _ends(directory, tokenizer, config.vocab_size)
    if begin is not None:
        generation["bos_token_id"] = begin
    if ends == [tokenizer.eod_id]:
        generation["eos_token_id"] = tokenizer.eod_id
    elif ends:
        # It differs from config.json, as above.
        generation.pop("_from_model_config", None)
        generation["eos_token_id"] = ends
    if not has_generation or generation != read_json(directory / GENERATION):
        write_atomic(directory / GENERATION, _as_json(generation))


def _named_token_id(directory: Path, tokenizer: Tokenizer, key: str) -> int | None:
    """Return the token that a tokenizer's settings name for a key such as "bos_token", or None."""
    settings = read_settings(tokenizer_path(directory))
    return tokenizer.special.get(named_token(settings, key) or "")


def _ends(directory: Path, tokenizer: Tokenizer, vocab_size: int | None) -> list[int]:
    """Return the tokens that end a text or an answer: first that of documents, then those of
    generation_config.json and of the chat template."""
    found = set(ends_of_generation(directory / GENERATION))
    # Without a template, or with one that can't be used here, there are no answers.
    with contextlib.suppress(UserError):
        found.update(Chat(tokenizer, directory).stop_ids)
    ends = []
    if tokenizer.eod_id is not None:
        ends.append(tokenizer.eod_id)
    for token in sorted(found):
        if token not in ends and token < (vocab_size or 0):
            ends.append(token)
    return ends


def write_tokenizer(
    directory: Path,
    place: str,
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: bytes | None = None,
) -> list[str]:
    """Write tokenizer.json unchanged, the files beside it, and a tokenizer_config.json.

    Args:
        directory: an existing directory.
        place: the place that the tokenizer was loaded from, as in `load_tokenizer`.
        tokenizer: the tokenizer.
        config: configuration of the model.
        template: a chat template; None: the one beside the tokenizer, if there is one.

    Returns:
        Notes for the user, in lines.
    """
    write_atomic(directory / TOKENIZER, tokenizer.content)
    source = tokenizer_path(place)
    beside = files_beside(source)
    for name, content in beside.items():
        # Named templates belong to the one that `template` replaces.
        if template is None or not name.startswith(MORE_TEMPLATES):
            (directory / name).parent.mkdir(exist_ok=True)
            write_atomic(directory / name, content)
    if template is not None:
        write_atomic(directory / CHAT_TEMPLATE, template)
    notes = []
    if isinstance(tokenizer, JsonTokenizer):
        if SETTINGS not in beside:
            settings = _default_settings(tokenizer, config, _is_imported(source))
            write_atomic(directory / SETTINGS, _as_json(settings))
    else:
        notes.append(
            f"Its tokenizer ({tokenizer.name}) is none that transformers reads, so that "
            "AutoTokenizer does not load it; `maxtrain generate --hf DIR` does."
        )
    if not (directory / CHAT_TEMPLATE).exists() and _was_rendered(source):
        notes.append(
            "Its data was rendered by a chat template, which is not beside its tokenizer. "
            "Export again with --chat-template FILE to carry it along."
        )
    return notes


def file_sizes(directory: Path) -> dict[str, int]:
    """Return the bytes of all files below a directory, by path."""
    found = {}
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            found[str(path.relative_to(directory))] = path.stat().st_size
    return found


def _is_imported(tokenizer: Path | RemotePath) -> bool:
    """Return True if a tokenizer is that of a run which was imported from a model of another
    program."""
    if not tokenizer.with_name(CARRIED).exists():
        return False
    return TokenizerRecord.load(tokenizer.parent).is_imported


def _default_settings(
    tokenizer: JsonTokenizer, config: ModelConfig, is_imported: bool
) -> dict[str, Any]:
    """Return the settings of a tokenizer_config.json that follow from any tokenizer.json."""
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": config.max_length,
        "clean_up_tokenization_spaces": False,
    }
    if tokenizer.eod_id is not None:
        end = tokenizer.inner.id_to_token(tokenizer.eod_id)
        settings["eos_token"] = end
        if not is_imported:
            # A document begins after the end of the previous one.
            settings["bos_token"] = end
    return settings


def _was_rendered(tokenizer: Path | RemotePath) -> bool:
    """Return True if a chat template wrote the text of the prepared data that has this
    tokenizer."""
    if "chat_template" in read_settings(tokenizer):
        return False
    if tokenizer.with_name(CARRIED).exists():
        return TokenizerRecord.load(tokenizer.parent).is_rendered
    if not tokenizer.with_name(MANIFEST).exists():
        return False
    return bool(Manifest.load(tokenizer.parent).settings.get("chat_template"))


def _as_json(values: Mapping[str, Any]) -> bytes:
    """Return the JSON bytes in the form that transformers writes."""
    return (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()


def rounded(params: nnx.State, dtype: str, config: ModelConfig) -> nnx.State:
    """Return the parameters that reading tensors of `dtype` would give, in their own types; arrays
    that are rounded are deleted."""
    kept = set[str]()
    for entry in FAMILIES[config.family].tensors(config):
        if entry.dtype is not None:
            kept.update(entry.params)

    def round_one(name: str, leaf: jax.Array) -> jax.Array:
        if name in kept or dtype == "float32" or leaf.dtype == dtype:
            return leaf
        # Each cast is a program of its own: a compiler removes a pair of casts within one program.
        narrow = jax.block_until_ready(leaf.astype(dtype))
        result = jax.device_put(narrow.astype(leaf.dtype), leaf.sharding)
        leaf.delete()
        return result

    leaves, structure = jax.tree.flatten(params)
    named = zip(leaf_names(params), leaves, strict=True)
    return jax.tree.unflatten(structure, [round_one(name, leaf) for name, leaf in named])
