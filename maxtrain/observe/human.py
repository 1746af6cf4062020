"""Numbers as people read them. Pure functions, shared by everything that prints."""

import math


def count(value: float) -> str:
    """A count in at most five characters and three digits: 950, 12.3k, 1.25M, 21.6B."""
    if not math.isfinite(value):
        return str(value)
    unit = 1.0
    letter = ""
    for larger_unit, larger_letter in ((1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T")):
        # From here on the smaller unit would be rounded to 1000.
        if abs(value) >= larger_unit * 0.9995:
            unit = larger_unit
            letter = larger_letter
    scaled = value / unit
    if not letter and value % 1 == 0:
        decimals = 0
    elif abs(scaled) < 9.995:
        decimals = 2
    elif abs(scaled) < 99.95:
        decimals = 1
    else:
        decimals = 0
    return f"{scaled:.{decimals}f}{letter}"


def duration(seconds: float) -> str:
    """A duration in whole seconds: 0:07, 1:23, 2:03:04, 3d 4:05:06; "?" if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    if days:
        return f"{days}d {hour}:{minute:02d}:{second:02d}"
    if hours:
        return f"{hour}:{minute:02d}:{second:02d}"
    return f"{minute}:{second:02d}"
