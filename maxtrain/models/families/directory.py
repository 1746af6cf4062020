"""Reads the configuration of the model in a directory: a Hugging Face directory, or a run of
maxtrain. No jax here."""

import atexit
import contextlib
import dataclasses
import difflib
import functools
import re
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json, strict_yaml
from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.base.hub import download_hint
from data_pipeline.base.remote import RemotePath, is_url
from maxtrain.config.load import NamedModel
from maxtrain.config.schema import ModelConfig
from maxtrain.config.words import choices, show
from maxtrain.models.families import FAMILIES, PRESETS
from maxtrain.models.families.family import HfConfig
from maxtrain.models.families.quantization import Quantization, read_quantization

AGAIN = "Get the file again from where the model is"
# Keys of a ModelConfig that affect how the model is computed, not what it computes.
OF_THE_RUN = {
    "attention",
    "lora",
    "routing",
    "scan_layers",
    "remat",
    "kept",
    "pipeline",
    "loss_chunk",
    "value",
}
# Keys of a ModelConfig that a run may choose; the weights decide all others.
FREE = {"max_length", *OF_THE_RUN}


def read_config(directory: str | Path) -> ModelConfig:
    """Read the ModelConfig of a Hugging Face directory.

    Raises:
        DataError: config.json is missing or damaged, or describes a model that is not supported.
    """
    path = Path(directory).expanduser() / "config.json"
    values = read_json(path)
    given = values.get("architectures")
    for name, family in FAMILIES.items():
        has_score = given == [family.scored_architecture()]
        if has_score:
            _require_one_score(values, path)
        if has_score or given == [family.architecture]:
            settings = HfConfig(values, path)
        elif family.text_part_of and given == [family.text_part_of]:
            settings = _of_text_part(values, path)
        else:
            continue
        read_quantization(settings)
        config = family.read(settings)
        return dataclasses.replace(config, family=name, score=has_score)
    known = []
    for family in FAMILIES.values():
        known.append(family.architecture)
        if family.text_part_of:
            known.append(f"{family.text_part_of} (its part for text)")
    raise DataError(
        f"{path}: architectures={show(given)} is not known here. Choose a model of one of: "
        f"{', '.join(known)}."
    )


def _require_one_score(values: Mapping[str, Any], path: Path) -> None:
    """Raise DataError if a model classifies texts instead of scoring them."""
    # Without labels, transformers assumes two.
    labels = values.get("id2label", {"0": "", "1": ""})
    if not isinstance(labels, dict) or len(labels) != 1:
        raise DataError(
            f"{path}: id2label={show(labels)} must have one label, that of a score. Choose a "
            "reward model whose num_labels is 1."
        )


def _of_text_part(values: Mapping[str, Any], path: Path) -> HfConfig:
    """Return the settings of the text part of a model that also processes images.

    Raises:
        DataError: there are none.
    """
    text = values.get("text_config")
    if not isinstance(text, dict):
        raise DataError(
            f"{path}: text_config={show(text)} must be the config of the part for text. {AGAIN}."
        )
    # These keys are read from the whole model.
    of_all = ("quantization_config", "tie_word_embeddings")
    return HfConfig({**text, **{key: values[key] for key in of_all if key in values}}, path)


def quantization_of(directory: str | Path) -> Quantization | None:
    """Return the storage form of the weights of a Hugging Face directory; None: plain floats.

    Raises:
        DataError: config.json is missing or damaged, or they are stored in a way that is not read.
    """
    path = Path(directory).expanduser() / "config.json"
    return read_quantization(HfConfig(read_json(path), path))


