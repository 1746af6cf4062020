"""Reads the weights of Hugging Face directories: config.json beside model.safetensors, in one file
or in shards with an index.

Only the part of each array that a device holds is read, on CPUs directly into its final memory, so
that no host holds more than its devices do. Nothing is guessed: every tensor must be present, in
the shard that the index names, of the right shape, and none left over. In a model whose head is its
embedding, a head in the files must be a copy of it.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from data_pipeline.base.errors import ConfigError, DataError, UsageError
from data_pipeline.base.inner_names import is_file_name
from maxtrain.checkpoint.listing import aligned
from maxtrain.checkpoint.zarr_reader import aligned_empty
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.config.sections.model import unread_rope_keys
from maxtrain.config.values import section_leaves
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import (
    AGAIN,
    free_keys,
    quantization_of,
    read_config,
    read_json,
    stored_as,
)
from maxtrain.models.families.family import HEAD, Family
from maxtrain.models.hf_mapping import LazyArray, ParamMapping, Part, Shape, everything
from maxtrain.models.quantized import (
    SCALES,
    StoredKernel,
    quantized_among,
    stored_kernels,
    with_whole_kernels,
)
from maxtrain.models.specs import MlpSpec, head_dim
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.finite import compiler_of_finite, non_finite_names
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.stored_quantized import plain_tensors
from maxtrain.weights.tensor_file import (
    DTYPES,
    StoredTensor,
    TensorRead,
    open_tensors,
    read_all,
    read_part,
)


class FileNames(NamedTuple):
    """Names of the files that hold tensors.

    Args:
        single: the file of all tensors, which takes precedence over an index.
        index: the file that names the shard of each tensor.
    """

    single: str
    index: str


SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OF_MODELS = FileNames(SINGLE, INDEX)
_TABLE_ROWS = 40
# Entries of two tensors that are compared at a time.
_COMPARED_AT_ONCE = 1 << 22
# Some of the threads wait for the disk.
_MOST_THREADS = 8
# Tensors by their names in the family's table.
Files = Mapping[str, StoredTensor]


def load_pretrained(
    directory: str | Path,
    dtype: str = "float32",
    mesh: Mesh | None = None,
    note: Callable[[str], object] = lambda line: None,
    **changes: Any,
) -> tuple[Decoder, ModelConfig]:
    """Load a model with the weights of a Hugging Face directory.

    Args:
        directory: a directory with config.json and model.safetensors or
            model.safetensors.index.json.
        dtype: "float32" or "bfloat16": type of parameters and of the inputs of matrix products.
        mesh: the mesh over which the logical rules split the parameters; None: all on the first
            device of this process.
        note: as in `load_weights`.
        changes: keys of ModelConfig that the user may choose, such as `scan_layers` and
            `attention`.

    Returns:
        The model, which maps int32 tokens [B, T] to float32 logits [B, T, V], and its config.

    Raises:
        DataError: something is missing, left over, misshapen, or not supported.
        UsageError: another dtype.
    """
    if dtype not in ("float32", "bfloat16"):
        raise UsageError(f"dtype={dtype!r} is not supported. Use 'float32' or 'bfloat16'.")
    config = dataclasses.replace(read_config(directory), **changes)
    if mesh is None:
        mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    precision = PrecisionConfig(params=dtype, compute=dtype)
    graphdef, params = abstract_model(config, precision, mesh)
    return nnx.merge(graphdef, load_weights(params, directory, config, note=note)), config


def load_weights(
    params: nnx.State,
    directory: str | Path,
    config: ModelConfig,
    tell: Callable[[str], object] = lambda table: None,
    note: Callable[[str], object] = lambda line: None,
    without_head: bool = False,
) -> nnx.State:
    """Return the parameters of a Hugging Face directory as arrays.

    Args:
        params: parameters of the model, as shapes with shardings; values are rounded to their
            dtypes. Kernels that are quantised are whole on the devices only until the next one is
            read.
        directory: as in `load_pretrained`.
        config: configuration of the model that `params` belong to.
        tell: called with a table of the loaded tensors and of those that were not used.
        note: called with each line about tensors that are left out.
        without_head: `params` have no head, and that of the directory is not read.

    Returns:
        `params` with arrays, sharded as requested.

    Raises:
        ConfigError: the directory's model is not the one that `config` describes.
        DataError: as in `load_pretrained`.
    """
    directory = Path(directory).expanduser()
    _check_same_model(config, read_config(directory), directory)
    family = FAMILIES[config.family]
    table = family.tensors(config)
    if without_head:
        table = [entry for entry in table if entry.params != ("head.kernel",)]
    quantized = stored_kernels(params)
    stored = dict(zip(leaf_names(params), jax.tree.leaves(params), strict=True))
    leaves = with_whole_kernels(stored, quantized)
    assert leaves.keys() == {name for entry in table for name in entry.params}
    with contextlib.ExitStack() as held:
        files, opened, left_out = _open(directory, family, held)
        _check_tensors(directory, files, family, opened.unused, table, leaves)
        if config.tie_embeddings and not (config.score or without_head) and HEAD in files:
            require_head_is_embedding(files[HEAD], files[table[0].tensors[0]], directory)
        count = min(_MOST_THREADS, 2 * (os.cpu_count() or 1))
        threads = held.enter_context(concurrent.futures.ThreadPoolExecutor(count))
        # Compile while the disk is read.
        compiling = threads.submit(compiler_of_finite(params))
        arrays: dict[str, jax.Array] = {}
        for entries in _read_together(table, list(leaves.values()), bool(quantized)):
            arrays |= quantized_among(_load(entries, files, leaves, threads), quantized)
        compiling.result()
    treedef = jax.tree.structure(params)
    loaded = jax.tree.unflatten(treedef, [arrays[name] for name in stored])
    _require_finite(loaded, table, directory)
    described = _describe(directory, files, table, leaves, quantized)
    for line in [*opened.notes, *_left_out_notes(left_out)]:
        note(line)
        described += f"\n{line}"
    tell(described)
    return loaded


def _read_together(
    table: Sequence[ParamMapping], leaves: Sequence[jax.ShapeDtypeStruct], is_quantized: bool
) -> Iterator[Sequence[ParamMapping]]:
    """Yield the groups of entries that are in this host's memory at a time; the files are read from
    beginning to end for each. On the host of an accelerator a group is one entry; the arrays of
    CPUs are in its memory anyway, unless some of them are quantised on loading."""
    platforms = {device.platform for leaf in leaves for device in leaf.sharding.device_set}
    if platforms == {"cpu"} and not is_quantized:
        yield table
        return
    for entry in table:
        yield [entry]


class _ArrayRead(NamedTuple):
    """A parameter that is being read: its abstract array, and memory for each part that a device of
    this process holds."""

    leaf: jax.ShapeDtypeStruct
    parts: dict[Part, np.ndarray]


def _load(
    entries: Sequence[ParamMapping],
    files: Files,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    threads: concurrent.futures.Executor,
) -> dict[str, jax.Array]:
    """Return the parameters of some entries, sharded as requested."""
    reads: list[TensorRead] = []
    found: dict[str, _ArrayRead] = {}
    for entry in entries:
        found |= _ask_for(entry, files, leaves, reads, threads)
    read_all(reads, threads)
    reads.clear()
    arrays = {}
    for name, array in found.items():
        leaf = array.leaf
        part = functools.partial(_part_of, array)
        arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, part)
    return arrays


def _ask_for(
    entry: ParamMapping,
    files: Files,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    reads: list[TensorRead],
    threads: concurrent.futures.Executor,
) -> dict[str, _ArrayRead]:
    """Return the parameters of an entry, whose memory is filled once all requested reads are
    done."""
    ours = [leaves[name] for name in entry.params]
    shapes = [leaf.shape for leaf in ours]
    tensors = {}
    for name, shape in entry.tensor_shapes(shapes).items():
        read = functools.partial(read_part, files[name], ours[0].dtype, threads)
        write = functools.partial(_ask, reads, files[name])
        tensors[name] = LazyArray(shape, read, write)
    found = {}
    for (name, lazy), leaf in zip(entry.inverse(tensors, shapes).items(), ours, strict=True):
        parts = {}
        for index in leaf.sharding.addressable_devices_indices_map(leaf.shape).values():
            part = _part(index, leaf.shape)
            if part not in parts:
                parts[part] = aligned_empty([len(indices) for indices in part], leaf.dtype)
                lazy.read_into(part, parts[part])
        found[name] = _ArrayRead(leaf, parts)
    return found


def _ask(reads: list[TensorRead], stored: StoredTensor, part: Part, out: np.ndarray) -> None:
    """Request that a part of a tensor is read into memory."""
    reads.append(TensorRead(stored, part, out))


def _part(index: Sequence[slice] | None, shape: Shape) -> Part:
    """Return the part of an array that jax describes by slices."""
    return tuple(range(*where.indices(size)) for where, size in zip(index or (), shape))


def _part_of(array: _ArrayRead, index: Any) -> np.ndarray:
    return array.parts[_part(index, array.leaf.shape)]


def _require_finite(params: nnx.State, table: Sequence[ParamMapping], directory: Path) -> None:
    """Raise DataError if a parameter holds NaN or infinity."""
    bad = non_finite_names(params)
    if not bad:
        return
    # In a quantised kernel, the scales hold it.
    name = bad[0].removesuffix(f".{SCALES}")
    there = next(entry.pattern() for entry in table if name in entry.params)
    more = ""
    if len(bad) > 1:
        more = f" and {len(bad) - 1:,} more"
    raise DataError(
        f"{directory}: {there} holds NaN or infinity{more}. {AGAIN}, or use other weights."
    )


def _describe(
    directory: Path,
    files: Files,
    table: Sequence[ParamMapping],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    quantized: Mapping[str, StoredKernel],
) -> str:
    """Return a table of the parameters, each with the tensors that it was read from, and of the
    tensors that were not used."""
    entries = {name: entry for entry in table for name in entry.params}
    rows = [("parameter", "there", "here", "")]
    used = set[str]()
    for name, leaf in leaves.items():
        entry = entries[name]
        names = entry.names([leaves[ours].shape for ours in entry.params])
        used.update(names)
        first = files[names[0]]
        there = f"{entry.pattern()} {first.kind}{list(first.shape)}"
        if len(names) > 1:
            there = f"{len(names)} x {there}"
        here = f"{leaf.dtype}{list(leaf.shape)}"
        if name in quantized:
            here = quantized[name].describe()
        rows.append((name, there, here, "loaded"))
    for name in sorted(files.keys() - used):
        rows.append((name, str(list(files[name].shape)), "-", "not used"))
    lines = aligned(rows)[: _TABLE_ROWS + 1]
    if len(rows) > len(lines):
        lines.append(f"    ... and {len(rows) - len(lines)} more")
    count = f"{len(leaves)} of {len(leaves)} parameters loaded, from {len(used):,} tensors"
    dequantized = sum(files[name].dequantize is not None for name in used)
    if dequantized:
        count = f"{count}, of which {dequantized:,} were dequantised from {stored_as(directory)}"
    return "\n".join([f"weights of {directory}: {count}", *lines])


class OpenedWeights(NamedTuple):
    """The tensors of a directory, in open files.

    Attributes:
        tensors: tensors by name; plain ones, also if the files store them quantised.
        unused: names of tensors in shards to which the index does not assign them.
        notes: lines for the user about files and tensors that are not read.
    """

    tensors: dict[str, StoredTensor]
    unused: frozenset[str]
    notes: list[str]


def read_weight_map(directory: Path, names: FileNames = _OF_MODELS) -> dict[str, str] | None:
    """Return the shard of each tensor from the index; None: all tensors are in the single file,
    which takes precedence over an index, as in transformers.

    Raises:
        DataError: the index is damaged.
    """
    index = directory / names.index
    if (directory / names.single).exists() or not index.exists():
        return None
    return _weight_map(index)


def tensor_files(directory: Path) -> list[Path]:
    """Return the files of a directory's tensors. Raise DataError if the index is damaged."""
    weight_map = read_weight_map(directory)
    if weight_map is None:
        return [directory / SINGLE]
    return sorted(directory / name for name in set(weight_map.values()))


