"""What a range test says of curves whose answer is known."""

import numpy as np
import pytest

from data_pipeline.errors import DataError
from maxtrain.observe.range_test import diverged, outcome


def descend(curvature, steps=200, low=1e-6, high=1e3, noise=0.0):
    """Gradient descent on curvature x^2 / 2, stable below 2 / curvature, with a growing rate, until
    it has diverged."""
    rates, losses, x, rng = [], [], 1.0, np.random.default_rng(0)
    for rate in np.geomspace(low, high, steps):
        losses.append(curvature * x * x / 2 * (1 + noise * rng.standard_normal()) + 1.0)
        if diverged(losses):
            break
        rates.append(rate)
        x -= rate * curvature * x
    return np.array(rates)[: len(losses) - 1], np.array(losses[1:])


@pytest.mark.parametrize("curvature", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_the_suggestion_for_a_quadratic_is_stable_and_not_timid(curvature, noise):
    rates, losses = descend(curvature, noise=noise)
    stable = 2 / curvature
    assert rates[-1] < 30 * stable, "it stops soon after it has diverged"
    test = outcome(rates, losses)
    assert stable / 10 < test.suggestion < stable
    assert test.suggestion == test.lowest / 2 and test.steepest < test.lowest


def test_noise_before_the_loss_falls_is_not_divergence():
    rng = np.random.default_rng(0)
    flat = list(5.5 + 0.1 * rng.standard_normal(60))
    assert not any(diverged(flat[: n + 1]) for n in range(60))
    assert diverged([*flat, np.nan]) and diverged([*flat, np.inf])
    assert diverged([*np.linspace(5.5, 3, 60), *np.linspace(3, 6, 40)])


def test_a_loss_that_never_falls_has_no_suggestion():
    rates = np.geomspace(1e-5, 1, 50)
    noise = 5.5 + 0.1 * np.random.default_rng(1).standard_normal(50)
    for losses in (np.full(50, 5.0), np.linspace(5, 9, 50), noise):
        with pytest.raises(
            DataError,
            match=r"did not fall between rates 1e-05 and 1\. Let it begin lower with --low",
        ):
            outcome(rates, losses)
