"""Parsing of command-line words: which keys they set, and where a config file would have them."""

import dataclasses
import difflib
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.base import strict_yaml
from data_pipeline.base.errors import UsageError
from maxtrain.config.files import SUFFIXES
from maxtrain.config.keys import find, unknown
from maxtrain.config.shipped import available, shipped_configs
from maxtrain.config.values import ValueProblem
from maxtrain.config.words import show

_NULLS = ("null", "none", "None")


def parse(argv: Sequence[str], notes: list[str]) -> dict[str, str]:
    """Return the words of a command line by their keys. The last value of a repeated key counts, so
    that a command can be changed by what is added to its end.

    Args:
        argv: the words.
        notes: gets a line about each key that is given again with another value.

    Raises:
        UsageError: a word is not `key=value`.
    """
    given: dict[str, str] = {}
    for word in argv:
        name, equals, value = word.partition("=")
        if not equals and not name.startswith("-"):
            if "config" not in given and _names_a_config(word):
                given["config"] = word
                continue
            _require_no_config(word, given.get("config"))
        if not equals or name.startswith("-") or not name:
            example = f"{name.lstrip('-') or 'key'}={value or 'value'}"
            raise UsageError(
                f"{word!r} can't be understood; arguments are key=value. "
                f"Write {example}, without dashes or spaces; `--help` lists the keys."
            )
        if name in given and given[name] != value:
            notes.append(
                f"{name} is given more than once: {name}={show(value)} counts, which comes after "
                f"{name}={show(given[name])}."
            )
        given[name] = value
    return given


def _names_a_config(word: str) -> bool:
    """Return whether a word without `config=` is the name of a shipped config, or a config file."""
    if word in shipped_configs():
        return True
    return Path(word).suffix in SUFFIXES and os.path.isfile(os.path.expanduser(word))


def _require_no_config(word: str, given: str | None) -> None:
    """UsageError: the word looks like one, but there is one already, or it is misspelt."""
    rule = f"{word!r} can't be understood; arguments are key=value"
    if given is not None:
        if _names_a_config(word):
            raise UsageError(
                f"{rule}, and config={show(given)} is given already. Leave one of them out."
            )
        return
    close = difflib.get_close_matches(word, shipped_configs(), 1)
    if close:
        raise UsageError(f"{rule}. Did you mean config={close[0]}? {available()}.")


def overlaps(given: Mapping[str, str]) -> list[ValueProblem]:
    """Overrides of which one sets what the other is a part of: which one counts would depend on
    their order."""
    problems = []
    for whole in given:
        for part in given:
            if part.startswith(f"{whole}.") and find(part) is not None:
                below = part.removeprefix(f"{whole}.")
                message = (
                    f"{whole}={show(given[whole])} and {part}={show(given[part])} "
                    f"set the same twice. Put {below} into the value of {whole}, "
                    "or leave one out."
                )
                problems.append(ValueProblem(part, message))
    return problems


def override(tree: dict, path: str, text: str, problems: list[ValueProblem]) -> None:
    """Puts the value of an override where the file would have it."""
    kind = find(path)
    if kind is None:
        problems.append(ValueProblem(path, unknown(path, text)))
        return
    *parents, leaf = path.split(".")
    node = tree
    for part in parents:
        # A section that was left empty in YAML is null.
        node[part] = node.get(part) or {}
        node = node[part]
        if not isinstance(node, dict):
            # A value in place of a section: refused when the tree is read.
            node = {}
    is_named = typing.get_origin(find(".".join(parents))) is dict
    if is_named and dataclasses.is_dataclass(kind) and text in _NULLS:
        _remove_named(node, path, problems)
    else:
        node[leaf] = _from_text(kind, text)


def _remove_named(named: dict, path: str, problems: list[ValueProblem]) -> None:
    """Takes a source, an evaluation set or the like out of those of the file."""
    section, _, name = path.rpartition(".")
    if name in named:
        del named[name]
        return
    fix = f"It has no {section} at all. Drop it"
    if named:
        fix = f"It has {', '.join(map(show, named))}. Name one of them"
    message = f"{path}=null leaves out what the config does not have. {fix}."
    problems.append(ValueProblem(path, message))


def _from_text(kind: Any, text: str) -> Any:
    """Convert typed text to the value that a YAML file would give, if that is not the text
    itself.
    """
    if type(None) in typing.get_args(kind) and text in _NULLS:
        return None
    origin = typing.get_origin(kind)
    if origin not in (tuple, dict):
        return text
    listed = text
    if origin is tuple and not text.startswith("["):
        listed = f"[{text.strip('()')}]"
    try:
        return strict_yaml.loads(listed)
    except ValueError:
        return text
