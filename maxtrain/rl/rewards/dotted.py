"""Functions by their dotted path: `package.module:function` or `package.module.function`."""

import importlib
from collections.abc import Callable
from typing import Any

from data_pipeline.base.errors import ConfigError


def is_dotted(name: str) -> bool:
    """Whether a name can be a dotted path."""
    return "." in name or ":" in name


def load_function(path: str) -> Callable[..., Any]:
    """Imports the function of a dotted path.

    Raises:
        ConfigError: there is no such module, or no such function in it. What the module itself
            raises while it is imported is raised as it is.
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
        # A module that is there, but misses another one, has its own message.
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
