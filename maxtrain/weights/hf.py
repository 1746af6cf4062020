"""Weights of Hugging Face directories: config.json beside model.safetensors, whole or in shards
with an index.

Each array is read piece by piece, just the part that a device holds, so that no host ever holds the
whole model. Nothing is guessed: every tensor must be there, of the right shape, and none left over.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import ConfigError, DataError, UsageError
from maxtrain.checkpoint.listing import aligned
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.config.sections.model import unread_rope_keys
from maxtrain.config.values import section_leaves
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import AGAIN, free_keys, read_config, read_json
from maxtrain.models.families.family import Family
from maxtrain.models.specs import head_dim
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.mesh import make_mesh
from maxtrain.training.state import abstract_model
from maxtrain.weights.codec import Entry, LazyArray, Part, Shape, slices

_TABLE_ROWS = 40


def load_pretrained(
    directory: str | Path, dtype: str = "float32", mesh: Mesh | None = None, **changes: Any
) -> tuple[Decoder, ModelConfig]:
    """A model with the weights of a Hugging Face directory.

    Args:
        directory: with config.json and model.safetensors or model.safetensors.index.json.
        dtype: "float32" or "bfloat16", of parameters and of the inputs of matrix products.
        mesh: that the parameters are split over by the logical rules; None: all on this process's
            first device.
        changes: keys of ModelConfig that are the user's to choose, such as `scan_layers` and
            `attention`.

    Returns:
        The model, whose call with int32 tokens [B, T] gives float32 logits [B, T, V]; and its
        config.

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
    return nnx.merge(graphdef, load_weights(params, directory, config)), config


def load_weights(
    params: nnx.State,
    directory: str | Path,
    config: ModelConfig,
    tell: Callable[[str], object] = lambda table: None,
) -> nnx.State:
    """The parameters of a Hugging Face directory as arrays.

    Args:
        params: the model's, as shapes with shardings; values are rounded to their dtypes.
        directory: as for `load_pretrained`.
        config: of the model that `params` belong to.
        tell: gets a table of what was loaded, and of what was not used.

    Returns:
        `params` with arrays, each split as asked for.

    Raises:
        ConfigError: the directory's model is not the one that `config` describes.
        DataError: as `load_pretrained`.
    """
    directory = Path(directory).expanduser()
    _check_same_model(config, read_config(directory), directory)
    family = FAMILIES[config.family]
    files = _open(directory, family)
    table = family.table(config)
    flat, treedef = jax.tree.flatten(params)
    leaves = dict(zip(leaf_names(params), flat))
    assert leaves.keys() == {name for entry in table for name in entry.ours}
    _check_tensors(directory, files, family.ignored, table, leaves)
    arrays: dict[str, jax.Array] = {}
    for entry in table:
        arrays |= _load(entry, files, leaves)
    loaded = jax.tree.unflatten(treedef, [arrays[name] for name in leaves])
    _require_finite(loaded, table, directory)
    tell(_describe(directory, files, table, leaves))
    return loaded


class _Stored(NamedTuple):
    """A tensor in a file that is open."""

    file: Any
    # There; files of one family may differ in it.
    name: str

    def slice(self) -> Any:
        """Its shape, its type and, by an index, its numbers, of which nothing is read yet."""
        return self.file.get_slice(self.name)


# By the name in the family's table.
Files = Mapping[str, _Stored]


