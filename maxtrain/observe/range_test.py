"""What a learning-rate range test says: a short run whose rate grows exponentially, judged by its
losses alone.

Source: L. N. Smith, Cyclical Learning Rates for Training Neural Networks, 2017, section 3.3.
"""

import math
from typing import NamedTuple

import numpy as np

from data_pipeline.errors import DataError

_WINDOW = 4  # steps on each side of a step, over which its loss is smoothed
_MARGIN = 2.0  # a rate this much lower than the one with the lowest loss, beyond which training breaks down, is suggested
_FALL = 0.02  # a loss that falls by a smaller part has not fallen
_LATEST = 0.9  # weight of the past in the running mean that divergence is seen by


class RangeTest(NamedTuple):
    """Rates, the loss after an update with each, smoothed losses, all [n], and what follows."""

    rates: np.ndarray
    losses: np.ndarray
    smooth: np.ndarray
    lowest: float  # rate with the lowest smoothed loss
    steepest: float  # rate at which the smoothed loss falls most with the logarithm of the rate
    suggestion: float  # half of `lowest`


def diverged(losses: list[float]) -> bool:
    """Whether a range test may stop: the last loss is not finite, or the running mean has lost half
    of what was gained.

    What is lost must also be a twentieth of the first loss, so that noise before the loss falls is
    not taken for it.
    """
    if not math.isfinite(losses[-1]):
        return True
    mean, means = 0.0, []
    for step, loss in enumerate(losses, 1):
        mean = _LATEST * mean + (1 - _LATEST) * loss
        means.append(mean / (1 - _LATEST**step))
    least = min(means)
    return bool(means[-1] - least > max((means[0] - least) / 2, means[0] / 20))


def judge(rates: np.ndarray, losses: np.ndarray) -> RangeTest:
    """The outcome of a range test: growing rates, and the loss after an update with each; [n], all
    finite.

    DataError: the loss never fell.
    """
    index, sums = np.arange(len(losses)), np.concatenate([[0.0], np.cumsum(losses)])
    first, last = np.maximum(index - _WINDOW, 0), np.minimum(index + _WINDOW + 1, len(losses))
    smooth = (sums[last] - sums[first]) / (last - first)
    at = int(np.argmin(smooth))
    noise = np.median(np.abs(np.diff(losses))) / np.sqrt(
        _WINDOW + 1
    )  # of the smoothed loss at its ends
    if at < 2 or smooth[0] - smooth[at] < max(_FALL * abs(smooth[0]), 4 * noise):
        mend = "Let it begin lower with --low, take more steps with --steps, or look at the data"
        raise DataError(
            f"the loss did not fall between rates {rates[0]:.3g} and {rates[-1]:.3g}. {mend}."
        )
    slope = np.gradient(smooth[: at + 1], np.log(rates[: at + 1]))
    lowest, steepest = float(rates[at]), float(rates[int(np.argmin(slope))])
    return RangeTest(rates, losses, smooth, lowest, steepest, lowest / _MARGIN)
