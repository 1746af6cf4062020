"""The model that a directory holds: a Hugging Face directory, or a run of maxtrain. No jax here."""

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from data_pipeline import strict_json
from data_pipeline.errors import DataError
from maxtrain.config.schema import ModelConfig
from maxtrain.models.families import FAMILIES
from maxtrain.models.families.family import Settings

AGAIN = "Get the file again from where the model is"
# What a run may choose for itself; the rest of a ModelConfig is a property of the weights.
FREE = {"max_length", "attention", "scan_layers", "remat", "loss_chunk"}


def read_config(directory: str | Path) -> ModelConfig:
    """The ModelConfig of a Hugging Face directory; raises DataError for what is missing or not
    supported."""
    path = Path(directory).expanduser() / "config.json"
    values = read_json(path)
    for name, family in FAMILIES.items():
        if [family.architecture] == values.get("architectures"):
            return dataclasses.replace(family.read(Settings(values, path)), family=name)
    known = ", ".join(family.architecture for family in FAMILIES.values())
    raise DataError(
        f"{path}: architectures={values.get('architectures')} is not known here. Choose a model of one of: {known}."
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a Hugging Face directory; raises DataError."""
    try:
        values = strict_json.loads(path.read_bytes())
        if isinstance(values, dict):
            return values
        raise ValueError("no object")
    except OSError as error:
        mend = "Name a directory with config.json and model.safetensors, as downloaded from Hugging Face."
        raise DataError(f"{path}: can't be read ({error.strerror}). {mend}") from error
    except ValueError as error:
        raise DataError(f"{path}: is not a JSON object ({error}). {AGAIN}.") from error


def model_of(directory: str | Path) -> dict[str, Any]:
    """The keys of `model` that the weights in a directory decide: of a Hugging Face directory, a
    run, or a checkpoint in one.

    Empty if the directory is neither; whoever reads the weights says so. DataError: a Hugging Face
    model of another kind.
    """
    directory = Path(directory).expanduser()
    if (directory / "config.json").exists():
        model = dataclasses.asdict(read_config(directory))
    else:
        above = (
            directory / "config.yaml",
            *(parent / "config.yaml" for parent in list(directory.absolute().parents)[:2]),
        )
        found = next((path for path in above if path.exists()), None)
        try:
            whole = yaml.safe_load(found.read_text(encoding="utf-8")) if found else {}
        except (OSError, ValueError, yaml.YAMLError):
            whole = {}
        model = whole.get("model") if isinstance(whole, dict) else None
        model = model if isinstance(model, dict) else {}
    keys = {field.name for field in dataclasses.fields(ModelConfig)} - FREE
    return {key: value for key, value in model.items() if key in keys}
