"""Values and choices as messages write them."""

from collections.abc import Iterable
from typing import Any

_MAX_SHOWN = 60
_AS_TYPED = {"True": "true", "False": "false", "None": "null", "()": "[]"}
# The largest divisor that is worth suggesting.
_MAX_DIVISOR = 4096
_MAX_SUGGESTED = 4


def show(value: Any) -> str:
    """A value as one would type it, shortened."""
    try:
        text = str(value)
    except Exception:
        # A number of more digits than Python writes, or an object of a config file's own.
        text = f"<{type(value).__name__}>"
    text = _AS_TYPED.get(text, text)
    if isinstance(value, tuple) and value and all(_is_word(element) for element in value):
        text = f"[{', '.join(value)}]"
    if len(text) <= _MAX_SHOWN:
        return text
    return text[: _MAX_SHOWN - 3] + "..."


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value.isidentifier()


def choices(values: Iterable[Any]) -> str:
    """`1, 2, 4 or 8`."""
    *others, last = map(str, values)
    if not others:
        return last
    return f"{', '.join(others)} or {last}"


def divisors(number: int) -> list[int]:
    """The divisors of a number that are worth suggesting."""
    largest = min(number, _MAX_DIVISOR)
    return [divisor for divisor in range(1, largest + 1) if number % divisor == 0]


def nearest(wanted: int, valid: Iterable[int]) -> str:
    """Up to four valid values, those nearest to the wanted one."""

    def distance(value: int) -> int:
        return abs(value - wanted)

    near = sorted(valid, key=distance)[:_MAX_SUGGESTED]
    return choices(sorted(near))


def multiples(wanted: int, unit: int) -> str:
    """The multiples of `unit` next to the wanted value."""
    below = wanted // unit * unit
    return choices(multiple for multiple in (below, below + unit) if multiple)


def rule_of(problem: str) -> str:
    """Return a problem without its advice, which begins with "Set"."""
    return problem.partition(". Set ")[0]
