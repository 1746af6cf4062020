"""The choice of the next learning rate, and of the recommended one, for known losses."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.commands.probe.rate_search import (
    COARSE,
    FINE,
    DivergenceDetector,
    RateChoice,
    choose,
    next_rate,
)

LOW, HIGH = 1e-6, 10.0
NAN, INF = math.nan, math.inf


def search(loss, start, low=LOW, high=HIGH, most=100):
    """All losses of a search whose trials have the loss of a function."""
    losses = {}
    rate = start
    while rate is not None and len(losses) < most:
        losses[rate] = loss(rate)
        rate = next_rate(losses, low, high)
    return losses


@pytest.mark.parametrize(
    ("losses", "choice"),
    [
        ({}, None),
        ({1e-3: NAN, 1e-2: INF}, None),
        ({1e-3: 2.0}, RateChoice(1e-3, None, None)),
        ({1e-3: 2.0, 1e-2: 1.0, 1e-1: 1.5}, RateChoice(1e-2, 1e-3, 1e-1)),
        ({1e-1: NAN, 1e-3: 2.0, 1e-2: 1.0}, RateChoice(1e-2, 1e-3, 1e-1)),
        # Of equal losses the lower rate, unless all are equal.
        ({1e-4: 2.0, 1e-3: 1.0, 1e-2: 1.0}, RateChoice(1e-3, 1e-4, 1e-2)),
        ({1e-4: 2.0, 1e-3: 2.0}, RateChoice(1e-3, 1e-4, None)),
        ({1e-4: 2.0, 1e-3: 2.0, 1e-2: NAN}, RateChoice(1e-3, 1e-4, 1e-2)),
        # At the border there is no neighbour on one side.
        ({1e-3: 3.0, 1e-2: 2.0}, RateChoice(1e-2, 1e-3, None)),
        ({1e-3: 1.0, 1e-2: 2.0}, RateChoice(1e-3, None, 1e-2)),
    ],
)
def test_the_rate_with_the_lowest_loss_is_chosen(losses, choice):
    assert choose(losses) == choice


@pytest.mark.parametrize("best", [3e-5, 1e-3, 0.4])
@pytest.mark.parametrize("start", [1e-5, 1e-3, 1.0])
@pytest.mark.parametrize("diverges_at", [3, 100])
def test_a_valley_is_found_with_a_neighbour_on_each_side(best, start, diverges_at):
    def loss(rate):
        if rate > diverges_at * best:
            return NAN
        return 2 + math.log(rate / best) ** 2

    losses = search(loss, start)
    choice = choose(losses)
    assert choice is not None and choice.below is not None and choice.above is not None
    assert max(choice.rate / best, best / choice.rate) < FINE
    for neighbour in (choice.below, choice.above):
        assert max(choice.rate / neighbour, neighbour / choice.rate) < 1.1 * FINE
    assert len(losses) <= 6 + abs(math.log(best / start)) / math.log(COARSE)


@given(
    st.floats(1e-7, 50),
    st.functions(like=lambda rate: ..., returns=st.floats(0, 10) | st.just(NAN), pure=True),
)
def test_a_search_ends_within_its_range_and_recommends_the_lowest(start, loss):
    losses = search(loss, min(max(start, LOW), HIGH))
    assert len(losses) < 40 and all(LOW <= rate <= HIGH for rate in losses)
    finite = [value for value in losses.values() if math.isfinite(value)]
    choice = choose(losses)
    assert (choice is None) == (not finite)
    if choice is not None:
        assert losses[choice.rate] == min(finite)


@pytest.mark.parametrize(("slope", "end"), [(1, 1e-4), (-1, 1e-2)])
def test_a_best_rate_at_the_end_of_the_range_is_the_end_itself(slope, end):
    losses = search(lambda rate: 5 + slope * math.log(rate), 1e-3, 1e-4, 1e-2)
    choice = choose(losses)
    assert choice is not None and choice.rate == end
    assert (choice.below is None) == (slope == 1) and (choice.above is None) == (slope == -1)


def test_rates_without_effect_and_rates_that_all_diverge_go_to_the_other_end():
    assert max(search(lambda rate: 5.0, 1e-3)) == HIGH
    losses = search(lambda rate: NAN, 1e-3)
    assert min(losses) == LOW and max(losses) == 1e-3 and choose(losses) is None


def diverged_at(losses):
    divergence = DivergenceDetector()
    return next((n for n, loss in enumerate(losses) if divergence.has_diverged(loss)), None)


def test_noise_before_the_loss_falls_is_not_divergence():
    rng = np.random.default_rng(0)
    flat = list(5.5 + 0.1 * rng.standard_normal(60))
    assert diverged_at(flat) is None
    assert diverged_at([*flat, NAN]) == 60 and diverged_at([*flat, INF]) == 60
    falling_and_rising = [*np.linspace(5.5, 3, 60), *np.linspace(3, 6, 40)]
    assert 60 < (diverged_at(falling_and_rising) or 0) < 99
