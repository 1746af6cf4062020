"""The keys of the schema that are paths: `~` is expanded once, here, and what can't be a directory
is refused."""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from data_pipeline.remote import is_url
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import show

_MADE = (
    "output_dir",
    "data.cache",
    "checkpoint.copy_to",
    "observe.compilation_cache",
)  # directories that a run makes
_MAX_NAME, _MAX_PATH = 255, 4000  # bytes; 4,096 with what is put below it
_MOUNT = "where it is mounted (gcsfuse, mountpoint-s3, rclone mount)"


class PathKey(NamedTuple):
    """A key that holds a path: its dotted path, its value, and whether a URL will do."""

    key: str
    value: str
    url: bool


def expand_paths(section: Any) -> Any:
    """A section of the config with a leading `~` or `~user` of every path replaced by that home
    directory."""
    return _with_paths(section, lambda path, default: os.path.expanduser(path))


def with_default_paths(section: Any) -> Any:
    """A section with paths that are what `~` of their default means here as that default: so it
    means the same elsewhere."""
    return _with_paths(
        section, lambda path, default: default if path == os.path.expanduser(default) else path
    )


def _with_paths(section: Any, change: Callable[[str, str], str]) -> Any:
    """A section with every path replaced by `change` of it and of its default."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            changes[field.name] = _with_paths(value, change)
        elif isinstance(value, dict):
            named = {
                n: _with_paths(v, change) if dataclasses.is_dataclass(v) else v
                for n, v in value.items()
            }
            changes[field.name] = named
        elif field.metadata["path"] and isinstance(value, str):
            default = field.default if isinstance(field.default, str) else ""
            changes[field.name] = change(value, default)
    return dataclasses.replace(section, **changes)


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
    """What is wrong with paths, as far as names and the folders above them say."""
    for key, value, url in path_keys(config):
        if "\0" in value:
            yield f"{key}={value!r} must not have NUL characters, which no path has. Set {key} to a path without them."
        elif is_url(value) and url:
            continue
        elif is_url(value):
            yield f"{key}={value} must be a directory, not a URL. Set {key} to {_MOUNT}."
        elif max(map(len, value.encode().split(b"/"))) > _MAX_NAME or len(value) > _MAX_PATH:
            rule = f"is longer than a path can be: {_MAX_NAME} bytes in each name, {_MAX_PATH:,} in all"
            yield f"{key}={show(value)} {rule}. Set {key} to a shorter one."
        elif value.startswith("~"):
            user = value.partition("/")[0]
            mend = f"Write the whole path, or {key}=./{value} for a folder of that name"
            yield f"{key}={value} must begin with the home of a user of this machine, and {user} is nobody's. {mend}."
        elif key in _MADE and value and (file := file_above(value)):
            yield f"{key}={value} must be a directory, and {file} is a file. Set {key} to another place, or move the file."
    run = os.path.join(config.output_dir, config.run_name)
    if os.path.isdir(config.output_dir) and "\0" not in run and file_above(run):
        mend = "Set run_name to another name, or move the file"
        yield f"run_name={config.run_name} must be the name of a folder in output_dir, and {run} is a file. {mend}."


def file_above(path: str) -> str | None:
    """The file that this path is, or would be below of; None if the path is a directory or can
    become one."""
    path = os.path.abspath(path)
    while not os.path.lexists(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path if os.path.exists(path) and not os.path.isdir(path) else None