def stored_as(directory: str | Path) -> str:
    """Describe the storage form of the weights of a Hugging Face directory; empty for plain floats.
    Raises the errors of `quantization_of`."""
    quantization = quantization_of(directory)
    if quantization is None:
        return ""
    return quantization.words()


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a Hugging Face directory.

    Raises:
        DataError: the file can't be read, or is not a JSON object.
    """
    try:
        values = strict_json.read(path)
        if not isinstance(values, dict):
            raise ValueError("no object")
        return values
    except OSError as error:
        raise DataError(
            f"{path}: can't be read ({error.strerror}). Name a directory with config.json and "
            f"model.safetensors, as downloaded from Hugging Face.{download_hint(path.parent)}"
        ) from error
    except ValueError as error:
        raise DataError(f"{path}: is not a JSON object ({error}). {AGAIN}.") from error


def model_of(directory: str | Path) -> dict[str, Any]:
    """Return the keys of `model` that the weights in a directory decide.

    Args:
        directory: a Hugging Face directory, a run, or a checkpoint in a run; or the URL of one.

    Returns:
        The keys and values; empty if the directory is none of these, which is reported when its
        weights are read.

    Raises:
        DataError: it is a Hugging Face model that is not supported.
        StorageError: it is behind a URL that can't be read.
    """
    directory = _with_config(directory)
    if (directory / "config.json").exists():
        model = dataclasses.asdict(read_config(directory))
    else:
        model = _model_of_run(directory)
    return _without(model, free_keys(model.get("family")))


def free_keys(family: str | None) -> set[str]:
    """Return the keys of a ModelConfig that a run may choose for weights of this family."""
    if family in FAMILIES and FAMILIES[family].learns_positions:
        return OF_THE_RUN
    return FREE


def model_named(place: str) -> NamedModel:
    """Return the model that `model=PLACE` names: a released model, by its name, or the model and
    weights in a directory of Hugging Face or of a run.

    Raises:
        UsageError: it is neither.
        DataError: it is a Hugging Face model that is not supported.
        StorageError: it is behind a URL that can't be read.
    """
    directory = _with_config(place)
    if (directory / "config.json").exists():
        model = dataclasses.asdict(read_config(directory))
        return NamedModel(_without(model, OF_THE_RUN), place)
    of_run = _model_of_run(directory)
    if of_run:
        return NamedModel(_without(of_run, OF_THE_RUN), place)
    if place in PRESETS:
        model = dataclasses.asdict(PRESETS[place])
        return NamedModel(_without(model, OF_THE_RUN), None)
    near = difflib.get_close_matches(place, PRESETS, n=4, cutoff=0.5) or list(PRESETS)
    raise UsageError(
        "is neither a directory with config.json, nor a run, nor the name of a model that has been "
        f"released. Name a directory, or one such as {choices(near)}.{download_hint(place)}"
    )


def _with_config(place: str | Path) -> Path:
    """Return the directory of a model; for a URL, a local copy of its config alone, which is
    deleted when the process ends."""
    if not is_url(place):
        return Path(place).expanduser()
    return _copy_of_config(re.sub(r"(/checkpoints(/\d+)?)?/?$", "", str(place)))


@functools.cache
def _copy_of_config(url: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix="maxtrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in ("config.json", "config.yaml"):
        with contextlib.suppress(FileNotFoundError):
            (RemotePath(url) / name).download_exactly(folder / name)
    return folder


def _without(model: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the keys of a ModelConfig without these."""
    keys = {field.name for field in dataclasses.fields(ModelConfig)}.difference(left_out)
    return {key: value for key, value in model.items() if key in keys}


def _model_of_run(directory: Path) -> dict[str, Any]:
    """Return `model` of the config.yaml of a run, given its folder or a checkpoint in it; empty if
    there is none that can be read."""
    folders = [directory, *list(directory.absolute().parents)[:2]]
    files = [folder / "config.yaml" for folder in folders]
    found = [file for file in files if file.exists()]
    if not found:
        return {}
    try:
        config = strict_yaml.read(found[0])
    except (OSError, ValueError):
        return {}
    if not isinstance(config, dict):
        return {}
    model = config.get("model")
    if not isinstance(model, dict):
        return {}
    return model
