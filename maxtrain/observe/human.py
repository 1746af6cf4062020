"""Numbers as people read them. Pure functions, shared by everything that prints."""

import math


def count(value: float) -> str:
    """A count in at most five characters and three digits: 950, 12.3k, 1.25M, 21.6B.

    Args:
        value: any number; its sign is kept.
    """
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    for unit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if size >= unit * 0.9995:
            return f"{_three_digits(value / unit)}{name}"
    return _three_digits(value) if size % 1 else f"{value:.0f}"


def _three_digits(value: float) -> str:
    size = abs(value)
    return f"{value:.{2 if size < 9.995 else 1 if size < 99.95 else 0}f}"


def duration(seconds: float) -> str:
    """A duration: 0:07, 1:23, 2:03:04, 3d 4:05:06; "?" if it is not known.

    Args:
        seconds: rounded to whole ones.
    """
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days}d {clock}" if days else clock


def small(value: float) -> str:
    """A learning rate or another small number: 3.00e-4."""
    mantissa, exponent = f"{value:.2e}".split("e") if math.isfinite(value) else (str(value), "")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa
