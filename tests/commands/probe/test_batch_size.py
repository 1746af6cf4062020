"""The batch that is recommended: round, with room in the data, and no larger than speed asks
for."""

import pytest

from maxtrain.commands.probe.batch_size import (
    BatchSizeAdvice,
    DataSize,
    fast_enough,
    fitting_data,
    round_rows,
)


@pytest.mark.parametrize(
    ("most", "unit", "rows"),
    [
        (1, 1, 1),
        (2, 1, 2),
        (3, 1, 3),
        (5, 1, 4),
        (7, 1, 6),
        (100, 1, 96),
        (413, 1, 384),
        (413, 8, 384),
        (60, 40, 40),
        (3, 8, 8),
    ],
)
def test_round_numbers(most, unit, rows):
    assert round_rows(most, unit) == rows


def test_a_set_of_a_million_tokens_gets_no_step_of_423_thousand():
    advice = fitting_data(413, 1, 1024, DataSize(1e6, 1e6), None)
    assert (
        advice.rows == 4
        and "a pass over 1.00M tokens would have less than 200 updates" in advice.why
    )
    assert fitting_data(413, 1, 1024, DataSize(None, 1e6), 2000).rows == 4, "without an end, too"
    assert fitting_data(413, 1, 1024, DataSize(1e6, 1e6), None, usual=16).rows == 16, (
        "what the config has itself stays"
    )


def test_steps_that_are_set_stay_within_the_data():
    advice = fitting_data(4096, 1, 256, DataSize(2.9e6, 2.9e6), 320)
    assert advice.rows == 32 and "steps=320 would read more than the 2.90M tokens" in advice.why
    assert advice.rows * 256 * 320 <= 2.9e6


def test_much_data_leaves_all_that_fits():
    assert fitting_data(413, 1, 1024, DataSize(1e12, 1e12), None) == BatchSizeAdvice(384, "")
    assert fitting_data(413, 1, 1024, None, None) == BatchSizeAdvice(384, "")


def test_a_batch_beyond_which_nothing_is_faster_is_enough():
    speeds = {8: 1000.0, 16: 1800.0, 32: 1850.0, 64: 1840.0}
    advice = fast_enough(BatchSizeAdvice(64, "x"), 8, speeds)
    assert advice.rows == 16 and "more is hardly faster than its 1.80k tokens/s" in advice.why
    assert fast_enough(BatchSizeAdvice(64, "x"), 48, speeds).rows == 48, (
        "not less than the config has"
    )
    assert fast_enough(BatchSizeAdvice(64, "x"), 128, speeds).rows == 16, "unless that does not fit"
    assert fast_enough(
        BatchSizeAdvice(64, "x"), 8, {8: 1.0, 16: 2.0, 32: 4.0, 64: 8.0}
    ) == BatchSizeAdvice(64, "x")
    assert fast_enough(BatchSizeAdvice(64, "x"), 8, {}) == BatchSizeAdvice(64, "x")
