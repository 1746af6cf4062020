"""Numbers as people read them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.observe import human


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *[
            (0, "0"),
            (7, "7"),
            (950, "950"),
            (0.5, "0.50"),
            (999.9, "1.00k"),
            (12_345, "12.3k"),
            (999_499, "999k"),
        ],
        *[
            (999_999, "1.00M"),
            (1_250_000, "1.25M"),
            (21.6e9, "21.6B"),
            (3e12, "3.00T"),
            (-12_345, "-12.3k"),
        ],
        *[(math.nan, "nan"), (math.inf, "inf")],
    ],
)
def test_count(value, text):
    assert human.count(value) == text


@given(st.integers(0, 10**14))
def test_count_is_short_and_near(value):
    text = human.count(value)
    number = float(text.rstrip("kMBT")) * {"k": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1], 1)
    assert len(text) <= 5 and number == pytest.approx(value, rel=6e-3)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0:00"),
        (7.4, "0:07"),
        (83, "1:23"),
        (59.9, "1:00"),
        (3723, "1:02:03"),
        (270_306, "3d 3:05:06"),
        (math.inf, "?"),
    ],
)
def test_duration(seconds, text):
    assert human.duration(seconds) == text