def _weight_map(index: Path) -> dict[str, str]:
    named = read_json(index).get("weight_map")
    if not isinstance(named, dict) or not all(map(_is_name_of_file, named.values())):
        raise DataError(
            f"{index}: weight_map must give each tensor the name of a file beside it. {AGAIN}."
        )
    return named


def _is_name_of_file(name: Any) -> bool:
    return is_file_name(name) and name.endswith(".safetensors")


def open_directory(directory: Path, held: contextlib.ExitStack) -> OpenedWeights:
    """Return the tensors of a directory, each from the file that the index names; `held` closes the
    files.

    Raises:
        DataError: a file is missing or broken, a shard lacks a tensor that the index gives to it,
            or quantised weights have no scales that fit.
    """
    opened = open_files(directory, _OF_MODELS, held)
    quantization = quantization_of(directory)
    if quantization is None:
        return opened
    return opened._replace(tensors=plain_tensors(opened.tensors, quantization, directory))


def open_files(directory: Path, names: FileNames, held: contextlib.ExitStack) -> OpenedWeights:
    """Return the tensors of a directory in the form of its files; `held` closes the files.

    Raises:
        DataError: a file is missing or broken, or a shard lacks a tensor that the index assigns to
            it.
    """
    weight_map = read_weight_map(directory, names)
    if weight_map is not None:
        return _open_shards(directory, names.index, weight_map, held)
    tensors = open_tensors(directory / names.single, held)
    notes = []
    if (directory / names.index).exists():
        notes.append(
            f"{names.single} is read, as by transformers, and {names.index} beside it is not"
        )
    return OpenedWeights(tensors, frozenset(), notes)


