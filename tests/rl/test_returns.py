"""Advantages and returns of tokens are what their sums say, term by term."""

import numpy as np
import pytest

from maxtrain.config.schema import PpoConfig
from maxtrain.rl.returns import (
    counted_completions,
    divergence,
    estimate,
    explained_variance,
    token_rewards,
    whitened,
    with_returns,
)
from maxtrain.rl.rollout import Rollout, from_bytes
from maxtrain.rl.rows import RowShape, batch_arrays

LENGTHS = np.array([3, 1, 5, 2], np.int32)
S = int(LENGTHS.sum())
ENDS = np.cumsum(LENGTHS)


@pytest.fixture(scope="module")
def rollout():
    rng = np.random.default_rng(0)
    return Rollout(
        prompts=np.arange(4, dtype=np.int32),
        prompt_lengths=np.ones(4, np.int32),
        tokens=rng.integers(10, 90, S).astype(np.int32),
        lengths=LENGTHS,
        sampled=-rng.random(S).astype(np.float32),
        old=-rng.random(S).astype(np.float32),
        reference=-rng.random(S).astype(np.float32),
        truncated=np.array([False, False, True, False]),
        rewards=np.array([[1.0, np.nan, 0.5, 2.0], [0.0, np.nan, 1.0, np.nan]]),
        advantages=np.zeros(4),
        about={},
        values=rng.normal(size=S).astype(np.float32),
    )


def by_double_loop(rewards, values, gamma, lambda_):
    """A_t as the sum over all l of (gamma lambda)^l times the error of token t + l."""
    found = np.zeros(S)
    for first, end in zip(ENDS - LENGTHS, ENDS):
        for t in range(first, end):
            for later in range(t, end):
                ahead = values[later + 1] if later + 1 < end else 0.0
                error = rewards[later] + gamma * ahead - values[later]
                found[t] += (gamma * lambda_) ** (later - t) * error
    return found


@pytest.mark.parametrize(("gamma", "lambda_"), [(1.0, 0.95), (0.9, 0.7), (0.8, 0.0)])
def test_advantages_are_the_sums_of_their_definition(rollout, gamma, lambda_):
    rewards = np.random.default_rng(1).normal(size=S)
    found = estimate(rewards, rollout.values, LENGTHS, gamma, lambda_)
    values = rollout.values.astype(np.float64)
    expected = by_double_loop(rewards, values, gamma, lambda_)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(found.returns, expected + values, rtol=1e-12, atol=1e-12)


def test_without_values_and_discount_it_is_reinforce_with_the_mean_as_baseline(rollout):
    """Each token has the reward of its completion, less the mean, over the deviation."""
    plain = rollout._replace(values=np.zeros(S, np.float32), rewards=np.array([[1.0, 2, 4, 8]]))
    config = PpoConfig(kl_coef=0.0, gamma=1.0, lambda_=1.0)
    found, _ = with_returns(plain, (1.0,), config, mask_truncated=False)
    score = np.repeat(plain.rewards[0], LENGTHS)
    np.testing.assert_array_equal(found.returns, score)
    expected = (score - score.mean()) / score.std(ddof=1)
    np.testing.assert_allclose(found.token_advantages, expected, rtol=1e-7)


def test_the_divergence_costs_at_each_token_and_the_score_is_at_the_last(rollout):
    config = PpoConfig(kl_coef=0.1, missing_eos_penalty=3.0)
    scores = np.array([1.0, np.nan, 1.5, 2.0])
    found = token_rewards(rollout, scores, config)
    apart = rollout.old.astype(np.float64) - rollout.reference
    expected = -0.1 * apart
    for end, score in zip(ENDS, [1.0, 0.0, 1.5 - 3.0, 2.0]):
        expected[end - 1] += score
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    k3 = divergence(rollout.old, rollout.reference, "k3")
    np.testing.assert_allclose(k3, np.exp(-apart) - 1 + apart, rtol=1e-9)
    assert k3.min() >= 0


def test_what_no_reward_applies_to_does_not_count(rollout):
    """Truncated completions that are masked do not count either: not for means, and not as a
    target."""
    found, numbers = with_returns(rollout, (1.0, 2.0), PpoConfig(), mask_truncated=True)
    assert counted_completions(rollout, mask_truncated=True).tolist() == [True, False, False, True]
    counts = np.repeat([True, False, False, True], LENGTHS)
    chosen = found.token_advantages[counts]
    np.testing.assert_allclose([chosen.mean(), chosen.var(ddof=1)], [0, 1], atol=1e-6)
    assert not found.token_advantages[~counts].any()
    values = rollout.values.astype(np.float64)
    explained = explained_variance(values[counts], found.returns[counts])
    assert numbers["explained_variance"] == explained
    arrays, _ = batch_arrays(found, RowShape(8, 1, 0.1, mask_truncated=True), is_first=True)
    assert arrays["loss_mask"].sum() == counts.sum()


def test_all_of_it_is_stored_and_lies_at_its_token_in_rows(rollout):
    made, _ = with_returns(rollout, (1.0, 2.0), PpoConfig(), mask_truncated=False)
    again = from_bytes(made.to_bytes())
    arrays, places = batch_arrays(again, RowShape(8, 1, 0.1), is_first=True)
    names = {"advantages": made.token_advantages, "returns": made.returns}
    for name, values in (names | {"old_values": made.values}).items():
        found = arrays[name].reshape(-1)[places.tokens]
        np.testing.assert_array_equal(found, values.astype(np.float32))
    taken = made.taken([2, 0])
    order = [*range(4, 9), *range(3)]
    np.testing.assert_array_equal(taken.returns, made.returns[order])
    np.testing.assert_array_equal(taken.values, made.values[order])


def test_ends_of_what_can_be_estimated():
    assert not whitened(np.array([3.0, 4.0]), np.array([True, False])).any()
    assert explained_variance(np.zeros(3), np.ones(3)) is None
    values = np.array([1.0, 2.0, 4.0])
    assert explained_variance(values, values) == 1.0
