"""The outcome of a learning-rate range test: a short run whose rate grows exponentially, judged by
its losses alone.

Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
"""

import math
from typing import NamedTuple

import numpy as np

from data_pipeline.errors import DataError

# Steps on each side of a step, over which its loss is smoothed.
_WINDOW = 4
# Training breaks down beyond the rate with the lowest loss: that rate divided by this is suggested.
_MARGIN = 2.0
# A loss that falls by a smaller part counts as one that did not fall.
_FALL = 0.02
# Weight of the past in the running mean of the loss, which shows divergence.
_PAST = 0.9


class RangeTest(NamedTuple):
    """Rates, the loss after an update with each, and smoothed losses, all [n]. `lowest` is the rate
    with the lowest smoothed loss, `steepest` the one at which it falls most with the logarithm of
    the rate, and `suggestion` half of `lowest`."""

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    lowest: float
    steepest: float
    suggestion: float


def diverged(losses: list[float]) -> bool:
    """Whether a range test may stop: the last loss is not finite, or the running mean has lost half
    of what was gained.

    What is lost must also be more than a twentieth of the first loss, so that noise before the loss
    falls is not taken for divergence.
    """
    if not math.isfinite(losses[-1]):
        return True
    mean = 0.0
    means = []
    for step, loss in enumerate(losses, 1):
        mean = _PAST * mean + (1 - _PAST) * loss
        means.append(mean / (1 - _PAST**step))
    least = min(means)
    return bool(means[-1] - least > max((means[0] - least) / 2, means[0] / 20))


def outcome(rates: np.ndarray, losses: np.ndarray) -> RangeTest:
    """The outcome of a range test.

    Args:
        rates: growing learning rates [n].
        losses: the loss after an update with each rate [n], all finite.

    Raises:
        DataError: the loss never fell.
    """
    index = np.arange(len(losses))
    first = np.maximum(index - _WINDOW, 0)
    last = np.minimum(index + _WINDOW + 1, len(losses))
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    smooth = (sums[last] - sums[first]) / (last - first)
    at = int(np.argmin(smooth))
    # Of the smoothed loss at its ends, where it is a mean of _WINDOW + 1 losses.
    noise = np.median(np.abs(np.diff(losses))) / np.sqrt(_WINDOW + 1)
    if at < 2 or smooth[0] - smooth[at] < max(_FALL * abs(smooth[0]), 4 * noise):
        mend = "Let it begin lower with --low, take more steps with --steps, or look at the data"
        raise DataError(
            f"the loss did not fall between rates {rates[0]:.3g} and {rates[-1]:.3g}. {mend}."
        )
    slope = np.gradient(smooth[: at + 1], np.log(rates[: at + 1]))
    lowest = float(rates[at])
    steepest = float(rates[int(np.argmin(slope))])
    return RangeTest(rates, losses, smooth, lowest, steepest, lowest / _MARGIN)
