"""Writes adapter_config.json of PEFT's format, and compares it with a model. No jax here."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError, DataError, UsageError
from maxtrain.config.schema import LoraConfig
from maxtrain.config.values import section_leaves
from maxtrain.models.families.directory import read_json
from maxtrain.weights.peft_experts import GATE_AND_UP

CONFIG = "adapter_config.json"
# Settings with which the same tensors are another model, or with which there are more tensors.
_OTHER_MODELS = (
    "alora_invocation_tokens",
    "arrow_config",
    "bias",
    "kasa_config",
    "layer_replication",
    "lora_bias",
    "modules_to_save",
    "monteclora_config",
    "trainable_token_indices",
    "use_bdlora",
    "use_qalora",
)
# Initialisations of A and B that leave the weights unchanged.
_PLAIN_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal")


class AdapterTargets(NamedTuple):
    """The modules and parameters with adapters, as in adapter_config.json: by whole names, since
    not all products of one name need to have one."""

    modules: list[str]
    parameters: list[str]


def settings_of(lora: LoraConfig, targets: AdapterTargets, base: str | None) -> dict[str, Any]:
    """Return the content of adapter_config.json.

    Raises:
        UsageError: PEFT has no magnitudes for one of the adapters.
    """
    if lora.magnitudes and targets.parameters:
        raise UsageError(
            "model.lora.magnitudes=True: PEFT has none for feed-forward blocks of a model with "
            "experts. Export the whole model with --format hf, or train adapters of attention "
            r"alone: model.lora.targets='[attention\.]'."
        )
    patterns: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
    if any(name.endswith(".gate_up_proj") for name in targets.parameters):
        patterns = _patterns_of_gate_and_up(lora)
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "use_rslora": lora.scaling == "root",
        "use_dora": lora.magnitudes,
        "target_modules": targets.modules,
        "target_parameters": targets.parameters or None,
        "lora_dropout": lora.dropout,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        **patterns,
    }


def base_of(directory: Path) -> str | None:
    """Return the model that adapters are for, as named in their files, or None."""
    return read_json(directory.expanduser() / CONFIG).get("base_model_name_or_path")


def require_same_settings(directory: Path, lora: LoraConfig) -> None:
    """Check that the settings of the adapters of a directory are those of a model with this
    section.

    Raises:
        ConfigError: the files have another rank or scale than the model, or more than adapters.
        DataError: there are no such files.
    """
    path = directory.expanduser() / CONFIG
    if not path.exists():
        raise DataError(
            f"{directory}: has no {CONFIG}. Name a directory that PEFT's save_pretrained or "
            "`maxtrain export --format peft` has written."
        )
    there = read_json(path)
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
            fix = theirs
            if name == "use_rslora":
                fix = "root" if theirs else "rank"
            problems.append(
                f"model.lora.{key} does not fit {path}, which has {name}={theirs}. "
                f"Set model.lora.{key}={fix}."
            )
    for name in _OTHER_MODELS:
        if there.get(name, "none") not in ("none", None, False, []):
            problems.append(
                f"{path}: {name}={there[name]} is not supported, since only adapters are read. "
                "Take the adapters into the weights with PEFT's merge_and_unload."
            )
    beginning = there.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        problems.append(
            f"{path}: init_lora_weights={beginning} is not supported: it changes the weights, too. "
            "Save the adapters with PEFT's path_initial_model_for_weight_conversion, or take them "
            "into the weights with its merge_and_unload."
        )
    patterns = {name: there.get(name) or {} for name in ("rank_pattern", "alpha_pattern")}
    if lora.rank is None or not _same_numbers(patterns, _patterns_of_gate_and_up(lora)):
        for name, given in patterns.items():
            if given:
                problems.append(
                    f"{path}: {name}={given} is not supported: all adapters have one rank and "
                    "one scale. Take the adapters into the weights with PEFT's merge_and_unload."
                )
    if there.get("peft_type") != "LORA":
        problems.append(f"{path}: peft_type={there.get('peft_type')} must be LORA. Use others.")
    if problems:
        raise ConfigError(problems)


def dropout_note(directory: Path, lora: LoraConfig) -> str:
    """Return a note if adapters continue with another dropout than their files name; empty: no
    note.

    Dropout does not affect what adapters compute, so it may change.
    """
    path = directory.expanduser() / CONFIG
    there = read_json(path).get("lora_dropout", 0.0)
    if there == lora.dropout:
        return ""
    return (
        f"{path} has lora_dropout={there}, and this run has model.lora.dropout={lora.dropout}: it "
        "trains the adapters with its own."
    )


def _patterns_of_gate_and_up(lora: LoraConfig) -> dict[str, Any]:
    """Return rank and alpha of the joint adapters of gate and up, whose scale is that of the
    others."""
    assert lora.rank is not None
    factor = 2.0
    if lora.scaling == "root":
        factor = math.sqrt(2)
    return {
        "rank_pattern": {GATE_AND_UP: 2 * lora.rank},
        "alpha_pattern": {GATE_AND_UP: factor * lora.alpha},
    }


def _same_numbers(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return True if two sections of adapter_config.json are the same up to rounding."""
    here = section_leaves(one)
    there = section_leaves(other)
    if not all(isinstance(value, int | float) for value in here.values()):
        return False
    return here.keys() == there.keys() and all(
        math.isclose(here[name], there[name], rel_tol=1e-6) for name in here
    )
