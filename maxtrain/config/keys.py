"""Names and types of the schema's keys: listing them, finding one, and saying what an unknown name should have been."""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from maxtrain.config.foreign import MAXTEXT
from maxtrain.config.schema import RunConfig

_WORDS = {int: "whole number", float: "number", bool: "true | false", str: "text", type(None): "null"}


class Key(NamedTuple):
    """One key: dotted path (NAME stands for a name of the user's), annotation, default and line of help."""

    path: str
    kind: Any
    default: Any
    help: str


@functools.cache
def kinds(section: type) -> dict[str, Any]:
    """The annotation of every field of a section."""
    return typing.get_type_hints(section)


@functools.cache
def all_keys(section: type = RunConfig, prefix: str = "") -> tuple[Key, ...]:
    """Every key of a section and of what is below it, in the schema's order."""
    found: list[Key] = []
    for field in dataclasses.fields(section):
        kind, path, default = kinds(section)[field.name], prefix + field.name, default_of(field)
        if typing.get_origin(kind) is dict:
            kind, path, default = element(kind), path + ".NAME", None
        inner = kind if dataclasses.is_dataclass(kind) else element(kind)
        if inner is not kind:
            found.append(Key(path, kind, default, field.metadata["help"]))
        if dataclasses.is_dataclass(inner):
            found += all_keys(inner, path + ("." if inner is kind else "[0]."))
    return tuple(found)


def default_of(field: dataclasses.Field) -> Any:
    """A fresh copy of a field's default."""
    return field.default_factory() if callable(field.default_factory) else field.default


def element(kind: Any) -> Any:
    """The annotation of a list's elements or of a dict's values; None for other annotations."""
    return typing.get_args(kind)[{tuple: 0, dict: 1}[origin]] if (origin := typing.get_origin(kind)) in (tuple, dict) else None


def find(path: str) -> Any:
    """The annotation of a key or a section, None if there is no such path."""
    kind: Any = RunConfig
    for part in path.split("."):
        inner = element(kind) if typing.get_origin(kind) is dict and part else None
        kind = kinds(kind).get(part) if dataclasses.is_dataclass(kind) else inner
    return kind


def describe(kind: Any) -> str:
    """An annotation in words: `whole number | auto`."""
    if typing.get_origin(kind) is tuple:
        return f"list of {describe(element(kind))}s"
    if typing.get_origin(kind) is dict:
        return f"{describe(element(kind))} by name"
    if typing.get_origin(kind) is Literal:
        return " | ".join(typing.get_args(kind))
    return _WORDS.get(kind) or " | ".join(describe(k) for k in typing.get_args(kind)) or "section"


def show(value: Any) -> str:
    """A value as one would type it, shortened."""
    text = {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def choices(values: Iterable[Any]) -> str:
    """`1, 2, 4 or 8`."""
    *others, last = [str(v) for v in values] or ["nothing"]
    return f"{', '.join(others)} or {last}" if others else last


def unknown(path: str) -> str:
    """What to say of a key that does not exist: the right name, wherever one can be guessed."""
    parts = path.split(".")
    leaf = parts[-1].lower().replace("-", "_")
    leaves = {key.path: key.path.rsplit(".", 1)[-1] for key in all_keys()}
    named = {key: _with_names(key.split("."), parts) for key in leaves}
    right = [n for n in named.values() if n.lower() == path.lower()] or [named[k] for k in leaves if leaves[k].lower() == leaf]
    if not right and leaf in MAXTEXT:
        ours, note = MAXTEXT[leaf]
        return f"{path} is a key of MaxText. " + (f"Here it is {ours}: {note}." if ours else f"Here {note}.")
    right = right or difflib.get_close_matches(path.lower(), named.values(), 2, 0.8)
    close = difflib.get_close_matches(leaf, leaves.values(), 2, 0.75)
    right = right or [named[k] for k in leaves if leaves[k] in close]
    section = f" {parts[0]}" if len(parts) > 1 and find(parts[0]) else ""
    return f"{path} is not a key. " + (
        f"Did you mean {choices(right)}?" if right else f"`--help{section}` lists those there are."
    )


def _with_names(words: list[str], parts: list[str]) -> str:
    """A key of the schema with the user's own names in place of NAME."""
    same = len(words) == len(parts)
    return ".".join(part if word == "NAME" else word for word, part in zip(words, parts)) if same else ".".join(words)
