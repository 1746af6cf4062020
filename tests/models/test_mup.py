"""muP does what it is for: activations move alike at every width, and the best learning rate stays
where it is."""

import jax
import numpy as np
import pytest

from benchmarks.mup import BASE, GROWTH_WIDTHS, RATES, growth, sweep


@pytest.fixture(autouse=True)
def optax_dtypes():
    """Optax's own arithmetic is not strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.slow
def test_activations_move_alike_at_every_width_and_without_mup_more_and_more():
    """The coordinate check: by 5 steps at a rate at which none has learned much yet."""
    first, *wider = GROWTH_WIDTHS
    narrow, wide = (np.array(growth(width, None)) for width in (first, wider[-1]))
    assert (wide > 1.6 * narrow).all(), (narrow, wide)
    hidden, logits = np.array([narrow, *(growth(width, BASE) for width in wider)]).T
    assert hidden.max() < 1.15 * hidden.min(), hidden
    # Of the logits, what the initial head makes of moved states shrinks with the root of the width;
    # the rest stays.
    assert logits[0] >= logits.max() and logits[1:].max() < 1.3 * logits[1:].min(), logits


@pytest.mark.slow
def test_the_best_learning_rate_stays_from_width_64_to_256():
    """Rates in steps of four: between 2^-8 and 2^-7 it is nearly a draw at both widths."""
    rates = RATES[::2]
    standard, mup = (
        [int(np.argmin(sweep(width, base, rates, 60))) for width in (64, 256)]
        for base in (None, BASE)
    )
    assert mup[0] == mup[1] == standard[0] > standard[1]
