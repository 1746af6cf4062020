"""Weights of Hugging Face directories: config.json beside model.safetensors, whole or in shards with an index.

Each array is read piece by piece, just the part that a device holds, so that no host ever holds the whole model. Nothing is
guessed: every tensor must be there, of the right shape, and none left over.
"""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open

from data_pipeline.errors import ConfigError, DataError, UsageError
from maxtrain.config.schema import MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.models.decoder import Decoder, head_dim
from maxtrain.models.families.family import Settings, Tensor
from maxtrain.models.registry import FAMILIES
from maxtrain.parallel.mesh import make_mesh
from maxtrain.training.state import abstract_model

_TABLE_ROWS = 40
# What a run may choose for itself; the rest of a ModelConfig is a property of the weights.
_FREE = ("max_length", "init_scale", "attention", "scan_layers", "remat", "loss_chunk")


def load_pretrained(
    directory: str | Path, dtype: str = "float32", mesh: Mesh | None = None, **changes: Any
) -> tuple[Decoder, ModelConfig]:
    """A model with the weights of a Hugging Face directory.

    Args:
        directory: with config.json and model.safetensors or model.safetensors.index.json.
        dtype: "float32" or "bfloat16", of parameters and of the inputs of matrix products.
        mesh: that the parameters are split over by the logical rules; None: all on this process's first device.
        changes: keys of ModelConfig that are the user's to choose, such as `scan_layers` and `attention`.

    Returns:
        The model, whose call with int32 tokens [B, T] gives float32 logits [B, T, V]; and its config.

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


def read_config(directory: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory; raises DataError for what is missing or not supported."""
    path = Path(directory).expanduser() / "config.json"
    values = _read_json(path, "Name a directory with config.json and model.safetensors, as downloaded from Hugging Face.")
    named = values.get("architectures")
    families = [family for family in FAMILIES.values() if [family.architecture] == named]
    if not families:
        known = ", ".join(family.architecture for family in FAMILIES.values())
        raise DataError(f"{path}: architectures={named} is not known here. Choose a model of one of: {known}.")
    return families[0].read(Settings(values, path))


