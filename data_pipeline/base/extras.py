"""Packages that only an extra brings: imported where they are used, and missed with a message that
names the extra."""

import importlib
import importlib.util
import shlex
from pathlib import Path
from typing import Any

from data_pipeline.base.errors import UsageError

_ROOT = Path(__file__).parents[2]


def install_command(extra: str) -> str:
    """Return the command that installs an extra: from this checkout if the package runs from one,
    since no registry has the package.
    """
    if not (_ROOT / "pyproject.toml").is_file():
        return f"pip install 'maxtrain[{extra}]'"
    place = str(_ROOT)
    if Path.cwd() == _ROOT:
        place = "."
    return f"pip install -e {shlex.quote(f'{place}[{extra}]')}"


def load_package(name: str, extra: str, wanted_by: str) -> Any:
    """A package that only an extra brings; UsageError: it is not installed."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UsageError(
            f"{wanted_by}: needs {name} ({error}). Install it: {install_command(extra)}"
        ) from error


def require_package(name: str, extra: str, wanted_by: str) -> None:
    """UsageError: a package that only an extra brings is not installed. Does not import it."""
    if importlib.util.find_spec(name) is None:
        raise UsageError(
            f"{wanted_by}: needs {name}, which is not installed. "
            f"Install it: {install_command(extra)}"
        )
