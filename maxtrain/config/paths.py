"""The keys of the schema that are paths: `~` is expanded once, here, and what can't be a directory
is refused."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data_pipeline.base.remote import is_url, url_problem
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import show

# Directories that a run makes.
MADE = (
    "output_dir",
    "local_dir",
    "data.cache",
    "checkpoint.copy_to",
    "checkpoint.local",
    "observe.compilation_cache",
)
_MAX_NAME_BYTES = 255
# Bytes that a path may have are 4,096, with what is put below it.
_MAX_PATH = 4000
_MOUNT = "where it is mounted (gcsfuse, mountpoint-s3, rclone mount)"


class PathKey(NamedTuple):
    """A key that holds a path: its dotted path, its value, and whether a URL will do."""

    key: str
    value: str
    url: bool


def expand_paths(section: Any) -> Any:
    """A section of the config with a leading `~` or `~user` of every path replaced by that home
    directory."""

    def expanded(path: str, default: str) -> str:
        return os.path.expanduser(path)

    return _with_paths(section, expanded)


def with_default_paths(section: Any) -> Any:
    """A section with paths that are what `~` of their default means here as that default: so it
    means the same elsewhere."""

    def as_default(path: str, default: str) -> str:
        if path == os.path.expanduser(default):
            return default
        return path

    return _with_paths(section, as_default)


def _with_paths(section: Any, change: Callable[[str, str], str]) -> Any:
    """A section with every path replaced by `change` of it and of its default."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _with_paths(value, change)
        elif isinstance(value, dict):
            changes[field.name] = _named_with_paths(value, change)
        elif field.metadata["path"] and isinstance(value, str):
            default = ""
            if isinstance(field.default, str):
                default = field.default
            changes[field.name] = change(value, default)
    return dataclasses.replace(section, **changes)


def _named_with_paths(named: dict[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Sections by name, or other values, which have no paths."""
    changed = {}
    for name, value in named.items():
        if dataclasses.is_dataclass(value):
            changed[name] = _with_paths(value, change)
        else:
            changed[name] = value
    return changed


def path_keys(section: Any, prefix: str = "") -> Iterator[PathKey]:
    """The paths that are set in a section and in those below it."""
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        key = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from path_keys(value, f"{key}.")
        elif isinstance(value, dict):
            for name, inner in value.items():
                if dataclasses.is_dataclass(inner):
                    yield from path_keys(inner, f"{key}.{name}.")
        elif field.metadata["path"] and value is not None:
            yield PathKey(key, value, field.metadata["path"] == "any")


def path_problems(config: RunConfig) -> Iterator[str]:
    """Yield the problems of paths that names and parent folders show."""
    for path_key in path_keys(config):
        problem = _problem(path_key)
        if problem is not None:
            yield problem
    if is_url(config.output_dir):
        return
    run = os.path.join(config.output_dir, config.run_name)
    if os.path.isdir(config.output_dir) and "\0" not in run and file_above(run):
        yield (
            f"run_name={config.run_name} must be the name of a folder in output_dir, and {run} is "
            "a file. Set run_name to another name, or move the file."
        )


def _problem(path_key: PathKey) -> str | None:
    """The first thing that is wrong with a path, None if nothing is."""
    key = path_key.key
    value = path_key.value
    if "\0" in value:
        return (
            f"{key}={value!r} must not have NUL characters, which no path has. "
            f"Set {key} to a path without them."
        )
    if is_url(value):
        if path_key.url:
            problem = url_problem(value)
            return f"{key}={problem}" if problem else None
        return f"{key}={value} must be a directory, not a URL. Set {key} to {_MOUNT}."
    longest_name = max(map(len, value.encode().split(b"/")))
    if longest_name > _MAX_NAME_BYTES or len(value) > _MAX_PATH:
        return (
            f"{key}={show(value)} is longer than a path can be: {_MAX_NAME_BYTES} bytes in each "
            f"name, {_MAX_PATH:,} in all. Set {key} to a shorter one."
        )
    if value.startswith("~"):
        user = value.partition("/")[0]
        return (
            f"{key}={value} must begin with the home of a user of this machine, "
            f"and {user} is nobody's. "
            f"Write the whole path, or {key}=./{value} for a folder of that name."
        )
    if key in MADE and value:
        file = file_above(value)
        if file:
            return (
                f"{key}={value} must be a directory, and {file} is a file. "
                f"Set {key} to another place, or move the file."
            )
    return None


def file_above(path: str) -> str | None:
    """The file that this path is, or would be below of; None if the path is a directory or can
    become one."""
    path = os.path.abspath(path)
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    if os.path.exists(path) and not os.path.isdir(path):
        return path
    return None
