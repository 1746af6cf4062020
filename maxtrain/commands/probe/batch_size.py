"""Choice of a batch size among those that fit into memory: a round number of rows, with enough
updates in a pass over the data, and no larger than is needed for speed.
"""

from collections.abc import Mapping
from typing import NamedTuple

from maxtrain.observe import human

# The fewest updates that a pass over the data should have: with fewer, the optimizer has hardly
# begun when all text was read.
LEAST_UPDATES = 200
# A batch with this share of the best speed counts as fast enough.
NEARLY = 0.95


class DataSize(NamedTuple):
    """Amount of data, in tokens."""

    # The most that the run may read; None: it may repeat the data without end.
    most: float | None
    # In one pass over the sources.
    one_pass: float


class BatchSizeAdvice(NamedTuple):
    """The rows of a batch that are advised."""

    rows: int
    # Why not more; empty: these are the most that fit into memory.
    why: str


def round_rows(most: int, unit: int) -> int:
    """The largest of 1, 2, 3, 4, 6, 8, 12, 16, ... times `unit` that is at most `most`; at least
    `unit`."""
    factor = 1
    while 2 * factor * unit <= most:
        factor *= 2
    half_more = factor + factor // 2
    if factor > 1 and half_more * unit <= most:
        factor = half_more
    return factor * unit


def fitting_data(
    most: int, unit: int, length: int, data: DataSize | None, steps: int | None, usual: int = 0
) -> BatchSizeAdvice:
    """The largest round batch that there is enough data for.

    Args:
        most: rows that fit into memory.
        unit: the rows of a batch are a multiple of it.
        length: tokens in a row.
        data: how much there is; None: unknown.
        steps: of the run; None: as many as the data gives.
        usual: rows of the config's own batch; a short pass over the data does not go below it.
    """
    rows = most
    why = ""
    if data is not None:
        rows_of_pass = int(data.one_pass // (LEAST_UPDATES * length))
        limit = max(usual, rows_of_pass)
        if limit < rows:
            rows = limit
            tokens = human.count(data.one_pass)
            why = (
                f"with more, a pass over {tokens} tokens would have less than {LEAST_UPDATES} "
                "updates"
            )
        if steps is not None and data.most is not None:
            rows_of_steps = int(data.most // (steps * length))
            if rows_of_steps < rows:
                rows = rows_of_steps
                tokens = human.count(data.most)
                why = (
                    f"with more, steps={steps:,} would read more than the {tokens} tokens "
                    "that there are"
                )
    return BatchSizeAdvice(round_rows(rows, unit), why)


def fast_enough(
    allowed: BatchSizeAdvice, usual: int, speeds: Mapping[int, float]
) -> BatchSizeAdvice:
    """The smallest measured batch that is nearly as fast as the fastest, or the config's own if
    that is larger.

    Args:
        allowed: what memory and data allow.
        usual: rows of the config's own batch.
        speeds: measured tokens per second, by rows.
    """
    if not speeds:
        return allowed
    best = max(speeds.values())
    enough = min(rows for rows, speed in speeds.items() if speed >= NEARLY * best)
    if usual <= allowed.rows:
        enough = max(enough, usual)
    if enough >= allowed.rows:
        return allowed
    speed = human.count(_speed_near(speeds, enough))
    return BatchSizeAdvice(enough, f"more is hardly faster than its {speed} tokens/s")


def _speed_near(speeds: Mapping[int, float], rows: int) -> float:
    """The speed of the measured batch whose rows are nearest to `rows`."""

    def distance(measured: int) -> int:
        return abs(measured - rows)

    return speeds[min(speeds, key=distance)]