def _open_shards(
    directory: Path, index: str, weight_map: Mapping[str, str], held: contextlib.ExitStack
) -> OpenedWeights:
    tensors: dict[str, StoredTensor] = {}
    unused = set[str]()
    missing = []
    for shard in sorted(set(weight_map.values())):
        stored = open_tensors(directory / shard, held)
        for name in (name for name, file in weight_map.items() if file == shard):
            if name in stored:
                tensors[name] = stored.pop(name)
            else:
                missing.append(f"{name} ({shard})")
        unused.update(stored)
    if missing:
        shown = ", ".join(sorted(missing)[:3])
        if len(missing) > 3:
            shown += f" and {len(missing) - 3:,} more"
        raise DataError(
            f"{directory / index}: weight_map names tensors that their shards do not have: "
            f"{shown}. {AGAIN}, all of them from one release."
        )
    notes = []
    if unused:
        names = ", ".join(sorted(unused)[:3])
        notes.append(
            f"{len(unused):,} tensors in shards are not read, since {index} does not give them to "
            f"these shards: {names}"
        )
    return OpenedWeights(tensors, frozenset(unused), notes)


def stored_dtype(directory: Path) -> str | None:
    """Return the type of most numbers in a Hugging Face directory, "float32", "bfloat16" or
    "float16"; None: they are quantised.

    Raises:
        DataError: the files can't be read.
    """
    if quantization_of(directory) is not None:
        return None
    counts: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        for tensor in open_directory(directory, held).tensors.values():
            counts[tensor.kind] = counts.get(tensor.kind, 0) + math.prod(tensor.shape)
    most = max(counts, key=lambda kind: counts[kind], default="F32")
    return {"F32": "float32", "F64": "float32", "BF16": "bfloat16", "F16": "float16"}.get(most)


