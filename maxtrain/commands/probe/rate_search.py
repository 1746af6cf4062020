"""Search for a learning rate: which rate to try next, and which one to recommend.

Each trial is a short training with one peak rate. All trials have the same weights, batches and
schedule shape, so that their losses can be compared. The search starts at one rate and goes up or
down in steps of `COARSE` until the best rate has a worse one on each side. Then it tries the two
rates half-way to these neighbours, in steps of `FINE`.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

# The factor between neighbouring rates of the first grid, and of the second.
COARSE = 10**0.5
FINE = 10**0.25
# Weight of the past in the running mean of the loss, which shows divergence.
_PAST = 0.9


class RateChoice(NamedTuple):
    """The recommended rate, and the tried rates next to it.

    Attributes:
        rate: the tried rate whose trial ended with the lowest loss.
        below, above: the nearest tried rates; None: no lower (higher) rate was tried.
    """

    rate: float
    below: float | None
    above: float | None


def rounded(rate: float) -> float:
    """A rate with two significant digits, as people write them."""
    return float(f"{rate:.2g}")


def choose(losses: Mapping[float, float]) -> RateChoice | None:
    """Return the rate with the lowest loss.

    Of equal losses, the lower rate is taken, which is the safer one for a longer run. If all
    finite losses are equal, no rate was high enough to matter, and the highest of them is taken.

    Args:
        losses: the loss of each trial by its rate; a trial that diverged has one that is not
            finite.

    Returns:
        The choice; None if all trials diverged, or there are none.
    """
    finite = {rate: loss for rate, loss in losses.items() if math.isfinite(loss)}
    if not finite:
        return None
    least = min(finite.values())
    equal = [rate for rate, loss in finite.items() if loss == least]
    rate = min(equal)
    if len(equal) == len(finite):
        rate = max(equal)
    below = [other for other in losses if other < rate]
    above = [other for other in losses if other > rate]
    return RateChoice(rate, max(below, default=None), min(above, default=None))


def next_rate(losses: Mapping[float, float], low: float, high: float) -> float | None:
    """Return the rate to try next.

    Args:
        losses: as for `choose`; at least one trial.
        low, high: the lowest and the highest rate to try.

    Returns:
        The rate; None if the best rate has a neighbour at a factor of about `FINE` on each side,
        or lies at the end of the range.
    """
    choice = choose(losses)
    if choice is None:
        return _within(min(losses) / COARSE, losses, low, high)
    # Neighbours at the coarse step come first: finer ones are worth their time only beside the
    # best rate of the coarse grid.
    for factor in (COARSE, FINE):
        for neighbour, rate in (
            (choice.above, choice.rate * factor),
            (choice.below, choice.rate / factor),
        ):
            if neighbour is None or not _is_within(choice.rate, neighbour, factor):
                found = _within(rate, losses, low, high)
                if found is not None:
                    return found
    return None


def _is_within(rate: float, neighbour: float, factor: float) -> bool:
    """Return whether two rates are at most a factor apart, give or take what rounding changes."""
    ratio = max(rate, neighbour) / min(rate, neighbour)
    return ratio <= factor * 1.1


def _within(rate: float, tried: Mapping[float, float], low: float, high: float) -> float | None:
    """The rate to try in place of this one: rounded, and not beyond the ends of the range.

    None if that rate has been tried.
    """
    found = rounded(rate)
    if found <= low:
        found = low
    if found >= high:
        found = high
    return None if found in tried else found


class DivergenceDetector:
    """Early stop of a trial, from the loss of each step.

    A trial stops if a loss is not finite, or if the running mean of the loss has lost half of what
    it had gained. The loss must also have risen by more than a twentieth of the first loss, so that
    noise before the loss falls does not count as divergence.
    """

    def __init__(self):
        self._steps = 0
        self._mean = 0.0
        self._first = 0.0
        self._least = math.inf

    def has_diverged(self, loss: float) -> bool:
        """Take the loss of the next step."""
        if not math.isfinite(loss):
            return True
        self._steps += 1
        self._mean = _PAST * self._mean + (1 - _PAST) * loss
        mean = self._mean / (1 - _PAST**self._steps)
        if self._steps == 1:
            self._first = mean
        self._least = min(self._least, mean)
        gained = self._first - self._least
        # A bool also for losses that are numpy's.
        return bool(mean - self._least > max(gained / 2, self._first / 20))
