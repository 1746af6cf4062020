"""Reads and writes adapters in PEFT's format: adapter_config.json and adapter_model.safetensors, or
shards that adapter_model.safetensors.index.json names.

The names and layouts of the tensors follow from a family's table: the steps that convert the
weights of a product to Hugging Face are applied to A, whose columns are the ranks, and to B, whose
rows are. Products that are joined there, or whose entries change places, have no such form, except
for experts (`peft_experts`).

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors.numpy import save

from data_pipeline.base.errors import ConfigError, DataError, UsageError
from data_pipeline.shards import write_atomic
from maxtrain.checkpoint.listing import aligned
from maxtrain.config.schema import LoraConfig, MeshConfig, ModelConfig, PrecisionConfig
from maxtrain.models.adapt import split_adapters
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import AGAIN, read_json
from maxtrain.models.hf_mapping import (
    Flatten,
    LazyArray,
    ParamMapping,
    Ravel,
    StackLayers,
    Transpose,
    everything,
    in_memory,
)
from maxtrain.models.multi_lora import AdapterSet
from maxtrain.models.specs import MoeSpec
from maxtrain.parallel.mesh import make_mesh
from maxtrain.train_step.optimizer import paths
from maxtrain.train_step.state import abstract_model
from maxtrain.weights.hf import FileNames, open_files
from maxtrain.weights.peft_experts import (
    ExpertAdapterTensors,
    join_experts,
    names_there,
    split_experts,
)
from maxtrain.weights.peft_settings import (
    CONFIG,
    AdapterTargets,
    require_same_settings,
    settings_of,
)
from maxtrain.weights.tensor_file import DTYPES, read_part

TENSORS = "adapter_model.safetensors"
_FILES = FileNames(TENSORS, f"{TENSORS}.index.json")
# Names in PEFT of the parts of an adapter.
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
_TABLE_ROWS = 40


def write_adapters(
    directory: Path, adapters: nnx.State, config: ModelConfig, base: str | None
) -> None:
    """Write both files, in float32.

    Args:
        directory: an existing directory.
        adapters: adapters of a model, without its other weights.
        config: configuration of that model.
        base: the place of the weights that the adapters are for, a directory or a name of the hub;
            None: not recorded in the file.

    Raises:
        UsageError: PEFT has no form for one of the adapters.
    """
    ours = {name: np.asarray(variable[...]) for name, variable in paths(adapters).items()}
    tensors: dict[str, np.ndarray] = {}
    for entry in _table(config, set(ours)):
        (name,) = entry.params
        for their_name, tensor in entry.forward([in_memory(ours[name])]).items():
            tensors[their_name] = tensor.whole()
    joined = join_experts(tensors)
    settings = settings_of(config.lora, _targets(config, joined), base)
    # An array that is not contiguous would be written in another order.
    written = {
        name: np.ascontiguousarray(tensor, np.float32) for name, tensor in joined.tensors.items()
    }
    write_atomic(directory / TENSORS, save(written, {"format": "pt"}))
    write_atomic(directory / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def read_adapters(directory: Path, abstract: nnx.State, config: ModelConfig) -> nnx.State:
    """Return the adapters of a directory as arrays.

    Args:
        directory: a directory with both files.
        abstract: the adapters of the model, as shapes with shardings.
        config: configuration of the model.

    Raises:
        ConfigError: the settings of the adapters are not those of model.lora.
        DataError: a file is missing or damaged, or has other tensors than the model's adapters.
    """
    directory = directory.expanduser()
    require_same_settings(directory, config.lora)
    leaves = paths(abstract)
    table = _table(config, set(leaves))
    shapes = {name: variable.get_value().shape for name, variable in leaves.items()}
    wanted: dict[str, tuple[int, ...]] = {}
    for entry in table:
        wanted |= entry.tensor_shapes([shapes[name] for name in entry.params])
    stored = split_experts(_read(directory), wanted)
    _check(directory, wanted, stored)
    found: dict[str, LazyArray] = {}
    for entry in table:
        of_ours = [shapes[name] for name in entry.params]
        theirs = {name: in_memory(stored[name]) for name in entry.names(of_ours)}
        found |= entry.inverse(theirs, of_ours)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        whole = found[name].whole().astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(place, abstract)


def read_set(directory: Path, name: str, config: ModelConfig) -> AdapterSet:
    """Return the adapters of a directory, for a model without any.

    Args:
        directory: a directory with both files.
        name: name of the adapters in errors.
        config: configuration of the model.

    Raises:
        UsageError: there is no such directory.
        ConfigError: PEFT has changed more than adapters there.
        DataError: as in `read_adapters`.
    """
    directory = directory.expanduser()
    if not (directory / CONFIG).exists():
        raise UsageError(f"{name}: {directory} has no {CONFIG}. Name a directory of PEFT.")
    adapted = dataclasses.replace(config, lora=_lora_of(directory, config))
    adapters = _abstract_adapters(adapted)
    found = paths(read_adapters(directory, adapters, adapted))
    arrays = {path: np.asarray(variable[...]) for path, variable in found.items()}
    return AdapterSet(name, adapted.lora, arrays)


def _abstract_adapters(config: ModelConfig) -> nnx.State:
    """Return the adapters of a model of this config, as shapes for the first device."""
    mesh = make_mesh(MeshConfig(fsdp=1), jax.local_devices()[:1])
    _, variables = abstract_model(config, PrecisionConfig(), mesh)
    _, adapters = split_adapters(variables)
    return adapters


def _lora_of(directory: Path, config: ModelConfig) -> LoraConfig:
    """Return the section `model.lora` that describes the adapters of a directory."""
    path = directory / CONFIG
    there = read_json(path)
    if there.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type={there.get('peft_type')} must be LORA. Use others.")
    rank = there.get("r")
    alpha = there.get("lora_alpha")
    is_rank = isinstance(rank, int) and not isinstance(rank, bool) and rank >= 1
    if not is_rank or not isinstance(alpha, int | float) or not alpha > 0:
        raise DataError(
            f"{path}: r={rank!r} must be a whole number of at least 1, and lora_alpha={alpha!r} "
            "a number above 0. Get the file again."
        )
    lora = LoraConfig(
        rank=rank,
        alpha=float(alpha),
        scaling="root" if there.get("use_rslora") else "rank",
        targets=(".",),
        magnitudes=bool(there.get("use_dora")),
    )
    everywhere = paths(_abstract_adapters(dataclasses.replace(config, lora=lora)))
    kernels = _of_kernels(config)
    plain = set()
    for name in everywhere:
        product, _, part = name.rpartition(".adapter.")
        if part != "magnitude" and _is_plain(kernels[f"{product}.kernel"]):
            plain.add(name)
    # The shapes of all tensors, and the product that each belongs to.
    wanted: dict[str, tuple[int, ...]] = {}
    products = {}
    for entry in _table(config, plain):
        (name,) = entry.params
        shapes = entry.tensor_shapes([everywhere[name].get_value().shape])
        wanted |= shapes
        product, _, _ = name.rpartition(".adapter.")
        products |= dict.fromkeys(shapes, product)
    found = {products[name] for name in names_there(_read(directory), wanted)}
    targets = [f"^{re.escape(product)}$" for product in sorted(found)]
    if not targets:
        raise DataError(
            f"{directory}: has no adapter of a product that models of family "
            f"{config.family} have. Use adapters of this model."
        )
    return dataclasses.replace(lora, targets=tuple(targets))


def _of_kernels(config: ModelConfig) -> dict[str, ParamMapping]:
    """Return the entry of each parameter of a family."""
    found = {}
    for entry in FAMILIES[config.family].tensors(config):
        for name in entry.params:
            found[name] = entry
    return found


def _table(config: ModelConfig, adapters: set[str]) -> list[ParamMapping]:
    """Return the entries of these adapters, each of one array of ours.

    Raises:
        UsageError: PEFT has no form for one of them.
    """
    of_kernels = _of_kernels(config)
    table = []
    for name in sorted(adapters):
        product, _, part = name.rpartition(".adapter.")
        entry = of_kernels[f"{product}.kernel"]
        if not _is_plain(entry):
            raise UsageError(
                f"{product}: {entry.pattern()} holds several products or another order of "
                "entries, for which PEFT's files have no adapters. Leave the product out of "
                "model.lora.targets, or export the whole model with --format hf."
            )
        stacks = tuple(step for step in entry.steps if isinstance(step, StackLayers))
        rest = tuple(step for step in entry.steps if not isinstance(step, StackLayers))
        if part == "b":
            # One dim of ranks, followed by the dims of the outputs.
            rest = (Flatten(1), Transpose())
        elif part == "magnitude":
            rest = (Ravel(),)
        (theirs,) = entry.tensors
        their_name = f"base_model.model.{theirs.removesuffix('.weight')}.{_PARTS[part]}"
        table.append(ParamMapping((name,), (their_name,), stacks + rest))
    return table


def _is_plain(entry: ParamMapping) -> bool:
    """Return True if a product here is one product there, with outputs first."""
    allowed = (StackLayers, Flatten, Transpose)
    is_one = len(entry.params) == len(entry.tensors) == 1
    transposes = [step for step in entry.steps if isinstance(step, Transpose)]
    return is_one and len(transposes) == 1 and all(isinstance(s, allowed) for s in entry.steps)


def _targets(config: ModelConfig, joined: ExpertAdapterTensors) -> AdapterTargets:
    """Return the modules and parameters that have adapters.

    In a model with experts, PEFT takes every module with the name of an expert's product for one,
    wherever it is. Parameters are matched by their exact names.
    """
    layers = FAMILIES[config.family].spec(config).stack.layers()
    has_experts = any(isinstance(layer.mlp, MoeSpec) for layer in layers)
    parameters = set(joined.parameters)
    modules = set()
    for name in joined.tensors:
        module = name.partition(".lora_")[0]
        if module in joined.parameters.values():
            continue
        if has_experts and ".mlp." in module:
            parameters.add(f"{module}.weight")
        else:
            modules.add(module)
    return AdapterTargets(_without_prefix(modules), _without_prefix(parameters))


def _without_prefix(names: Iterable[str]) -> list[str]:
    return sorted(name.removeprefix("base_model.model.") for name in names)


def _read(directory: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a directory in float32; adapters are small.

    Raises:
        DataError: a file is missing or damaged, or the type of a tensor is not a number type.
    """
    found = {}
    with contextlib.ExitStack() as held:
        opened = open_files(directory, _FILES, held)
        if opened.unused:
            names = ", ".join(sorted(opened.unused)[:3])
            raise DataError(
                f"{directory / _FILES.index}: its shards have {len(opened.unused):,} tensors that "
                f"weight_map does not give to them: {names}. {AGAIN}, all of them from one release."
            )
        threads = held.enter_context(concurrent.futures.ThreadPoolExecutor(1))
        for name, tensor in opened.tensors.items():
            if tensor.kind not in DTYPES:
                raise DataError(
                    f"{tensor.path}: {name} has the type {tensor.kind}, which must be one of "
                    f"{', '.join(DTYPES)}. Save the adapters in one of these."
                )
            found[name] = read_part(tensor, np.float32, threads, everything(tensor.shape))
    return found


def _check(
    directory: Path, wanted: Mapping[str, tuple[int, ...]], stored: Mapping[str, np.ndarray]
) -> None:
    """Raise DataError with a table of tensors that are missing, left over, of another shape or not
    finite."""
    problems = []
    for name, shape in wanted.items():
        if name not in stored:
            problems.append((name, "missing", f"{list(shape)} expected"))
        elif stored[name].shape != shape:
            there = list(stored[name].shape)
            problems.append((name, "wrong shape", f"{there}, {list(shape)} expected"))
        elif not np.isfinite(stored[name]).all():
            problems.append((name, "not finite", "NaN or infinity"))
    for name in stored.keys() - wanted.keys():
        problems.append((name, "extra", f"{list(stored[name].shape)}"))
    if not problems:
        return
    lines = aligned(sorted(problems))[:_TABLE_ROWS]
    if len(problems) > len(lines):
        lines.append(f"    ... and {len(problems) - len(lines)} more")
    raise DataError(
        f"{directory}: its tensors are not those of the adapters that model.lora describes:\n"
        + "\n".join(lines)
        + "\nSet model.lora.targets to the products that have one there, or use other adapters."
    )
