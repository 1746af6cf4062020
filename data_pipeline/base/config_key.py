"""Declaration of a config key: its default, its help line, its limits, and the settings that use
it.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

_FOR_VALUES = (
    "{key}={value} is for {values}, not for {cause}. "
    "Set {reader}={values}, or leave it out ({key}={default})."
)


class AnyValueExcept(NamedTuple):
    """All values of a key but this one."""

    value: Any


# Some values of a key.
Values = tuple[Any, ...] | AnyValueExcept


@dataclasses.dataclass(frozen=True)
class UsedBy:
    """The settings of other keys with which a key is used. Without them the key is idle: its value
    changes nothing.

    Sentences may hold these names in braces: key, value and default of the idle key; reader, the
    first key of `settings`, and values, those that read the idle key; cause; number, the value as
    it is; and config, for what else is to be named.

    Attributes:
        settings: dotted paths of other keys, each with those of its values that read this one. One
            that holds is enough. Of a list, [0] stands for the element that this key is in, and
            [*] for any element.
        problem: what to say when the idle key was set: its value, the rule and the fix.
        cause: the settings that leave it idle; empty: the present ones of the keys in `settings`,
            of which none may have [*] then.
        help: description of the settings for `--help`; empty: as `settings` has them.
    """

    settings: Mapping[str, Values]
    problem: str = _FOR_VALUES
    cause: str = ""
    help: str = ""


def key(
    default: Any,
    help: str,
    *,
    low: float | None = None,
    high: float | None = None,
    above: float | None = None,
    path: Literal["", "local", "any"] = "",
    used_by: UsedBy | tuple[UsedBy, ...] = (),
) -> Any:
    """A config key.

    Args:
        default: copied for each instance.
        help: the line of --help.
        low, high, above: bounds: low <= value <= high, value > above.
        path: "local", "any": the value is a path of this machine, or that or a URL; a leading ~ is
            expanded when it is read.
        used_by: what reads the key, if not every run does; with several, each must hold. From it
            come the check for idle keys and what the help says.
    """
    if isinstance(used_by, UsedBy):
        used_by = (used_by,)
    metadata = {
        "help": help,
        "low": low,
        "high": high,
        "above": above,
        "path": path,
        "used_by": used_by,
    }
    if isinstance(default, dict | list) or dataclasses.is_dataclass(default):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)
