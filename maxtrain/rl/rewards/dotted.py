"""Import of functions by dotted path: `package.module:function` or `package.module.function`."""

import importlib
from collections.abc import Callable
from typing import Any

from data_pipeline.base.errors import ConfigError


def is_dotted(name: str) -> bool:
    """Return whether a name can be a dotted path."""
    return "." in name or ":" in name


def load_function(path: str) -> Callable[..., Any]:
    """Import the function of a dotted path.

    Raises:
        ConfigError: there is no such module, or no such function in it. Exceptions of the module
            itself during its import are not converted.
    """
    module_name, _, function_name = path.partition(":")
    if not function_name:
        module_name, _, function_name = path.rpartition(".")
    if not module_name or not function_name:
        raise ConfigError(
            f"{path!r} is no dotted path: it must name a module and a function in it, such as "
            "my_rewards:brevity."
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # An existing module that lacks another one has its own message.
        if not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"{path!r}: there is no module {error.name}. Check its name, and that its folder is "
            "where Python looks (PYTHONPATH)."
        ) from error
    found = getattr(module, function_name, None)
    if not callable(found):
        raise ConfigError(
            f"{path!r}: {module_name} has no function {function_name}. Check its name."
        )
    return found
