"""Names and types of the schema's keys: listing them, finding one, and saying what an unknown name
should have been."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from data_pipeline.config import Epochs
from maxtrain.config.foreign import FOREIGN
from maxtrain.config.schema import RunConfig

_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true | false",
    str: "text",
    type(None): "null",
    Epochs: "0.5 epochs",
}


class Key(NamedTuple):
    """One key: dotted path (NAME stands for a name of the user's), annotation, default and line of
    help."""

    path: str
    kind: Any
    default: Any
    help: str


@functools.cache
def all_keys(section: type = RunConfig, prefix: str = "") -> tuple[Key, ...]:
    """Every key of a section and of what is below it, in the schema's order."""
    found: list[Key] = []
    for field in dataclasses.fields(section):
        kind, path, default = field.type, prefix + field.name, getattr(section(), field.name)
        if typing.get_origin(kind) is dict:
            kind, path, default = element(kind), path + ".NAME", None
        inner = kind if dataclasses.is_dataclass(kind) else element(kind)
        if inner is not kind:
            found.append(Key(path, kind, default, field.metadata["help"]))
        if dataclasses.is_dataclass(inner):
            found += all_keys(inner, path + ("." if inner is kind else "[0]."))
    return tuple(found)


def element(kind: Any) -> Any:
    """The annotation of a list's elements or of a dict's values; None for other annotations."""
    return (
        typing.get_args(kind)[{tuple: 0, dict: 1}[origin]]
        if (origin := typing.get_origin(kind)) in (tuple, dict)
        else None
    )


def find(path: str) -> Any:
    """The annotation of a key or a section, None if there is no such path."""
    kind: Any = RunConfig
    for part in path.split("."):
        inner = element(kind) if typing.get_origin(kind) is dict and part else None
        kind = kind.__annotations__.get(part) if dataclasses.is_dataclass(kind) else inner
    return kind


def describe(kind: Any) -> str:
    """An annotation in words: `whole number | auto`."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (tuple, dict):
        return (
            f"list of {describe(arguments[0])}s"
            if origin is tuple
            else f"{describe(arguments[1])} by name"
        )
    if origin is Literal:
        return " | ".join(arguments)
    return _WORDS.get(kind) or " | ".join(map(describe, arguments)) or "section"


def show(value: Any) -> str:
    """A value as one would type it, shortened."""
    words = {"True": "true", "False": "false", "None": "null", "()": "[]"}
    try:
        text = str(value)
    except (
        Exception
    ):  # a number of more digits than Python writes, or an object of a config file's own
        text = f"<{type(value).__name__}>"
    text = words.get(text, text)
    return text if len(text) <= 60 else text[:57] + "..."


def choices(values: Iterable[Any]) -> str:
    """`1, 2, 4 or 8`."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def unknown(path: str) -> str:
    """What to say of a key that does not exist: the right name, wherever one can be guessed."""
    if len(path) > 200:
        return f"{show(path)} is not a key. `--help` lists those there are."
    parts = path.split(".")
    if not all(parts):
        return f"{show(path)} is not a key: a name in it is empty. Write for example data.sources.NAME.path."
    leaf = parts[-1].lower().replace("-", "_")
    if path in FOREIGN:
        return FOREIGN[path].words(path)

    def likeness(
        key: str,
    ) -> tuple[
        float, float
    ]:  # the right leaf in a wrong section counts almost as much as the right path
        whole = difflib.SequenceMatcher(None, path.lower(), named(key)).ratio()
        return max(
            whole, 0.99 * difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()
        ), whole

    def named(key: str) -> str:  # with the user's own names in place of NAME
        words = key.split(".")
        return (
            ".".join(p if w == "NAME" else w for w, p in zip(words, parts))
            if len(words) == len(parts)
            else key
        )

    keys = [
        *(key.path for key in all_keys()),
        *(field.name for field in dataclasses.fields(RunConfig)),
    ]
    likely = {named(key): likeness(key) for key in keys}
    best = max(likely.values())
    if path in likely:
        return f"{path} can't be set alone. Set the whole list, {path.partition('[')[0]}=[...]."
    if best[0] < 0.99 and leaf in FOREIGN:
        return FOREIGN[leaf].words(path)
    dots = max(likely, key=likely.__getitem__).count(".")
    near = [
        name for name, value in likely.items() if value[0] == best[0] and value[1] > best[1] - 0.1
    ]
    right = [
        name for name in near if name.count(".") == dots
    ]  # more than one, if only the section is wrong
    section = f" {parts[0]}" if len(parts) > 1 and find(parts[0]) else ""
    mend = (
        f"Did you mean {choices(right)}?"
        if best[0] > 0.78
        else f"`--help{section}` lists those there are."
    )
    return f"{path} is not a key. {mend}"
