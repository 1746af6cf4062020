"""Packages that only an extra brings: imported where they are used, and missed with a message that
names the extra."""

import importlib
import importlib.util
from typing import Any

from data_pipeline.errors import UsageError


def load_package(name: str, extra: str, wanted_by: str) -> Any:
    """A package that only an extra brings; UsageError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{wanted_by}: needs {name} ({error}). Install it: pip install 'maxtrain[{extra}]'"
        ) from error


def require_package(name: str, extra: str, wanted_by: str) -> None:
    """UsageError: a package that only an extra brings is not installed. Does not import it."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"{wanted_by}: needs {name}, which is not installed. "
            f"Install it: pip install 'maxtrain[{extra}]'"
        )