def _load(
    entry: Entry, files: Files, leaves: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """The parameters of an entry, each split as asked for."""
    ours = [leaves[name] for name in entry.ours]
    shapes = [leaf.shape for leaf in ours]
    tensors = {}
    for name, shape in entry.their_shapes(shapes).items():
        read = functools.partial(_read_part, files[name], ours[0].dtype)
        tensors[name] = LazyArray(shape, read)
    arrays = {}
    for (name, lazy), leaf in zip(entry.inverse(tensors, shapes).items(), ours, strict=True):
        read = functools.partial(_read_index, lazy)
        arrays[name] = jax.make_array_from_callback(leaf.shape, leaf.sharding, read)
    return arrays


def _read_part(stored: _Stored, dtype: Any, part: Part) -> np.ndarray:
    """A part of a tensor in a file, rounded to `dtype`."""
    return stored.slice()[slices(part)].astype(dtype)


def _read_index(array: LazyArray, index: Any) -> np.ndarray:
    """A part of an array as jax asks for it."""
    part = tuple(range(*where.indices(size)) for where, size in zip(index, array.shape))
    return np.ascontiguousarray(array.read(part))


def _require_finite(params: nnx.State, table: Sequence[Entry], directory: Path) -> None:
    """Raises DataError if a parameter holds NaN or infinity."""
    bad = non_finite_names(params)
    if not bad:
        return
    there = next(entry.pattern() for entry in table if bad[0] in entry.ours)
    more = ""
    if len(bad) > 1:
        more = f" and {len(bad) - 1:,} more"
    raise DataError(
        f"{directory}: {there} holds NaN or infinity{more}. {AGAIN}, or use other weights."
    )


def _describe(
    directory: Path,
    files: Files,
    table: Sequence[Entry],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
) -> str:
    """A table of the parameters, each with the tensors that it was read from, and of tensors that
    were not used."""
    entries = {name: entry for entry in table for name in entry.ours}
    rows = [("parameter", "there", "here", "")]
    used = set[str]()
    for name, leaf in leaves.items():
        entry = entries[name]
        names = entry.names([leaves[ours].shape for ours in entry.ours])
        used.update(names)
        first = files[names[0]].slice()
        there = f"{entry.pattern()} {first.get_dtype()}{first.get_shape()}"
        if len(names) > 1:
            there = f"{len(names)} x {there}"
        rows.append((name, there, f"{leaf.dtype}{list(leaf.shape)}", "loaded"))
    for name in sorted(files.keys() - used):
        rows.append((name, str(files[name].slice().get_shape()), "-", "not used"))
    lines = aligned(rows)[: _TABLE_ROWS + 1]
    if len(rows) > len(lines):
        lines.append(f"    ... and {len(rows) - len(lines)} more")
    count = f"{len(leaves)} of {len(leaves)} parameters loaded, from {len(used):,} tensors"
    return "\n".join([f"weights of {directory}: {count}", *lines])


def _open(directory: Path, family: Family) -> dict[str, _Stored]:
    """Each tensor's name in the family's table, and the open file that has it."""
    index = directory / "model.safetensors.index.json"
    names = {"model.safetensors"}
    if index.exists():
        names = set(read_json(index).get("weight_map", {}).values())
    files = {}
    for path in sorted(directory / name for name in names):
        file = _open_file(path)
        for name in file.keys():  # noqa: SIM118, not a mapping
            files[family.renamed(name)] = _Stored(file, name)
    return files


def _open_file(path: Path) -> Any:
    """A file of tensors; DataError: it is missing or broken."""
    try:
        return safe_open(path, "numpy")
    except (OSError, SafetensorError) as error:
        what = f"can't be read ({error})"
        if isinstance(error, FileNotFoundError):
            what = "is missing"
        raise DataError(
            f"{path}: {what}. {AGAIN}; save_pretrained(..., safe_serialization=True) of "
            "transformers makes it of weights in another format."
        ) from error


def differing_keys(ours: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two models that are a property of the weights and differ, by their paths below
    `model`, with both values; what one lacks is passed over."""
    here = section_leaves(dataclasses.asdict(ours)) | {"head_dim": head_dim(ours)}
    there = section_leaves(theirs)
    if there.get("head_dim") is None and there.keys() >= {"embed_dim", "num_heads"}:
        there["head_dim"] = there["embed_dim"] // there["num_heads"]
    unused = free_keys(ours.family) | unread_rope_keys(there.get("rope_scaling", "none"))
    found = {}
    for key, value in here.items():
        if key in there and key not in unused and value != there[key]:
            found[key] = (value, there[key])
    return found


def _check_same_model(ours: ModelConfig, theirs: ModelConfig, directory: Path) -> None:
    """Raises ConfigError with one problem for each key that differs."""
    problems = [
        f"model.{key}={value} must be {other}, as in {directory}. Set model.{key}={other}."
        for key, (value, other) in differing_keys(ours, dataclasses.asdict(theirs)).items()
    ]
    if problems:
        raise ConfigError(problems)


def _check_tensors(
    directory: Path,
    files: Files,
    ignored: str,
    table: Sequence[Entry],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
) -> None:
    """Raises DataError with a table of tensors that are missing, left over, of another shape or no
    plain floats."""
    wanted: dict[str, Shape] = {}
    for entry in table:
        wanted |= entry.their_shapes([leaves[name].shape for name in entry.ours])
    problems = []
    for name, shape in wanted.items():
        if name not in files:
            problems.append((name, "missing", f"{list(shape)} expected"))
    for name, stored in files.items():
        there = stored.slice()
        shape, dtype = there.get_shape(), there.get_dtype()
        if name not in wanted:
            if not re.fullmatch(ignored, name):
                problems.append((name, "extra", f"{shape}"))
        elif tuple(shape) != wanted[name]:
            problems.append((name, "wrong shape", f"{shape}, {list(wanted[name])} expected"))
        elif dtype not in ("F64", "F32", "F16", "BF16"):
            problems.append((name, "wrong dtype", f"{dtype}, a float of 16 or more bits expected"))
    if not problems:
        return
    rows = [f"\n    {name}  {what}: {detail}" for name, what, detail in sorted(problems)]
    if len(rows) > _TABLE_ROWS:
        rows[_TABLE_ROWS:] = [f"\n    ... and {len(rows) - _TABLE_ROWS} more"]
    raise DataError(
        f"{directory}: its tensors are not those that its config.json describes:"
        f"{''.join(rows)}\n{AGAIN}."
    )
