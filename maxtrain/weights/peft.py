"""Adapters in the files of PEFT: adapter_config.json and adapter_model.safetensors.

The names and layouts of the tensors follow from a family's table: what is done to the weights of a
product on the way to Hugging Face is done to A, whose columns are the ranks, and to B, whose rows
are. Products that are put together there, or whose entries change places, have no such form.

Source: https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from data_pipeline.errors import ConfigError, DataError, UsageError
from data_pipeline.shards import write_atomic
from maxtrain.checkpoint.listing import aligned
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.directory import read_json
from maxtrain.training.optimizer import paths
from maxtrain.weights.codec import (
    Entry,
    Flatten,
    LazyArray,
    Ravel,
    Stack,
    Transpose,
    in_memory,
)

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"
# What our parts of an adapter are called there.
_PARTS = {"a": "lora_A.weight", "b": "lora_B.weight", "magnitude": "lora_magnitude_vector"}
# How adapters may have begun: others change the weights that they are for when they are loaded.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")
# With one of these, adapters are not simply added to their products, or to other layers.
_OTHER_FORMS = (
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "layer_replication",
    "monteclora_config",
    "use_bdlora",
    "use_qalora",
)
_TABLE_ROWS = 40


def write_adapters(
    directory: Path, adapters: nnx.State, config: ModelConfig, base: str | None
) -> None:
    """Write both files, in float32.

    Args:
        directory: that is there.
        adapters: of a model, without its other weights.
        config: of that model.
        base: where the weights are that the adapters are for, a directory or a name of the hub;
            None: the file does not say.

    Raises:
        UsageError: PEFT has no form for one of the adapters.
    """
    ours = {name: np.asarray(variable[...]) for name, variable in paths(adapters).items()}
    if config.lora.magnitudes:
        _require_magnitudes(set(ours))
    tensors: dict[str, np.ndarray] = {}
    for entry in _table(config, set(ours)):
        (name,) = entry.ours
        for their_name, tensor in entry.forward([in_memory(ours[name])]).items():
            # What is not contiguous would be written in another order.
            tensors[their_name] = np.ascontiguousarray(tensor.whole(), np.float32)
    write_atomic(directory / TENSORS, save(tensors, {"format": "pt"}))
    settings = _settings(config, sorted(tensors), base)
    write_atomic(directory / CONFIG, (json.dumps(settings, indent=2) + "\n").encode())


def _require_magnitudes(adapters: set[str]) -> None:
    """UsageError: some adapters have magnitudes and others, those of experts, have none."""
    for name in sorted(adapters):
        product, _, part = name.rpartition(".adapter.")
        if part == "a" and f"{product}.adapter.magnitude" not in adapters:
            raise UsageError(
                f"{product}: adapters of experts have no magnitudes, and PEFT would give them some "
                "(use_dora). Export the whole model with --format hf, or train without "
                "model.lora.magnitudes, or without experts in model.lora.targets."
            )


def read_adapters(directory: Path, abstract: nnx.State, config: ModelConfig) -> nnx.State:
    """The adapters of a directory as arrays.

    Args:
        directory: with both files.
        abstract: the adapters of the model, as shapes with shardings.
        config: of the model.

    Raises:
        ConfigError: they are of other settings than model.lora.
        DataError: a file is missing or damaged, or has other tensors than the model's adapters.
    """
    directory = directory.expanduser()
    _require_same_settings(directory, config)
    leaves = paths(abstract)
    table = _table(config, set(leaves))
    stored = _read(directory / TENSORS)
    shapes = {name: variable.get_value().shape for name, variable in leaves.items()}
    _check(directory, table, shapes, stored)
    found: dict[str, LazyArray] = {}
    for entry in table:
        of_ours = [shapes[name] for name in entry.ours]
        theirs = {name: in_memory(stored[name]) for name in entry.names(of_ours)}
        found |= entry.inverse(theirs, of_ours)

    def place(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> Array:
        name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
        whole = found[name].whole().astype(leaf.dtype)
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: whole[index])

    return jax.tree_util.tree_map_with_path(place, abstract)


def _table(config: ModelConfig, adapters: set[str]) -> list[Entry]:
    """Entries of these adapters, each of one array of ours.

    UsageError: PEFT has no form for one.
    """
    of_kernels = {}
    for entry in FAMILIES[config.family].table(config):
        for name in entry.ours:
            of_kernels[name] = entry
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
        stacks = tuple(step for step in entry.steps if isinstance(step, Stack))
        rest = tuple(step for step in entry.steps if not isinstance(step, Stack))
        if part == "b":
            # One dim of ranks, and whatever dims the outputs have.
            rest = (Flatten(1), Transpose())
        elif part == "magnitude":
            rest = (Ravel(),)
        (theirs,) = entry.theirs
        their_name = f"base_model.model.{theirs.removesuffix('.weight')}.{_PARTS[part]}"
        table.append(Entry((name,), (their_name,), stacks + rest))
    return table


def _is_plain(entry: Entry) -> bool:
    """Whether a product here is one product there, with outputs first."""
    allowed = (Stack, Flatten, Transpose)
    is_one = len(entry.ours) == len(entry.theirs) == 1
    transposes = [step for step in entry.steps if isinstance(step, Transpose)]
    return is_one and len(transposes) == 1 and all(isinstance(s, allowed) for s in entry.steps)


def _settings(config: ModelConfig, names: list[str], base: str | None) -> dict[str, Any]:
    """The content of adapter_config.json."""
    lora = config.lora
    modules = set()
    for name in names:
        module, _, _ = name.partition(".lora_")
        modules.add(module.removeprefix("base_model.model."))
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.scaling == "root",
        "use_dora": lora.magnitudes,
        # By their whole names, since not all products of one name need have an adapter.
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
    }


def _require_same_settings(directory: Path, config: ModelConfig) -> None:
    """ConfigError: the files have another rank or scale than the model, or more than adapters."""
    path = directory / CONFIG
    there = read_json(path)
    lora = config.lora
    problems = []
    wanted = {
        "r": ("rank", lora.rank),
        "lora_alpha": ("alpha", lora.alpha),
        "use_rslora": ("scaling", lora.scaling == "root"),
        "use_dora": ("magnitudes", lora.magnitudes),
    }
    for name, (key, ours) in wanted.items():
        theirs = there.get(name, False)
        if theirs != ours:
            mend = theirs
            if name == "use_rslora":
                mend = "root" if theirs else "rank"
            problems.append(
                f"model.lora.{key} does not fit {path}, which has {name}={theirs}. "
                f"Set model.lora.{key}={mend}."
            )
    for name, nothing in (("bias", "none"), ("modules_to_save", None)):
        if there.get(name, nothing) not in (nothing, []):
            problems.append(
                f"{path}: {name}={there[name]} is not supported, since only adapters are read. "
                "Take the adapters into the weights with PEFT's merge_and_unload."
            )
    for name in ("rank_pattern", "alpha_pattern"):
        if there.get(name):
            problems.append(
                f"{path}: {name}={there[name]} is not supported: all adapters have one rank and "
                "one scale. Take the adapters into the weights with PEFT's merge_and_unload."
            )
    begins = there.get("init_lora_weights")
    if begins not in _BEGINNINGS:
        problems.append(
            f"{path}: init_lora_weights={begins} is not supported, since PEFT changes the weights "
            "that such adapters are for. Take the adapters into the weights with PEFT's "
            "merge_and_unload."
        )
    for name in _OTHER_FORMS:
        if there.get(name):
            problems.append(
                f"{path}: {name}={there[name]} is not supported: adapters do the same to all tokens, "
                "in the layers of the model. Take them into the weights with PEFT's "
                "merge_and_unload, or use others."
            )
    if there.get("peft_type") != "LORA":
        problems.append(f"{path}: peft_type={there.get('peft_type')} must be LORA. Use others.")
    if problems:
        raise ConfigError(problems)


def _read(path: Path) -> dict[str, np.ndarray]:
    """All tensors of a file; adapters are small."""
    try:
        with safe_open(path, "flax") as file:
            return {name: np.asarray(file.get_tensor(name), jnp.float32) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise DataError(f"{path}: can't be read ({error}). Get the file again.") from error


def _check(
    directory: Path,
    table: list[Entry],
    shapes: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, np.ndarray],
) -> None:
    """DataError: with a table of what is missing, left over, of another shape or not finite."""
    wanted: dict[str, tuple[int, ...]] = {}
    for entry in table:
        wanted |= entry.their_shapes([shapes[name] for name in entry.ours])
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
