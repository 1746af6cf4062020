"""Groups without a signal are replaced by others that have one, as far as there are any."""

import numpy as np
import pytest

from maxtrain.rl.advantages import advantages, has_signal
from maxtrain.rl.maker import filled_places

NONE = np.nan


def test_a_group_has_a_signal_where_its_advantages_are_not_all_zero():
    groups = [[1, 1], [1, 0], [NONE, 2], [NONE, NONE], [0.1, 0.3], [3, 0]]
    first = np.array(groups, np.float64).reshape(1, -1)
    # With this, the last group has equal sums.
    second = np.where(np.arange(12) == 11, 6.0, 0.0)[None]
    second[np.isnan(first)] = NONE
    rewards = np.concatenate([first, second])
    weights = [1.0, 0.5]
    found = has_signal(rewards, 2, weights)
    values = advantages(rewards, 2, weights=weights).values.reshape(-1, 2)
    assert found.tolist() == values.any(-1).tolist() == [False, True, False, False, True, False]


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        ([1, 1, 1], [0, 1, 2]),
        ([0, 1, 0], [0, 1, 2]),
        ([0, 1, 0, 0, 1], [4, 1, 2]),
        ([0, 1, 0, 1, 0, 1, 1], [3, 1, 5]),
    ],
)
def test_the_next_groups_with_a_signal_come_in_their_order(signals, expected):
    assert filled_places(np.array(signals, bool), 3) == expected
