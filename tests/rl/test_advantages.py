"""Advantages: the formulas on numbers that are written out, and what holds for all numbers."""

import math

import hypothesis
import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.rl.advantages import (
    AGGREGATIONS,
    BASELINES,
    SCALES,
    advantages,
    as_array,
    weighted_sum,
)

NONE = math.nan


def one(rewards, num_generations, **options):
    return advantages(np.array([rewards], np.float64), num_generations, **options)


def test_the_mean_of_the_group_is_the_baseline():
    result = one([1, 0, 0, 1, 2, 2, 2, 6], 4, scale_rewards="none")
    np.testing.assert_array_equal(result.values, [0.5, -0.5, -0.5, 0.5, -1, -1, -1, 3])
    assert result.applies.all()
    assert (result.num_groups, result.equal_groups, result.empty_groups) == (2, 0, 0)


def test_the_others_of_the_group_are_the_baseline():
    result = one([1, 0, 0, 1, 2, 2, 2, 6], 4, scale_rewards="none", baseline="leave_one_out")
    expected = [1 - 1 / 3, -2 / 3, -2 / 3, 1 - 1 / 3, 2 - 10 / 3, 2 - 10 / 3, 2 - 10 / 3, 6 - 2]
    np.testing.assert_allclose(result.values, expected, rtol=1e-15)


def test_a_group_is_divided_by_its_deviation():
    """sqrt(1/3) for two ones and two zeros, 2 for the other group."""
    result = one([1, 0, 0, 1, 2, 2, 2, 6], 4, epsilon=0.0)
    high = 0.5 * math.sqrt(3)
    expected = [high, -high, -high, high, -0.5, -0.5, -0.5, 1.5]
    np.testing.assert_allclose(result.values, expected, rtol=1e-15)
    default = one([1, 0, 0, 1], 4).values
    np.testing.assert_allclose(default[0], 0.5 / (math.sqrt(1 / 3) + 1e-4), rtol=1e-15)


def test_the_deviation_of_the_batch_is_one_number():
    rewards = [1.0, 0, 0, 1, 2, 2, 2, 6]
    result = one(rewards, 4, scale_rewards="batch", epsilon=0.0)
    plain = one(rewards, 4, scale_rewards="none")
    np.testing.assert_allclose(result.values, plain.values / np.std(rewards, ddof=1), rtol=1e-14)


def test_rewards_are_weighed_and_summed():
    rewards = np.array([[1.0, 0, NONE, NONE], [2, 4, 6, NONE]])
    np.testing.assert_array_equal(
        weighted_sum(rewards, np.array([3.0, 0.5])), [4.0, 2.0, 3.0, math.nan]
    )
    result = advantages(rewards, 2, weights=[3.0, 0.5], scale_rewards="none")
    np.testing.assert_array_equal(result.values, [1, -1, 0, 0])
    assert result.applies.tolist() == [True, True, True, False]
    # The third row is alone with its reward: no other is there to be compared with.
    assert result.equal_groups == 1


def test_none_is_not_zero():
    result = one([1, 3, NONE, NONE], 4, scale_rewards="none")
    np.testing.assert_array_equal(result.values, [-1, 1, 0, 0])
    assert result.applies.tolist() == [True, True, False, False]
    as_zero = one([1, 3, 0, 0], 4, scale_rewards="none")
    assert as_zero.values.tolist() == [0, 2, -1, -1]


def test_a_group_without_any_reward_has_no_signal():
    result = one([NONE, NONE, 1, 2], 2)
    assert result.values[:2].tolist() == [0, 0] and not result.applies[:2].any()
    assert (result.empty_groups, result.equal_groups) == (1, 0)


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("baseline", BASELINES)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_equal_rewards_have_advantage_exactly_zero(scale, baseline, aggregation):
    """The mean of three times 0.1 is 0.10000000000000002."""
    assert np.mean([0.1] * 3) != 0.1
    result = one(
        [0.1, 0.1, 0.1, 0.1, 0.1, NONE],
        3,
        scale_rewards=scale,
        baseline=baseline,
        aggregation=aggregation,
        epsilon=0.0,
    )
    assert result.values.tolist() == [0.0] * 6
    assert (result.equal_groups, result.empty_groups) == (2, 0)


