"""Every learning rate of every schedule against its formula in plain Python."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import PieceConfig, ScheduleConfig
from maxtrain.train_step.schedule import make_schedule

pytestmark = pytest.mark.usefixtures("optax_dtypes")
PEAK, LOW = 3e-3, 2e-4
NAMES = ["constant", "linear", "cosine", "exponential", "inverse_sqrt", "polynomial", "wsd"]


def config(**changes):
    return ScheduleConfig(**({"min_learning_rate": LOW, "warmup_steps": 0} | changes))


def shape(name, start, end, s, n, power, timescale):
    """The rate of update s of n in a piece."""
    left = 1 - s / max(1, n - 1)
    match name:
        case "constant":
            return start
        case "inverse_sqrt":
            return max(end, start * math.sqrt(timescale / (timescale + s)))
        case "exponential":
            return start * (end / start) ** (s / max(1, n - 1))
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * (1 - left))) / 2
        case "linear" | "polynomial":
            return end + (start - end) * left ** (power if name == "polynomial" else 1)


def formula(c, num_steps, step):
    """The learning rate of the update with this index, from 0."""
    warmup = min(c.warmup_steps, num_steps)
    if step < warmup:
        return PEAK * (step + 1) / warmup
    if c.name == "wsd":
        decay = min(round(c.decay_fraction * num_steps), num_steps - warmup)
        into = step - (num_steps - decay)
        return PEAK if into < 0 else shape("linear", PEAK, LOW, into, decay, None, None)
    return shape(
        c.name, PEAK, LOW, step - warmup, num_steps - warmup, c.power, c.timescale or max(1, warmup)
    )


def rates(c, num_steps):
    return jax.vmap(make_schedule(c, PEAK, num_steps))(jnp.arange(num_steps))


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "num_steps, warmup", [(200, 10), (200, 0), (200, 1), (7, 3), (2, 1), (1, 0), (5, 50)]
)
def test_every_learning_rate_is_the_formulas(name, num_steps, warmup):
    c = config(
        name=name,
        warmup_steps=warmup,
        decay_fraction=0.3,
        power=1.5,
        timescale=20 if warmup == 3 else None,
    )
    expected = [formula(c, num_steps, step) for step in range(num_steps)]
    np.testing.assert_allclose(rates(c, num_steps), expected, rtol=2e-6)


@pytest.mark.parametrize("name", NAMES)
def test_first_last_and_the_borders_of_the_pieces(name):
    rate = make_schedule(config(name=name, warmup_steps=10, decay_fraction=0.25), PEAK, 100)
    assert (
        rate(0) == pytest.approx(PEAK / 10)
        and rate(9) == pytest.approx(PEAK)
        and rate(10) == pytest.approx(PEAK)
    )
    last = {"constant": PEAK, "inverse_sqrt": PEAK * math.sqrt(10 / 99)}.get(name, LOW)
    assert rate(99) == pytest.approx(last)
    if name == "wsd":  # 25 updates of decay, the first of them still at the peak
        assert all(rate(step) == pytest.approx(PEAK) for step in (50, 74, 75)) and rate(76) < PEAK


def test_a_decay_that_the_warmup_leaves_no_room_for_is_shortened():
    rate = make_schedule(config(name="wsd", warmup_steps=8, decay_fraction=0.9), PEAK, 10)
    assert (
        rate(7) == pytest.approx(PEAK)
        and rate(8) == pytest.approx(PEAK)
        and rate(9) == pytest.approx(LOW)
    )


def test_the_inverse_square_root_is_the_one_of_the_transformer():
    rate = rates(config(name="inverse_sqrt", warmup_steps=16, min_learning_rate=0.0), 400)
    k = np.arange(1, 401)  # one more update than the index; the peak is had twice
    np.testing.assert_allclose(rate[:16], PEAK * k[:16] / 16, rtol=2e-6)
    np.testing.assert_allclose(rate[16:], PEAK * 4 / np.sqrt(k[15:-1]), rtol=2e-6)


def test_pieces_follow_each_other_and_start_where_the_one_before_ended():
    pieces = (
        PieceConfig("constant", until=0.2, unit="fraction"),
        PieceConfig("polynomial", until=30, end=0.5, power=3.0),
        PieceConfig("inverse_sqrt", until=50, start=0.8),
        PieceConfig("cosine", until=60, start=0.0, end=0.6),  # a second warm-up
        PieceConfig("cosine", until=70, end=0.3),
        PieceConfig("linear"),
    )
    c, n = config(name="pieces", warmup_steps=5, pieces=pieces), 80
    root = 0.8 * math.sqrt(30 / 49)
    spans = [
        (5, 16, 1, 1),
        (16, 30, 1, 0.5),
        (30, 50, 0.8, 0),
        (50, 60, 0, 0.6),
        (60, 70, 0.6, 0.3),
        (70, 80, 0.3, 0),
    ]
    expected = [PEAK * (i + 1) / 5 for i in range(5)]
    for piece, (first, end, start, stop) in zip(pieces, spans):
        expected += [
            PEAK * shape(piece.name, start, stop, s, end - first, piece.power, first)
            for s in range(end - first)
        ]
    np.testing.assert_allclose(rates(c, n), expected, rtol=1e-5, atol=1e-9)
    assert expected[49] == pytest.approx(PEAK * root)


def test_a_piece_after_an_inverse_square_root_starts_at_what_it_fell_to():
    pieces = (PieceConfig("inverse_sqrt", until=64), PieceConfig("linear"))
    rate = rates(config(name="pieces", warmup_steps=16, timescale=4, pieces=pieces), 80)
    assert (
        rate[64] == pytest.approx(rate[63]) == pytest.approx(PEAK * math.sqrt(4 / 51))
        and rate[79] == 0
    )


def test_wsd_in_pieces_is_wsd():
    pieces = (
        PieceConfig("constant", until=0.75, unit="fraction"),
        PieceConfig("linear", end=LOW / PEAK),
    )
    made = rates(config(name="pieces", warmup_steps=7, pieces=pieces), 100)
    np.testing.assert_allclose(
        made, rates(config(name="wsd", warmup_steps=7, decay_fraction=0.25), 100), rtol=1e-6
    )


def test_pieces_that_do_not_fit_the_plan_are_refused():
    c = config(name="pieces", pieces=(PieceConfig("constant", until=90), PieceConfig("linear")))
    with pytest.raises(
        ConfigError, match=r"schedule.pieces\[0\].until=90.*in the 80 steps. Set the ends"
    ):
        make_schedule(c, PEAK, 80)


def test_an_exponential_curve_never_meets_zero():
    growing = config(name="pieces", pieces=(PieceConfig("exponential", start=1e-4, end=1.0),))
    np.testing.assert_allclose(
        rates(growing, 5), PEAK * 10.0 ** np.array([-4, -3, -2, -1, 0]), rtol=2e-6
    )
    for wrong in (
        config(name="exponential", min_learning_rate=0.0),
        config(name="pieces", pieces=(PieceConfig("exponential"),)),
    ):
        with pytest.raises(
            ConfigError,
            match=r"exponential curve goes from .* to 0.*Set schedule\.min_lr_ratio, or `start`",
        ):
            make_schedule(wrong, PEAK, 5)


@pytest.mark.parametrize(
    ("peak", "low"), [(2e-3, 2e-4), (1e-3, 1e-4), (3e-4, 3e-5)]
)  # of the files in configs/
@pytest.mark.parametrize(
    "name", ["cosine", "linear", "wsd", "polynomial", "exponential", "inverse_sqrt"]
)
def test_a_tenth_of_the_peak_is_the_rate_that_was_written_out_before(name, peak, low):
    """Bit for bit: runs of before go on with files that say it as a factor now."""
    ours, theirs = (
        make_schedule(ScheduleConfig(name, warmup_steps=40, **floor), peak, 320)
        for floor in ({"min_lr_ratio": 0.1}, {"min_learning_rate": low})
    )
    steps = jnp.arange(320)
    assert np.array_equal(jax.jit(jax.vmap(ours))(steps), jax.jit(jax.vmap(theirs))(steps))


def test_the_floor_goes_with_the_peak():
    rate = make_schedule(ScheduleConfig(min_lr_ratio=0.25), 4e-3, 200)
    assert rate(199) == pytest.approx(1e-3)
