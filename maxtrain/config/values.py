"""Plain values, as a config file or the command line has them, to values of the schema's types;
what does not fit is noted, never raised."""

import dataclasses
import difflib
import math
import re
import typing
from collections.abc import Iterable, Mapping
from decimal import Decimal
from typing import Any, Literal, NamedTuple

from data_pipeline.config import Epochs, as_epochs
from maxtrain.config.foreign import value_elsewhere
from maxtrain.config.keys import describe, unknown
from maxtrain.config.limits import out_of_range
from maxtrain.config.words import choices, show

MAX_LISTED = 40
_NAME = re.compile(r"[\w-]{1,100}")
_MAX_DIGITS = 400
_MAX_BITS = 1024


class ValueProblem(NamedTuple):
    """Problem with the value of a key; the key is empty for a file that cannot be read."""

    key: str
    message: str


def section_from(cls: Any, raw: Any, path: str, problems: list[ValueProblem]) -> Any:
    """A dataclass from a mapping of some of its fields. What does not fit is noted and left at its
    default.

    Args:
        cls: the dataclass.
        raw: the mapping; None is an empty one.
        path: of the section; empty for the root.
        problems: to which those found here are added.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if raw is None:
        raw = {}
    if not isinstance(raw, dict):
        names = choices(f"{path}.{name}" for name in list(fields)[:3])
        message = (
            f"{path}={show(raw)} is a section, not a value. Set one of its keys, such as {names}."
        )
        problems.append(ValueProblem(path, message))
        return cls()
    default = cls()
    values = {}
    for name, value in raw.items():
        key = str(name)
        if path:
            key = f"{path}.{name}"
        if name not in fields:
            problems.append(ValueProblem(key, _unknown(key, value, len(problems))))
            continue
        usual = getattr(default, name)
        field = fields[name]
        try:
            values[name] = _convert(field.type, value, key, problems)
            problem = out_of_range(key, values[name], field.metadata)
        except ValueError as error:
            problem = _not_of_type(key, value, field.type, usual, str(error))
        if problem:
            problems.append(ValueProblem(key, problem))
            values[name] = usual
    return cls(**values)


def _unknown(key: str, value: Any, num_problems: int) -> str:
    """Return the message about a key that does not exist. A right name is guessed only if the
    message will be listed, because each guess takes a while.
    """
    if num_problems < MAX_LISTED:
        return unknown(key, value)
    return f"{show(key)} is not a key. `--help` lists those there are."


def _not_of_type(key: str, value: Any, kind: Any, default: Any, detail: str) -> str:
    """Return the message about a value that is not of its key's type."""
    words = describe(kind)
    rule = f"{key}={show(value)} must be: {words}"
    if detail:
        rule = f"{rule} ({detail})"
    elsewhere = value_elsewhere(key, value)
    if elsewhere is not None:
        return f"{rule}. {elsewhere.fix()}"
    close = difflib.get_close_matches(show(value).lower(), words.split(" | "), 1)
    if close:
        return f"{rule}. Did you mean {key}={close[0]}?"
    return f"{rule}. Write for example {key}={show(default)}."


def _convert(kind: Any, raw: Any, path: str, problems: list[ValueProblem]) -> Any:
    """A value of an annotation; raises ValueError with a detail, or without one. Sections note
    their problems themselves."""
    if dataclasses.is_dataclass(kind):
        return section_from(kind, raw, path, problems)
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if origin is tuple:
        return _convert_list(arguments[0], raw, path, problems)
    if origin is dict:
        return _convert_named(arguments[1], raw, path, problems)
    if origin is Literal:
        return _convert_choice(arguments, raw)
    if arguments:
        return _convert_to_one_of(arguments, raw, path, problems)
    return _convert_single(kind, raw)


def _convert_list(kind: Any, raw: Any, path: str, problems: list[ValueProblem]) -> tuple[Any, ...]:
    """A list whose elements are of this annotation."""
    if not isinstance(raw, list | tuple):
        raise ValueError
    return tuple(
        _convert(kind, element, f"{path}[{index}]", problems) for index, element in enumerate(raw)
    )


