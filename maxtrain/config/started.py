"""The launch folder of a run, in the first lines of its config.yaml: relative paths of data and
models in that file are resolved from there, whatever folder a later command runs in.
"""

import dataclasses
import json
import os
import re
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_json
from data_pipeline.base.remote import is_url
from maxtrain.config.keys import element
from maxtrain.config.paths import MADE
from maxtrain.config.schema import RunConfig

_HEADER = re.compile(r'# run: (?P<run>\w*)\n(# folder: (?P<folder>"[^\n]*")\n)?')
# A run's id and a path.
_MOST_CHARACTERS = 1 << 15


def header(run: str, folder: str) -> str:
    """The first lines of RUN/config.yaml.

    Args:
        run: id of the run.
        folder: that it was started in; empty: not known.
    """
    text = f"# run: {run}\n"
    if folder:
        text += f"# folder: {json.dumps(folder)}\n"
    return text


def read_header(path: Path) -> tuple[str, str]:
    """The id of the run that a config.yaml is of, and the folder that it was started in; empty as
    far as the file does not say."""
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            found = _HEADER.match(file.read(_MOST_CHARACTERS))
    except OSError:
        return "", ""
    if found is None:
        return "", ""
    folder = ""
    if found["folder"]:
        try:
            folder = strict_json.loads(found["folder"].encode())
        except ValueError:
            folder = ""
    return found["run"], folder


def with_inputs_of(tree: dict[str, Any], folder: str) -> dict[str, Any]:
    """The plain values of a config file with its relative paths of data and models made absolute,
    as seen from a folder, if that is not the folder here.

    A path that is there from here alone stays as it is: run and data were moved together.
    """
    if not folder or folder == os.getcwd():
        return tree

    def seen_from(path: str) -> str:
        if not path or is_url(path) or path.startswith("~") or os.path.isabs(path):
            return path
        absolute = os.path.normpath(os.path.join(folder, path))
        if not os.path.exists(absolute) and os.path.exists(path):
            return path
        return absolute

    return _with_inputs(tree, RunConfig, "", seen_from)


def _with_inputs(tree: Any, section: type, prefix: str, change: Callable[[str], str]) -> Any:
    """Plain values of a section with every path that is read replaced by `change` of it. What is
    not as the schema wants it stays: it is refused when the values are checked."""
    if not isinstance(tree, dict):
        return tree
    result = dict(tree)
    for field in dataclasses.fields(section):
        if field.name not in tree:
            continue
        key = prefix + field.name
        value = tree[field.name]
        kind: Any = field.type
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            result[field.name] = _with_inputs(value, kind, f"{key}.", change)
        elif typing.get_origin(kind) is dict and dataclasses.is_dataclass(element(kind)):
            if isinstance(value, dict):
                named = {
                    name: _with_inputs(each, element(kind), f"{key}.{name}.", change)
                    for name, each in value.items()
                }
                result[field.name] = named
        elif field.metadata["path"] and isinstance(value, str) and key not in MADE:
            result[field.name] = change(value)
    return result
