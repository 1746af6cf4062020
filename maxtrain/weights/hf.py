"""Weights of Hugging Face directories: config.json beside model.safetensors, whole or in shards
with an index.

Each array is read piece by piece, just the part that a device holds, so that no host ever holds the
whole model. Nothing is
guessed: every tensor must be there, of the right shape, and none left over.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import ConfigError, DataError, UsageError
from maxtrain.checkpoint.listing import aligned
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.models.decoder import Decoder
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import AGAIN, FREE, read_config, read_json
from maxtrain.models.families.family import IGNORED, Tensor
from maxtrain.models.specs import head_dim
from maxtrain.ops.digest import leaf_names
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.mesh import make_mesh
from maxtrain.training.state import abstract_model

_TABLE_ROWS = 40
_LLAMA3_ROPE = {
    "rope_factor",
    "rope_low_freq_factor",
    "rope_high_freq_factor",
    "rope_original_length",
}


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
    mesh = mesh or make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    graphdef, params = abstract_model(config, PrecisionConfig(params=dtype, compute=dtype), mesh)
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
    files, table = _open(directory), FAMILIES[config.family].tensors(config)
    flat, treedef = jax.tree.flatten(params)
    leaves = dict(zip(leaf_names(params), flat))
    assert leaves.keys() == table.keys(), leaves.keys() ^ table.keys()
    _check_tensors(directory, files, [(table[name], leaf.shape) for name, leaf in leaves.items()])

    def load(tensor: Tensor, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def read(index: Any) -> np.ndarray:
            parts = [range(*part.indices(size)) for part, size in zip(index, leaf.shape)]
            out = np.empty([len(part) for part in parts], leaf.dtype)
            for place in np.ndindex(*out.shape[: tensor.stacked]):
                name = tensor.name.format(*(part[i] for part, i in zip(parts, place)))
                inner = (leaf.shape[tensor.stacked :], parts[tensor.stacked :])
                out[place] = _read_part(files[name].get_slice(name), tensor.inputs, *inner)
            return out

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    loaded = jax.tree.unflatten(treedef, [load(table[name], leaf) for name, leaf in leaves.items()])
    if bad := non_finite_names(loaded):
        more = f" and {len(bad) - 1:,} more" if len(bad) > 1 else ""
        raise DataError(
            f"{directory}: {table[bad[0]].name} holds NaN or infinity{more}. {AGAIN}, or use other weights."
        )
    tell(_describe(directory, files, {name: (table[name], leaf) for name, leaf in leaves.items()}))
    return loaded


def _describe(
    directory: Path, files: dict[str, Any], ours: dict[str, tuple[Tensor, jax.ShapeDtypeStruct]]
) -> str:
    """A table of the parameters, each with the tensors that it was read from, and of tensors that
    were not used."""
    rows = [("parameter", "there", "here", "")]
    used = set[str]()
    for name, (tensor, leaf) in ours.items():
        names = [tensor.name.format(*place) for place in np.ndindex(*leaf.shape[: tensor.stacked])]
        used.update(names)
        there = files[names[0]].get_slice(names[0])
        many = f"{len(names)} x " if tensor.stacked else ""
        there = f"{many}{tensor.name.replace('{}', 'N')} {there.get_dtype()}{there.get_shape()}"
        rows.append((name, there, f"{leaf.dtype}{list(leaf.shape)}", "loaded"))
    rows += [
        (name, str(files[name].get_slice(name).get_shape()), "-", "not used")
        for name in sorted(files.keys() - used)
    ]
    lines = aligned(rows)[: _TABLE_ROWS + 1]
    lines += [f"    ... and {len(rows) - len(lines)} more"] * (len(rows) > len(lines))
    head = f"weights of {directory}: {len(ours)} of {len(ours)} parameters loaded, from {len(used):,} tensors"
    return "\n".join([head, *lines])


def _read_part(
    there: Any, inputs: int | None, dims: tuple[int, ...], parts: list[range]
) -> np.ndarray:
    """The ranges `parts` of our dims, out of one tensor there; of dims that share one there, the
    first bounds what is read."""
    inner = [slice(part.start, part.stop) for part in parts]
    if inputs is None:
        return there[tuple(inner)]
    spans, shape = [], []
    for first, stop in ((inputs, len(dims)), (0, inputs)):
        step = math.prod(dims[first + 1 : stop])
        spans.append(slice(parts[first].start * step, parts[first].stop * step))
        shape = [len(parts[first]), *dims[first + 1 : stop], *shape]
        inner[first] = slice(None)
    return there[tuple(spans)].T.reshape(shape)[tuple(inner)]


def _open(directory: Path) -> dict[str, Any]:
    """Each tensor's name and the open file that has it."""
    index, names, files = directory / "model.safetensors.index.json", {"model.safetensors"}, {}
    if index.exists():
        names = set(read_json(index).get("weight_map", {}).values())
    for path in sorted(directory / name for name in names):
        try:
            file = safe_open(path, "numpy")
        except (OSError, SafetensorError) as error:
            what = (
                "is missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error})"
            )
            mend = "save_pretrained(..., safe_serialization=True) of transformers makes it of weights in another format"
            raise DataError(f"{path}: {what}. {AGAIN}; {mend}.") from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def differing_keys(ours: ModelConfig, theirs: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The keys of two models that are a property of the weights and differ, with both values; what
    one lacks is passed over."""
    here, there = dataclasses.asdict(ours) | {"head_dim": head_dim(ours)}, dict(theirs)
    if there.get("head_dim") is None and there.keys() >= {"embed_dim", "num_heads"}:
        there["head_dim"] = there["embed_dim"] // there["num_heads"]
    unused = FREE if there.get("rope_scaling") == "llama3" else FREE | _LLAMA3_ROPE
    return {
        key: (here[key], there[key])
        for key in here
        if key in there and key not in unused and here[key] != there[key]
    }


def _check_same_model(ours: ModelConfig, theirs: ModelConfig, directory: Path) -> None:
    """Raises ConfigError with one problem for each key that differs."""
    problems = [
        f"model.{key}={value} must be {other}, as in {directory}. Set model.{key}={other}."
        for key, (value, other) in differing_keys(ours, dataclasses.asdict(theirs)).items()
    ]
    if problems:
        raise ConfigError(problems)


def _check_tensors(
    directory: Path, files: dict[str, Any], ours: list[tuple[Tensor, tuple[int, ...]]]
) -> None:
    """Raises DataError with a table of tensors that are missing, left over, of another shape or no
    plain floats."""
    wanted = {
        t.name.format(*place): t.shape(shape)
        for t, shape in ours
        for place in np.ndindex(*shape[: t.stacked])
    }
    problems = [
        (name, "missing", f"{list(shape)} expected")
        for name, shape in wanted.items()
        if name not in files
    ]
    for name, file in files.items():
        there = file.get_slice(name)
        shape, dtype = there.get_shape(), there.get_dtype()
        if name not in wanted:
            if not re.fullmatch(IGNORED, name):
                problems.append((name, "extra", f"{shape}"))
        elif tuple(shape) != wanted[name]:
            problems.append((name, "wrong shape", f"{shape}, {list(wanted[name])} expected"))
        elif dtype not in ("F64", "F32", "F16", "BF16"):
            problems.append((name, "wrong dtype", f"{dtype}, a float of 16 or more bits expected"))
    if problems:
        rows = [f"\n    {name}  {what}: {detail}" for name, what, detail in sorted(problems)]
        rows[_TABLE_ROWS:] = (
            [f"\n    ... and {len(rows) - _TABLE_ROWS} more"] if len(rows) > _TABLE_ROWS else []
        )
        raise DataError(
            f"{directory}: its tensors are not those that its config.json describes:{''.join(rows)}\n{AGAIN}."
        )
