"""Which of the batches that fit is worth using: a round one, not too large for the data, and no
larger than speed asks for."""

from collections.abc import Mapping
from typing import NamedTuple

from maxtrain.observe import human

LEAST_UPDATES = 200  # of a pass over the data: with fewer, the optimizer has hardly begun when the text is used up
NEARLY = 0.95  # of the best speed is as good


class Data(NamedTuple):
    """What there is to read, in tokens: in the run at most (None: no end), and in one pass over the
    sources."""

    most: float | None
    one_pass: float


class Advice(NamedTuple):
    """Rows of a batch, and why not more; empty: they are the most that fit."""

    rows: int
    why: str


def round_rows(most: int, unit: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, 16, ... times `unit` that is at most `most`; at least
    `unit`."""
    factor = 1
    while 2 * factor * unit <= most:
        factor *= 2
    half_more = factor + factor // 2
    return (half_more if factor > 1 and half_more * unit <= most else factor) * unit


def fitting_data(
    most: int, unit: int, length: int, data: Data | None, steps: int | None, usual: int = 0
) -> Advice:
    """The round batch that the data has room for.

    Args:
        most, unit: rows that fit into memory, and what they are a multiple of.
        length: tokens in a row.
        data: None: it is not here.
        steps: of the run; None: as many as the data gives.
        usual: rows of the config's own batch, which need not be less.
    """
    rows, why = most, ""
    if data is not None:
        limit = max(usual, int(data.one_pass // (LEAST_UPDATES * length)))
        if limit < rows:
            rows = limit
            why = f"with more, a pass over {human.count(data.one_pass)} tokens would have less than {LEAST_UPDATES} updates"
        if steps is not None and data.most is not None and data.most // (steps * length) < rows:
            rows = int(data.most // (steps * length))
            why = f"with more, steps={steps:,} would read more than the {human.count(data.most)} tokens that there are"
    return Advice(round_rows(rows, unit), why)


def fast_enough(asked: Advice, usual: int, speeds: Mapping[int, float]) -> Advice:
    """The smallest measured batch that is nearly as fast as the fastest, or the config's own if
    that is larger.

    Args:
        asked: what memory and data allow.
        usual: rows of the config's own batch.
        speeds: tokens per second by rows, measured.
    """
    if not speeds:
        return asked
    best = max(speeds.values())
    enough = min(rows for rows, speed in speeds.items() if speed >= NEARLY * best)
    if usual <= asked.rows:
        enough = max(enough, usual)
    if enough >= asked.rows:
        return asked
    return Advice(
        enough, f"more is hardly faster than its {human.count(_near(speeds, enough))} tokens/s"
    )


def _near(speeds: Mapping[int, float], rows: int) -> float:
    """The speed of the measured batch that is nearest to so many rows."""
    return speeds[min(speeds, key=lambda measured: abs(measured - rows))]
