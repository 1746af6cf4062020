"""The limits of single numbers: those of their key, and those of the numbers on devices."""

import operator
import struct
from collections.abc import Mapping
from typing import Any

_LIMITS = (
    ("low", operator.lt, "at least"),
    ("above", operator.le, "more than"),
    ("high", operator.gt, "at most"),
)
_INT32_MAX = 2**31 - 1
# Smaller ones are flushed to 0 on most devices.
_FLOAT32_MIN = 2.0**-126
_FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127


def out_of_range(path: str, value: Any, limits: Mapping[str, Any]) -> str | None:
    """The problem with a value outside its key's limits, None if it is inside or not a number.

    Numbers end on devices as float32 and int32, so what these don't hold is outside, where the key
    has no limit of its own.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    for name, outside, words in _LIMITS:
        limit = limits[name]
        if limit is not None and outside(value, limit):
            return f"{path}={value} must be {words} {limit}. Set {path} to {words} {limit}."
    if isinstance(value, int):
        return _not_int32(path, value, limits)
    return _not_float32(path, value, limits)


def _not_int32(path: str, value: int, limits: Mapping[str, Any]) -> str | None:
    if limits["high"] is not None or value <= _INT32_MAX:
        return None
    rule = f"at most {_INT32_MAX}"
    return f"{path}={value} must be {rule} (int32). Set {path} to {rule}."


def _not_float32(path: str, value: float, limits: Mapping[str, Any]) -> str | None:
    if abs(value) > _FLOAT32_MAX:
        rule = f"at most {_FLOAT32_MAX:.4g}"
        return f"{path}={value} must be {rule} (float32). Set {path} to {rule}."
    if 0 < abs(value) < _FLOAT32_MIN:
        rule = f"at least {_FLOAT32_MIN:.4g}"
        if limits["above"] != 0:
            rule = f"0 or {rule}"
        return (
            f"{path}={value} must be {rule}: float32 makes 0 of what is smaller. "
            f"Set {path} to {rule}."
        )
    return None


def as_float32(value: float) -> float:
    """The number that a device sees."""
    (rounded,) = struct.unpack("f", struct.pack("f", value))
    return rounded