def require_head_is_embedding(head: StoredTensor, embedding: StoredTensor, directory: Path) -> None:
    """Raise DataError for a head that is not the embedding, in the files of a model whose config
    ties both.

    Programs disagree on which of the two counts: transformers 5 uses the head of the file, older
    versions and vLLM use the embedding.

    Raises:
        DataError: the numbers of the two tensors differ.
    """
    if head.shape == embedding.shape and _have_same_numbers(head, embedding):
        return
    raise DataError(
        f"{directory}: tie_word_embeddings=true, but lm_head.weight in its files differs from the "
        "embedding, so that programs disagree on the model's head. Set "
        '"tie_word_embeddings": false in config.json to use lm_head.weight, or delete that tensor '
        "to use the embedding."
    )


def _have_same_numbers(one: StoredTensor, other: StoredTensor) -> bool:
    """Return True if two tensors of one shape have the same numbers, independent of their types."""
    rows, *others = one.shape
    at_once = max(1, _COMPARED_AT_ONCE // max(1, math.prod(others)))
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        for start in range(0, rows, at_once):
            part = (range(start, min(rows, start + at_once)), *everything(tuple(others)))
            found = [read_part(tensor, np.float32, threads, part) for tensor in (one, other)]
            if not np.array_equal(*found, equal_nan=True):
                return False
    return True


def _open(
    directory: Path, family: Family, held: contextlib.ExitStack
) -> tuple[Files, OpenedWeights, dict[str, int]]:
    """Open a directory. Returns each tensor by its name in the family's table, in files that `held`
    closes; the opened weights; and the number of tensors of each part of the model that is left
    out."""
    files = {}
    left_out = dict.fromkeys(family.other_parts, 0)
    opened = open_directory(directory, held)
    for name, stored in opened.tensors.items():
        parts = [part for part, names in family.other_parts.items() if re.fullmatch(names, name)]
        if parts:
            left_out[parts[0]] += 1
        else:
            files[family.renamed(name)] = stored
    return files, opened, left_out


def _left_out_notes(left_out: Mapping[str, int]) -> list[str]:
    """Return a line about the parts that are left out, if there are any."""
    counts = [f"{count:,} of the {part}" for part, count in left_out.items() if count]
    if not counts:
        return []
    return [f"tensors that are left out, since only the part for text is read: {', '.join(counts)}"]


def differing_keys(ours: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the keys of two models that are a property of the weights and differ, by their paths
    below `model`, with both values; keys that one model lacks are skipped."""
    here = section_leaves(dataclasses.asdict(ours)) | {"head_dim": head_dim(ours)}
    there = section_leaves(theirs)
    if there.get("head_dim") is None and there.keys() >= {"embed_dim", "num_heads"}:
        there["head_dim"] = there["embed_dim"] // there["num_heads"]
    for leaves in (here, there):
        # The value of a key that is left open.
        if "mlp_dim" in leaves and leaves.get("moe.expert_dim", 0) is None:
            leaves["moe.expert_dim"] = leaves["mlp_dim"]
    unused = free_keys(ours.family) | unread_rope_keys(there.get("rope_scaling", "none"))
    layers = FAMILIES[ours.family].spec(ours).stack.layers()
    if not any(isinstance(layer.mlp, MlpSpec) for layer in layers):
        # All layers have experts.
        unused.add("mlp_dim")
    found = {}
    for key, value in here.items():
        is_used = not unused & {key, key.partition(".")[0]}
        if key in there and is_used and value != there[key]:
            found[key] = (value, there[key])
    return found


def _check_same_model(ours: ModelConfig, theirs: ModelConfig, directory: Path) -> None:
    """Raise ConfigError with one problem for each key that differs."""
    problems = [
        f"model.{key}={value} must be {other}, as in {directory}. Set model.{key}={other}."
        for key, (value, other) in differing_keys(ours, dataclasses.asdict(theirs)).items()
    ]
    if problems:
        raise ConfigError(problems)


def _check_tensors(
    directory: Path,
    files: Files,
    family: Family,
    unused: Collection[str],
    table: Sequence[ParamMapping],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raise DataError with a table of tensors that are missing, left over, of another shape or not
    plain floats."""
    wanted: dict[str, Shape] = {}
    for entry in table:
        wanted |= entry.tensor_shapes([leaves[name].shape for name in entry.params])
    problems = []
    not_named = {family.renamed(name) for name in unused}
    for name, shape in wanted.items():
        if name not in files:
            detail = f"{list(shape)} expected"
            if name in not_named:
                detail += f"; it is in a shard, but {INDEX} does not name it"
            problems.append((name, "missing", detail))
    for name, stored in files.items():
        shape = list(stored.shape)
        if name not in wanted:
            if not re.fullmatch(family.ignored, name):
                problems.append((name, "extra", f"{shape}"))
        elif stored.shape != wanted[name]:
            problems.append((name, "wrong shape", f"{shape}, {list(wanted[name])} expected"))
        elif stored.kind not in DTYPES:
            what = f"{stored.kind}, a float of 16 or more bits expected"
            problems.append((name, "wrong dtype", what))
    if not problems:
        return
    rows = [f"\n    {name}  {what}: {detail}" for name, what, detail in sorted(problems)]
    if len(rows) > _TABLE_ROWS:
        rows[_TABLE_ROWS:] = [f"\n    ... and {len(rows) - _TABLE_ROWS} more"]
    raise DataError(
        f"{directory}: its tensors are not those that its config.json describes:"
        f"{''.join(rows)}\n{AGAIN}."
    )
