"""What is known of models, for whoever reads a config.

The families and numpy are imported when a config names a model or weights, not before: they are
a third of the time that `--help` would take.
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
