"""Lookup of models by name or directory, for the readers of configs.

The families and numpy are imported only when a config names a model or weights, because they take a
third of the time of `--help`.
"""

import importlib
from typing import Any

from maxtrain.config.load import ModelLookup, NamedModel

_DIRECTORY = "maxtrain.models.families.directory"


def _of_weights(place: str) -> dict[str, Any]:
    return importlib.import_module(_DIRECTORY).model_of(place)


def _named(name: str) -> NamedModel:
    return importlib.import_module(_DIRECTORY).model_named(name)


MODELS = ModelLookup(_of_weights, _named)
