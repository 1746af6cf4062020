"""muP does what it is for: activations move alike at every width, and the best learning rate stays where it is."""

import jax
import numpy as np
import pytest

from benchmarks.mup import BASE, RATES, growth, sweep


@pytest.fixture(autouse=True)
def optax_dtypes():
    """Optax's own arithmetic is not strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_activations_move_alike_at_every_width_and_without_mup_more_and_more():
    """Five steps at a rate at which none has learned much yet."""
    widths = (64, 256)
    standard = np.array([growth(width, None, 2.0**-9, 5) for width in widths])
    mup = np.array([growth(width, BASE, 2.0**-9, 5) for width in widths[1:]])
    np.testing.assert_allclose(mup, np.broadcast_to(standard[:1], mup.shape), rtol=0.4)
    assert (standard[-1] > 1.4 * standard[0]).all() and (np.diff(standard, axis=0) > 0).all(), standard


@pytest.mark.slow
def test_the_best_learning_rate_stays_from_width_64_to_256():
    """Rates in steps of four: between 2^-8 and 2^-7 it is nearly a draw at both widths."""
    rates = RATES[::2]
    standard, mup = ([int(np.argmin(sweep(width, base, rates, 60))) for width in (64, 256)] for base in (None, BASE))
    assert mup[0] == mup[1] == standard[0] > standard[1]
