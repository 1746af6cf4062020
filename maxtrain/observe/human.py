"""Numbers as people read them. Pure functions, shared by everything that prints."""

import math


def count(value: float) -> str:
    """A count in at most five characters and three digits: 950, 12.3k, 1.25M, 21.6B."""
    if not math.isfinite(value):
        return str(value)
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))
    unit, letter = next((u for u in units if abs(value) >= u[0] * 0.9995), (1, ""))
    scaled = value / unit
    decimals = (
        0
        if not letter and value % 1 == 0
        else 2
        if abs(scaled) < 9.995
        else 1
        if abs(scaled) < 99.95
        else 0
    )
    return f"{scaled:.{decimals}f}{letter}"


def duration(seconds: float) -> str:
    """A duration in whole seconds: 0:07, 1:23, 2:03:04, 3d 4:05:06; "?" if it is not finite."""
    if not math.isfinite(seconds):
        return "?"
    minutes, second = divmod(max(0, round(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
    return f"{days}d {clock}" if days else clock