def test_rewards_one_by_one_tell_equal_sums_apart():
    """Two rewards of different spread: their sums hide the small one."""
    rewards = np.array([[0.0, 0, 10, 10], [1, 0, 1, 0]])
    summed = advantages(rewards, 4, epsilon=0.0).values
    apart = advantages(rewards, 4, aggregation="normalize_then_sum", epsilon=0.0).values
    assert summed[2] - summed[3] < 0.2
    raw = np.array([0, -1, 1, 0]) * math.sqrt(3)
    np.testing.assert_allclose(apart, raw / np.std(raw, ddof=1), atol=1e-14)


GROUPS = st.tuples(st.integers(1, 4), st.integers(2, 6)).flatmap(
    lambda shape: st.tuples(
        arrays.arrays(
            np.float64,
            (2, shape[0] * shape[1]),
            elements=st.one_of(st.integers(-4, 4).map(float), st.just(NONE)),
        ),
        st.just(shape[1]),
    )
)


@hypothesis.given(
    GROUPS, st.sampled_from(SCALES), st.sampled_from(BASELINES), st.sampled_from(AGGREGATIONS)
)
def test_a_group_sums_to_zero(batch, scale, baseline, aggregation):
    """Both rewards apply to the same rows."""
    rewards, size = batch
    rewards[1] = np.where(np.isnan(rewards[0]), NONE, np.nan_to_num(rewards[1]))
    options = {"scale_rewards": scale, "baseline": baseline, "aggregation": aggregation}
    result = advantages(rewards, size, **options)
    np.testing.assert_allclose(result.values.reshape(-1, size).sum(1), 0, atol=1e-9)
    assert np.isfinite(result.values).all()
    assert (result.values[~result.applies] == 0).all()


@hypothesis.given(
    GROUPS,
    st.sampled_from(["group", "batch"]),
    st.sampled_from(BASELINES),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from([1e-3, 0.5, 4.0, 1e6]),
)
def test_the_unit_of_rewards_does_not_matter(batch, scale, baseline, aggregation, factor):
    rewards, size = batch
    options = {"scale_rewards": scale, "baseline": baseline, "aggregation": aggregation}
    here = advantages(rewards, size, epsilon=0.0, **options)
    there = advantages(factor * rewards, size, epsilon=0.0, **options)
    # Sums of scaled rewards may be equal in one unit and differ by a rounding in another.
    hypothesis.assume(here.equal_groups == there.equal_groups)
    np.testing.assert_allclose(there.values, here.values, rtol=1e-9, atol=1e-9)


@hypothesis.given(
    GROUPS,
    st.sampled_from(SCALES),
    st.sampled_from(BASELINES),
    st.sampled_from(AGGREGATIONS),
    st.randoms(use_true_random=False),
)
def test_the_order_of_rows_and_of_groups_does_not_matter(
    batch, scale, baseline, aggregation, random
):
    rewards, size = batch
    options = {"scale_rewards": scale, "baseline": baseline, "aggregation": aggregation}
    groups = [list(range(i, i + size)) for i in range(0, rewards.shape[1], size)]
    random.shuffle(groups)
    for group in groups:
        random.shuffle(group)
    order = np.concatenate(groups)
    here = advantages(rewards, size, **options)
    there = advantages(rewards[:, order], size, **options)
    np.testing.assert_allclose(there.values, here.values[order], atol=1e-12)
    assert there[2:] == here[2:]


def test_lists_with_none_become_an_array():
    np.testing.assert_array_equal(as_array([[1, None], [None, 2.5]]), [[1, NONE], [NONE, 2.5]])


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"scale_rewards": "std"}, "Set it to group, batch, none"),
        ({"baseline": "critic"}, "Set it to mean, leave_one_out"),
        ({"aggregation": "max"}, "Set it to sum_then_normalize"),
        ({"weights": [1.0, 2.0]}, "Set as many, or none for 1 each"),
        ({"num_generations": 3}, "Set it to the number of completions per prompt"),
        ({"num_generations": 0}, "Set it to the number of completions per prompt"),
    ],
)
def test_arguments_that_make_no_sense_are_refused(options, advice):
    with pytest.raises(ConfigError, match=advice):
        advantages(np.zeros((1, 4)), **({"num_generations": 2} | options))


def test_an_infinite_reward_is_refused():
    with pytest.raises(DataError, match=r"row 1 is infinite.*return None"):
        one([0, math.inf], 2)
