"""Names and types of the schema's keys: listing them, finding one, and saying what an unknown name
should have been."""

import dataclasses
import difflib
import functools
import typing
from typing import Any, Literal, NamedTuple

from data_pipeline.base.config_key import UsedBy
from data_pipeline.config import Epochs
from maxtrain.config.foreign import FOREIGN, value_elsewhere
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import choices, show

_WORDS = {
    int: "whole number",
    float: "number",
    bool: "true | false",
    str: "text",
    type(None): "null",
    Epochs: "0.5 epochs",
}
_MAX_NAME = 200
# A right leaf in a wrong section counts almost as much as the right path.
_LEAF_ALONE = 0.99
# Names less alike than this are no help.
_LEAST_LIKENESS = 0.78
_AS_GOOD = 0.1


class Key(NamedTuple):
    """One key: dotted path (NAME stands for a name that the user chooses), annotation, default,
    help line, and the settings that use it, if not every run does.
    """

    path: str
    kind: Any
    default: Any
    help: str
    used_by: tuple[UsedBy, ...]


@functools.cache
def all_keys(section: type = RunConfig, prefix: str = "") -> tuple[Key, ...]:
    """Every key of a section and of what is below it, in the schema's order."""
    found: list[Key] = []
    defaults = section()
    for field in dataclasses.fields(section):
        kind = field.type
        path = prefix + field.name
        default = getattr(defaults, field.name)
        if typing.get_origin(kind) is dict:
            kind = element(kind)
            path = f"{path}.NAME"
            default = None
        if dataclasses.is_dataclass(kind):
            found += all_keys(kind, f"{path}.")
            continue
        found.append(Key(path, kind, default, field.metadata["help"], field.metadata["used_by"]))
        listed = element(kind)
        if dataclasses.is_dataclass(listed):
            found += all_keys(listed, f"{path}[0].")
    return tuple(found)


def element(kind: Any) -> Any:
    """The annotation of a list's elements or of a dict's values; None for other annotations."""
    origin = typing.get_origin(kind)
    if origin is tuple:
        return typing.get_args(kind)[0]
    if origin is dict:
        return typing.get_args(kind)[1]
    return None


def find(path: str) -> Any:
    """The annotation of a key or a section, None if there is no such path."""
    kind: Any = RunConfig
    for part in path.split("."):
        if dataclasses.is_dataclass(kind):
            kind = kind.__annotations__.get(part)
        elif typing.get_origin(kind) is dict and part:
            kind = element(kind)
        else:
            return None
    return kind


def describe(kind: Any) -> str:
    """Describe an annotation for the help: `whole number | auto`."""
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is tuple:
        words = describe(arguments[0])
        if typing.get_origin(arguments[0]) is Literal:
            return f"list of {words}"
        return f"list of {words}s"
    if origin is dict:
        return f"{describe(arguments[1])} by name"
    if origin is Literal:
        return " | ".join(arguments)
    if kind in _WORDS:
        return _WORDS[kind]
    if arguments:
        return " | ".join(describe(argument) for argument in arguments)
    return "section"


def unknown(path: str, value: Any = None) -> str:
    """Return the message about a key that does not exist: the right name if one can be guessed, and
    what to set for a value of another stack.
    """
    if len(path) > _MAX_NAME:
        return f"{show(path)} is not a key. `--help` lists those there are."
    parts = path.split(".")
    if not all(parts):
        return (
            f"{show(path)} is not a key: a name in it is empty. "
            "Write for example data.sources.NAME.path."
        )
    if path in FOREIGN:
        return FOREIGN[path].words(path) + _fix(FOREIGN[path].ours, value)
    likely = _likenesses(path)
    if path in likely:
        whole = path.partition("[")[0]
        return f"{path} can't be set alone. Set the whole list, {whole}=[...]."
    best = max(likely.values())
    leaf = _leaf(path)
    if best.partial < _LEAF_ALONE and leaf in FOREIGN:
        return FOREIGN[leaf].words(path) + _fix(FOREIGN[leaf].ours, value)
    if best.partial > _LEAST_LIKENESS:
        guesses = _most_likely(likely, best)
        return f"{path} is not a key. Did you mean {choices(guesses)}?" + _fix(guesses[0], value)
    section = ""
    if len(parts) > 1 and find(parts[0]):
        section = f" {parts[0]}"
    return f"{path} is not a key. `--help{section}` lists those there are."


def _fix(key: str, value: Any) -> str:
    """Return the settings that replace a value of another stack, to follow the message about its
    key.
    """
    found = value_elsewhere(key, value)
    if found is None:
        return ""
    return f" {found.fix()}"


class _Likeness(NamedTuple):
    """Likeness of a key to a name, from 0 to 1: the better of path and leaf, then the whole
    path.
    """

    partial: float
    whole: float


def _likenesses(path: str) -> dict[str, _Likeness]:
    """Return how alike every key and section is to a name that does not exist, with the user's own
    names in place of NAME.
    """
    keys = [key.path for key in all_keys()]
    keys += [field.name for field in dataclasses.fields(RunConfig)]
    leaf = _leaf(path)
    found = {}
    for key in keys:
        named = _with_names(key, path)
        whole = difflib.SequenceMatcher(None, path.lower(), named).ratio()
        of_leaf = difflib.SequenceMatcher(None, leaf, key.rpartition(".")[2]).ratio()
        found[named] = _Likeness(max(whole, _LEAF_ALONE * of_leaf), whole)
    return found


def _leaf(path: str) -> str:
    """The last name of a path, as the schema writes names."""
    return path.rpartition(".")[2].lower().replace("-", "_")


def _with_names(key: str, path: str) -> str:
    """A key with what a path of the same depth has in place of NAME."""
    words = key.split(".")
    parts = path.split(".")
    if len(words) != len(parts):
        return key
    named = []
    for word, part in zip(words, parts):
        if word == "NAME":
            named.append(part)
        else:
            named.append(word)
    return ".".join(named)


def _most_likely(likely: dict[str, _Likeness], best: _Likeness) -> list[str]:
    """The names as likely as the best one: more than one, if only the section is wrong."""
    dots = max(likely, key=likely.__getitem__).count(".")
    names = []
    for name, likeness in likely.items():
        as_good = likeness.partial == best.partial and likeness.whole > best.whole - _AS_GOOD
        if as_good and name.count(".") == dots:
            names.append(name)
    return names
