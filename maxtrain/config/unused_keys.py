"""Keys that were set although nothing reads them, as the `used_by` of their declarations says."""

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, Values
from maxtrain.config.schema import RunConfig
from maxtrain.config.words import choices, show


class UnusedKey(NamedTuple):
    """A key that was set although nothing reads it. An error or a note, as load.py decides; `str`
    is the error.

    Attributes:
        key: its dotted path.
        value: what it is set to.
        cause: the keys and values that leave it without a reader.
        problem: its value, the rule and the fix.
        reader: dotted path of the first key that decides about it.
    """

    key: str
    value: Any
    cause: str
    problem: str
    reader: str

    def __str__(self) -> str:
        return self.problem


Problem = str | UnusedKey


def idle_keys(config: RunConfig) -> list[UnusedKey]:
    """Every idle key of a config, in the schema's order, with the first reason that it has."""
    return list(_idle_in(config, config, ""))


def idle_among(found: Iterable[UnusedKey], *keys: str, by: str = "") -> list[UnusedKey]:
    """Return the unused keys that are among `keys`, in this order.

    Args:
        found: of the whole config.
        keys: their paths, with [0] for any element of a list.
        by: only those about which this key decides first; empty: all.
    """
    chosen = []
    for idle in found:
        if _declared_path(idle.key) in keys and by in ("", idle.reader):
            chosen.append(idle)

    def place(idle: UnusedKey) -> tuple[list[int], int]:
        """Elements of a list one after another, and their keys in the order of `keys`."""
        indices = [int(index) for index in re.findall(r"\[(\d+)\]", idle.key)]
        return indices, keys.index(_declared_path(idle.key))

    return sorted(chosen, key=place)


def readers_in_words(used_by: Iterable[UsedBy]) -> str:
    """Describe the settings with which a key is used, for the help: `schedule.name=wsd`; empty if
    every run uses it.
    """
    return "; and ".join(use.help or _settings_in_words(use) for use in used_by)


def _settings_in_words(use: UsedBy) -> str:
    return ", or ".join(_setting_in_words(path, use.settings[path]) for path in use.settings)


def _setting_in_words(path: str, values: Values) -> str:
    if not isinstance(values, AnyValueExcept):
        return f"{path}={_in_words(values)}"
    if values.value is None:
        return f"{path} set"
    if values.value in ((), {}):
        return f"{path} not empty"
    return f"{path} other than {show(values.value)}"


def _in_words(values: tuple[Any, ...]) -> str:
    return choices(map(show, values))


def _idle_in(config: RunConfig, section: Any, prefix: str) -> Iterator[UnusedKey]:
    """The idle keys of a section and of those below it, but nothing below an idle key."""
    default = type(section)()
    for field in dataclasses.fields(section):
        path = prefix + field.name
        value = getattr(section, field.name)
        usual = getattr(default, field.name)
        idle = None
        if value != usual:
            idle = _judged(config, path, value, usual, field.metadata["used_by"])
        if idle is not None:
            yield idle
            continue
        for below, part in _sections_below(path, value):
            yield from _idle_in(config, part, f"{below}.")


def _sections_below(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The sections that a value is or holds, with their paths."""
    if dataclasses.is_dataclass(value):
        yield path, value
    elif isinstance(value, tuple):
        for index, element in enumerate(value):
            yield from _sections_below(f"{path}[{index}]", element)
    elif isinstance(value, dict):
        for name, element in value.items():
            yield from _sections_below(f"{path}.{name}", element)


def _judged(
    config: RunConfig, path: str, value: Any, default: Any, used_by: Iterable[UsedBy]
) -> UnusedKey | None:
    """The problem with a key that was set, if one of what must read it does not."""
    for use in used_by:
        settings = {_same_element(reader, path): use.settings[reader] for reader in use.settings}
        if not any(_holds(config, reader, values) for reader, values in settings.items()):
            return _idle(config, path, value, default, use, settings)
    return None


def _idle(
    config: RunConfig,
    path: str,
    value: Any,
    default: Any,
    use: UsedBy,
    settings: Mapping[str, Values],
) -> UnusedKey:
    """Return the problem of an unused key; `settings` are those of `use`, of the same element."""
    reader = next(iter(settings))
    if use.cause:
        cause = use.cause.format(config=config)
    else:
        present = [f"{key}={_text(_values(config, key)[0])}" for key in settings]
        cause = " and ".join(present)
    listed = ""
    if not isinstance(settings[reader], AnyValueExcept):
        listed = _in_words(settings[reader])
    problem = use.problem.format(
        key=path,
        value=_text(value),
        number=value,
        default=show(default),
        reader=reader,
        values=listed,
        cause=cause,
        config=config,
    )
    return UnusedKey(path, value, cause, problem, reader)


def _text(value: Any) -> str:
    """A value as a message about it has it: texts whole."""
    if isinstance(value, str):
        return value
    return show(value)


def _holds(config: RunConfig, path: str, values: Values) -> bool:
    """Return whether a key has one of these values."""
    present = _values(config, path)
    if isinstance(values, AnyValueExcept):
        return any(value != values.value for value in present)
    return any(value in values for value in present)


def _values(config: RunConfig, path: str) -> list[Any]:
    """The value of a key; for a path with [*], those of all elements."""
    found: list[Any] = [config]
    for part in path.split("."):
        name, _, index = part.partition("[")
        found = [getattr(section, name) for section in found]
        if index == "*]":
            found = [element for elements in found for element in elements]
        elif index:
            place = int(index.removesuffix("]"))
            found = [elements[place] for elements in found]
    return found


def _same_element(reader: str, path: str) -> str:
    """The path of a reader with the index that the path of its key has, in place of [0]."""
    whole, is_in_list, below = reader.partition("[0].")
    if not is_in_list:
        return reader
    index = path.removeprefix(whole).partition(".")[0]
    return f"{whole}{index}.{below}"


def _declared_path(path: str) -> str:
    """The path of a key of the schema: [0] for whichever element of a list."""
    return re.sub(r"\[\d+\]", "[0]", path)
