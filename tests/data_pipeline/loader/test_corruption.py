"""Corruption: the configured share of positions, spans of the configured length, the same for a row
on any host."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.config import CorruptionConfig
from data_pipeline.loader.corruption import corrupt, corrupted, row_seed, start_probability

LENGTH = 512


def masks(config, rows=2000, epoch=0, seed=1):
    return corrupted(
        np.full(rows, row_seed(seed, "uid", epoch), np.uint64), np.arange(rows), LENGTH, config
    )


@pytest.mark.parametrize(
    "rate, span", [(0.15, 1.0), (0.15, 3.0), (0.5, 8.0), (0.02, 30.0), (0.9, 2.0)]
)
def test_the_share_is_the_rate_everywhere_in_a_row(rate, span):
    where = masks(CorruptionConfig(rate=rate, span=span))
    error = 5 * np.sqrt(
        rate * (1 - rate) * 2 * span / where.size
    )  # positions of one span are not independent
    assert abs(where.mean() - rate) < error
    for column in (0, 1, LENGTH // 2, LENGTH - 1):
        assert abs(where[:, column].mean() - rate) < 5 * np.sqrt(rate * (1 - rate) / len(where)), (
            column
        )


@pytest.mark.parametrize("span", [1.0, 2.0, 10.0])
def test_spans_have_the_mean_length(span):
    """Few enough to overlap rarely; those cut off by a row's ends are left out."""
    where = masks(CorruptionConfig(rate=0.002 * span, span=span))
    edges = np.diff(np.pad(where, ((0, 0), (1, 1))).astype(np.int8), axis=1)
    begins, ends = np.argwhere(edges == 1), np.argwhere(edges == -1)
    sizes = (ends - begins)[:, 1][(begins[:, 1] > 0) & (ends[:, 1] < LENGTH)]
    assert abs(sizes.mean() - span) < 0.12 * span + 5 * span / np.sqrt(len(sizes))
    if span == 1:
        assert (sizes == 1).mean() > 0.98


@settings(deadline=None, max_examples=60)
@given(rate=st.floats(1e-4, 0.99), span=st.floats(1, 200))
def test_the_probability_of_a_start_is_that_of_the_formula(rate, span):
    p = start_probability(rate, span)
    free = np.prod(1 - p * (1 - 1 / span) ** np.arange(int(60 * span) + 1))
    assert 0 < p <= rate and free == pytest.approx(1 - rate, rel=1e-9)


def test_a_row_is_corrupted_alike_wherever_it_is_read_and_otherwise_in_another_epoch():
    config = CorruptionConfig(rate=0.3, span=3.0)
    whole = masks(config, 64)
    part = corrupted(
        np.full(3, row_seed(1, "uid", 0), np.uint64), np.array([7, 50, 2]), LENGTH, config
    )
    assert np.array_equal(part, whole[[7, 50, 2]])
    for other in (
        masks(config, 64, epoch=1),
        masks(config, 64, seed=2),
        np.roll(whole, 1, axis=0),
        np.roll(whole, 100, axis=1),
    ):
        assert abs(np.corrcoef(whole.ravel(), other.ravel())[0, 1]) < 0.05


def test_only_inputs_that_may_be_are_replaced_by_random_ids_or_the_given_one():
    rng = np.random.default_rng(0)
    before, keep = (
        rng.integers(0, 50, (200, 64)).astype(np.int32),
        rng.uniform(size=(200, 64)) < 0.3,
    )
    seeds, rows = np.full(200, row_seed(0, "uid", 0), np.uint64), np.arange(200)
    for token_id in (None, 7):
        config, inputs = CorruptionConfig(rate=0.4, token_id=token_id), before.copy()
        corrupt(inputs, seeds, rows, 64, slice(None), config, 50, keep)
        where = corrupted(seeds, rows, 64, config)
        assert np.array_equal(inputs[keep | ~where], before[keep | ~where])
        half = before[:, 20:41].copy()
        corrupt(half, seeds, rows, 64, slice(20, 41), config, 50, keep[:, 20:41])
        assert np.array_equal(half, inputs[:, 20:41])  # a host that reads only some columns
        replaced = inputs[where & ~keep]
        if token_id is None:
            assert set(replaced.tolist()) == set(range(50)) and abs(replaced.mean() - 24.5) < 1
        else:
            assert set(replaced.tolist()) == {7}
