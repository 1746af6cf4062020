"""Numbers as people read them. Pure functions, shared by everything that prints."""

import math


def count(value: float, trim: bool = False) -> str:
    """A count in at most five characters and three digits: 950, 12.3k, 1.25M, 21.6B.

    Args:
        value: any number; its sign is kept.
        trim: leave out zeros at the end: 12k for 12.0k.
    """
    if not math.isfinite(value):
        return str(value)
    scaled, name = value, ""
    for unit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= unit * 0.9995:
            scaled, name = value / unit, letter
            break
    decimals = 0 if not name and value % 1 == 0 else 2 if abs(scaled) < 9.995 else 1 if abs(scaled) < 99.95 else 0
    digits = f"{scaled:.{decimals}f}"
    return (digits.rstrip("0").rstrip(".") if trim and decimals else digits) + name


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
