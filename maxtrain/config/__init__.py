"""The config of a run: schema, files, command line, checks. Imports no jax, so that help and config
errors come at once."""

from maxtrain.config.across.shapes import (
    accumulations,
    fewer_settings,
    fit_to_devices,
    fit_to_fewer,
    fit_to_planned,
    with_accumulation,
)
from maxtrain.config.load import (
    default_config,
    from_command_line,
    leaves,
    load_config,
    plain_leaves,
    resolve,
    to_yaml,
)
from maxtrain.config.schema import RunConfig

__all__ = [
    "RunConfig",
    "accumulations",
    "default_config",
    "fewer_settings",
    "fit_to_devices",
    "fit_to_fewer",
    "fit_to_planned",
    "from_command_line",
    "leaves",
    "load_config",
    "plain_leaves",
    "resolve",
    "to_yaml",
    "with_accumulation",
]