def load_weights(params: nnx.State, directory: str | Path, config: ModelConfig) -> nnx.State:
    """The parameters of a Hugging Face directory as arrays.

    Args:
        params: the model's, as shapes with shardings; values are rounded to their dtypes.
        directory: as for `load_pretrained`.
        config: of the model that `params` belong to.

    Returns:
        `params` with arrays, each split as asked for.

    Raises:
        ConfigError: the directory's model is not the one that `config` describes.
        DataError: tensors are missing, left over or misshapen, or a file can't be read.
    """
    directory = Path(directory).expanduser()
    _check_same_model(config, read_config(directory), directory)
    family, files = FAMILIES[config.family], _open(directory)
    table, (flat, treedef) = family.tensors(config), jax.tree_util.tree_flatten_with_path(params)
    leaves = {jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value"): leaf for path, leaf in flat}
    assert leaves.keys() == table.keys(), leaves.keys() ^ table.keys()
    _check_tensors(directory, files, {name: (table[name], leaf.shape) for name, leaf in leaves.items()}, family.ignored)

    def load(tensor: Tensor, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        def read(index: tuple[slice, ...]) -> np.ndarray:
            parts = [range(*part.indices(size)) for part, size in zip(index, leaf.shape)]
            out = np.empty([len(part) for part in parts], leaf.dtype)
            for place in np.ndindex(*out.shape[: tensor.stacked]):
                name = tensor.name.format(*(part[i] for part, i in zip(parts, place)))
                out[place] = _read_part(files[name].get_slice(name), tensor, leaf.shape, parts[tensor.stacked :])
            return out

        return jax.make_array_from_callback(leaf.shape, leaf.sharding, read)

    return jax.tree.unflatten(treedef, [load(table[name], leaf) for name, leaf in leaves.items()])


def _read_part(there: Any, tensor: Tensor, shape: tuple[int, ...], parts: list[range]) -> np.ndarray:
    """The part of one tensor that makes the part `parts` of ours, without its stacked dims."""
    if tensor.inputs is None:
        return there[tuple(slice(part.start, part.stop) for part in parts)]

    def span(first: int, stop: int) -> tuple[slice, list[int]]:
        """Where a group of our dims lies in one dim there, all of it but for the group's first dim; and its shape."""
        rest, outer = list(shape[tensor.stacked :][first + 1 : stop]), parts[first]
        return slice(outer.start * math.prod(rest), outer.stop * math.prod(rest)), [len(outer), *rest]

    (columns, inputs), (rows, outputs) = span(0, tensor.inputs), span(tensor.inputs, len(parts))
    whole = there[rows, columns].T.reshape(inputs + outputs)
    firsts = (0, tensor.inputs)
    return whole[tuple(slice(None) if i in firsts else slice(part.start, part.stop) for i, part in enumerate(parts))]


def _read_json(path: Path, mend: str) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{path}: can't be read ({error.strerror}). {mend}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not JSON ({error}). Get the file again from where the model is.") from error
    if not isinstance(values, dict):
        raise DataError(f"{path}: must hold a JSON object. Get the file again from where the model is.")
    return values


def _open(directory: Path) -> dict[str, Any]:
    """Each tensor's name and the open file that has it."""
    index, names = directory / "model.safetensors.index.json", {"model.safetensors"}
    if index.exists():
        names = set(_read_json(index, "Check its permissions.").get("weight_map", {}).values())
    files = {}
    for name in sorted(names):
        try:
            file = safe_open(directory / name, "numpy")
        except (OSError, SafetensorError) as error:
            what = "is missing" if isinstance(error, FileNotFoundError) else f"can't be read ({error})"
            raise DataError(
                f"{directory / name}: {what}. Get the file again from where the model is; weights in another format are turned "
                "into this one by save_pretrained(..., safe_serialization=True) of transformers."
            ) from error
        files |= dict.fromkeys(file.keys(), file)
    return files


def _check_same_model(ours: ModelConfig, theirs: ModelConfig, directory: Path) -> None:
    """Raises ConfigError with one problem for each key that differs."""
    here, there = ({**dataclasses.asdict(config), "head_dim": head_dim(config)} for config in (ours, theirs))
    unused = set() if theirs.rope_scaling == ours.rope_scaling == "llama3" else {k for k in here if re.match("rope_[flho]", k)}
    keys = [key for key in here if key not in _FREE and key not in unused and here[key] != there[key]]
    if keys:
        rows = (
            f"model.{key}={here[key]} must be {there[key]}, as in {directory}. Set model.{key}={there[key]}." for key in keys
        )
        raise ConfigError(list(rows))


def _check_tensors(
    directory: Path, files: dict[str, Any], ours: dict[str, tuple[Tensor, tuple[int, ...]]], ignored: str
) -> None:
    """Raises DataError with a table of tensors that are missing, left over, of another shape or no plain floats."""
    problems, expected = [], set()
    for tensor, shape in ours.values():
        for place in np.ndindex(*shape[: tensor.stacked]):
            name, wanted = tensor.name.format(*place), tensor.shape(shape)
            expected.add(name)
            if name not in files:
                problems.append((name, "missing", f"{list(wanted)} expected"))
                continue
            there = files[name].get_slice(name)
            if tuple(there.get_shape()) != wanted:
                problems.append((name, "wrong shape", f"{there.get_shape()}, {list(wanted)} expected"))
            elif there.get_dtype() not in ("F64", "F32", "F16", "BF16"):
                problems.append((name, "wrong dtype", f"{there.get_dtype()}, a float of 16 or more bits expected"))
    extra = [name for name in files if name not in expected and not re.fullmatch(ignored, name)]
    problems += [(name, "extra", str(files[name].get_slice(name).get_shape())) for name in extra]
    if problems:
        width = max(len(name) for name, _, _ in problems)
        rows = [f"\n    {name:<{width}}  {what:<11}  {detail}" for name, what, detail in sorted(problems)[:_TABLE_ROWS]]
        more = f"\n    ... and {len(problems) - _TABLE_ROWS} more" if len(problems) > _TABLE_ROWS else ""
        raise DataError(
            f"{directory}: the tensors are not those that its config.json describes:{''.join(rows)}{more}\nGet the directory "
            "again, config.json and all its weights, from where the model is."
        )