def _convert_named(kind: Any, raw: Any, path: str, problems: list[ValueProblem]) -> dict[str, Any]:
    """Values of this annotation by names of the user's."""
    if not isinstance(raw, dict):
        raise ValueError
    for name in raw:
        if not (isinstance(name, str) and _NAME.fullmatch(name)):
            shown = show(repr(name))
            raise ValueError(f"the name {shown} is not letters, digits, _ and -, at most 100")
    return {name: _convert(kind, raw[name], f"{path}.{name}", problems) for name in raw}


def _convert_choice(options: tuple[Any, ...], raw: Any) -> str:
    """Convert a raw value to one of the allowed words."""
    # What YAML makes of a bare off.
    if raw is False:
        raw = "off"
    if isinstance(raw, str) and raw in options:
        return raw
    raise ValueError


def _convert_to_one_of(
    options: Iterable[Any], raw: Any, path: str, problems: list[ValueProblem]
) -> Any:
    """A value of the first of these annotations that it is one of; raises ValueError with the first
    detail there is."""
    first_detail = ""
    for option in options:
        try:
            return _convert(option, raw, path, problems)
        except ValueError as error:
            first_detail = first_detail or str(error)
    raise ValueError(first_detail)


def _convert_single(kind: Any, raw: Any) -> Any:
    """A value of a type that holds no others."""
    if kind is Epochs and isinstance(raw, str):
        return as_epochs(raw)
    if kind is str and type(raw) is str:
        return _utf8(raw)
    if kind is type(None) and raw is None:
        return None
    if kind is bool:
        return _boolean(raw)
    is_number = isinstance(raw, int | float | str) and not isinstance(raw, bool)
    if kind in (int, float) and is_number:
        return _number(kind, raw)
    raise ValueError


def _boolean(raw: Any) -> bool:
    """True or false, as it is or as text; raises ValueError."""
    if isinstance(raw, bool):
        return raw
    if isinstance(raw, str) and raw.lower() in ("true", "false"):
        return raw.lower() == "true"
    raise ValueError


def _utf8(text: str) -> str:
    """A text that can be written down; raises ValueError. Bytes of a command line that are no UTF-8
    come as surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("not UTF-8") from None
    return text


def _number(kind: type, raw: int | float | str) -> int | float:
    """A finite number; raises ValueError. Whole numbers stay exact, and 1e6 and 10_000 are such."""
    if isinstance(raw, int) and raw.bit_length() > _MAX_BITS:
        raise ValueError("too many digits")
    if isinstance(raw, str) and len(raw) > _MAX_DIGITS:
        raise ValueError("too many digits")
    try:
        number = Decimal(raw)
    except ArithmeticError:
        raise ValueError from None
    if kind is float:
        return _float(number)
    if not number.is_finite():
        raise ValueError("nan and inf are not allowed")
    if not -(2**63) < number < 2**63:
        raise ValueError("less than 2^63")
    if number != int(number):
        raise ValueError("without a fraction")
    return int(number)


def _float(number: Decimal) -> float:
    """A number as a float that is finite, and 0 only if the number is; raises ValueError."""
    if not number.is_finite() or math.isinf(float(number)):
        raise ValueError("nan and inf are not allowed")
    if number and not float(number):
        raise ValueError("0, or not that small")
    return float(number)


def section_leaves(section: Mapping[str, Any]) -> dict[str, Any]:
    """Every key of a section and of those below it, by its dotted path, with lists as a file has
    them."""
    found: dict[str, Any] = {}
    for name, value in section.items():
        if isinstance(value, Mapping):
            for path, inner in section_leaves(value).items():
                found[f"{name}.{path}"] = inner
        elif isinstance(value, tuple):
            found[name] = list(value)
        else:
            found[name] = value
    return found
