"""Routing against its equations in numpy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.ops.routing import (
    capacity_of,
    choices_of,
    choose,
    imbalance,
    jittered,
    with_noise,
    within_capacity,
    z_of,
)

B, T, E = 3, 17, 8


def drawn(seed=0, rows=B, length=T):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, length, E)).astype(np.float32) * 2
    is_token = rng.random((rows, length)) < 0.8
    is_token[:, 0] = True
    return jnp.asarray(logits), jnp.asarray(is_token), rng


def softmax(x):
    x = np.exp(x - x.max())
    return x / x.sum()


def expected(logits, choices, scores, normalize, scale, correction, groups, top, best):
    """The experts and weights of one token."""
    values = softmax(logits) if scores == "softmax" else 1 / (1 + np.exp(-logits))
    ranked = values + correction
    if groups > 1:
        parts = ranked.reshape(groups, -1)
        worth = np.sort(parts, axis=1)[:, -best:].sum(1)
        chosen = np.argsort(-worth, kind="stable")[:top]
        outside = ~np.isin(np.arange(groups), chosen)
        parts = np.where(outside[:, None], -np.inf, parts)
        ranked = parts.reshape(-1)
    experts = np.argsort(-ranked, kind="stable")[:choices]
    weights = values[experts]
    if normalize:
        weights = weights / weights.sum()
    return experts, weights * scale


@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize(("groups", "top", "best"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (2, 1, 3)])
def test_a_token_goes_to_its_best_experts(scores, normalize, groups, top, best):
    logits, is_token, rng = drawn()
    correction = rng.normal(size=E) * 0.3
    routing = choose(
        logits,
        is_token,
        2,
        scores=scores,
        normalize=normalize,
        scale=2.5,
        correction=jnp.asarray(correction, jnp.float32),
        num_groups=groups,
        top_groups=top,
        best_of_group=best,
    )
    for row, token in np.ndindex(B, T):
        if not is_token[row, token]:
            assert (routing.experts[row, token] == E).all()
            assert (routing.weights[row, token] == 0).all()
            assert (routing.shares[row, token] == 0).all()
            continue
        x = np.asarray(logits[row, token], np.float64)
        experts, weights = expected(x, 2, scores, normalize, 2.5, correction, groups, top, best)
        np.testing.assert_array_equal(routing.experts[row, token], experts)
        np.testing.assert_allclose(routing.weights[row, token], weights, rtol=1e-6)
        np.testing.assert_allclose(routing.shares[row, token].sum(), 1, rtol=1e-6)


def test_normalised_softmax_is_the_softmax_of_the_chosen_logits():
    logits, is_token, _ = drawn()
    routing = choose(logits, is_token, 3)
    best, _ = jax.lax.top_k(logits, 3)
    after = jnp.where(is_token[..., None], jax.nn.softmax(best, axis=-1), 0.0)
    np.testing.assert_allclose(routing.weights, after, rtol=1e-6)


def test_experts_of_equal_scores_are_chosen_in_their_order():
    routing = choose(jnp.zeros((1, 1, E)), jnp.ones((1, 1), bool), 3)
    assert routing.experts.tolist() == [[[0, 1, 2]]]


@pytest.mark.every_dose
@pytest.mark.long
def test_a_correction_changes_the_choice_and_no_weight_and_has_no_gradient():
    logits, is_token, _ = drawn()
    far = jnp.zeros(E).at[5].set(100.0)

    def weight(correction, logits):
        routing = choose(logits, is_token, 2, scores="sigmoid", correction=correction)
        return routing.weights[..., 0].sum()

    routing = choose(logits, is_token, 2, scores="sigmoid", normalize=False, correction=far)
    assert (np.asarray(routing.experts)[..., 0][np.asarray(is_token)] == 5).all()
    own = jnp.where(is_token, jax.nn.sigmoid(logits[..., 5]), 0)
    np.testing.assert_allclose(routing.weights[..., 0], own, rtol=1e-6)
    slopes = jax.grad(weight, argnums=(0, 1))(far, logits)
    assert (slopes[0] == 0).all()
    assert (slopes[1] != 0).any()


def test_choices_are_counted_and_those_of_padding_are_not():
    logits, is_token, _ = drawn()
    routing = choose(logits, is_token, 3)
    counts = choices_of(routing.experts, E)
    expected = [
        np.bincount(np.asarray(row).ravel(), minlength=E + 1)[:E] for row in routing.experts
    ]
    np.testing.assert_array_equal(counts, expected)
    assert counts.sum() == 3 * is_token.sum()


@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_imbalance_is_its_equation(scope):
    logits, is_token, _ = drawn()
    routing = choose(logits, is_token, 2)
    groups = [[row] for row in range(B)] if scope == "sequence" else [list(range(B))]
    total = 0.0
    for rows in groups:
        real = np.asarray(is_token)[rows]
        n = real.sum()
        chosen = np.asarray(routing.experts)[rows][real]
        f = np.array([(chosen == expert).sum() for expert in range(E)]) / (2 * n)
        p = np.asarray(routing.shares, np.float64)[rows][real].mean(0)
        total += n * E * (f * p).sum()
    np.testing.assert_allclose(imbalance(routing, scope), total, rtol=1e-6)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("scope", ["sequence", "micro_batch"])
def test_imbalance_is_1_where_shares_are_equal_and_the_number_of_experts_at_worst(scope):
    is_token = jnp.ones((2, E), bool)
    even = 20.0 * jnp.broadcast_to(jnp.eye(E), (2, E, E))
    np.testing.assert_allclose(imbalance(choose(even, is_token, 1), scope), 2 * E, rtol=1e-5)
    one = jnp.zeros((2, E, E)).at[..., 3].set(40.0)
    np.testing.assert_allclose(imbalance(choose(one, is_token, 1), scope), 2 * E * E, rtol=1e-5)


@pytest.mark.every_dose
@pytest.mark.long
def test_the_imbalance_of_rows_adds_up_and_ignores_padding():
    logits, is_token, _ = drawn()
    whole = imbalance(choose(logits, is_token, 2), "sequence")
    parts = sum(
        imbalance(choose(logits[i : i + 1], is_token[i : i + 1], 2), "sequence") for i in range(B)
    )
    np.testing.assert_allclose(whole, parts, rtol=1e-6)

    def loss(logits):
        return imbalance(choose(logits, is_token, 2), "sequence")

    slope = jax.grad(loss)(logits)
    assert (np.asarray(slope)[~np.asarray(is_token)] == 0).all()
    assert (np.asarray(slope)[np.asarray(is_token)] != 0).any(-1).all()


@pytest.mark.long
def test_the_imbalance_of_micro_batches_that_know_all_choices_adds_up_to_that_of_the_batch():
    logits, is_token, _ = drawn()
    routing = choose(logits, is_token, 2)
    whole = choices_of(routing.experts, E).sum(0)

    def of(logits, rows):
        return imbalance(choose(logits[rows], is_token[rows], 2), "global", whole)

    def of_parts(logits):
        return of(logits, slice(0, 1)) + of(logits, slice(1, None))

    def of_batch(logits):
        return imbalance(choose(logits, is_token, 2), "global")

    np.testing.assert_allclose(of_parts(logits), of_batch(logits), rtol=1e-6)
    slopes = jax.grad(of_parts)(logits)
    np.testing.assert_allclose(slopes, jax.grad(of_batch)(logits), rtol=1e-5, atol=1e-7)
    unknowing = imbalance(choose(logits[:1], is_token[:1], 2), "global")
    assert abs(unknowing - of(logits, slice(0, 1))) > 1e-3


def test_z_is_its_equation_without_padding():
    logits, is_token, _ = drawn()
    real = np.asarray(logits, np.float64)[np.asarray(is_token)]
    expected = (np.log(np.exp(real).sum(-1)) ** 2).sum()
    np.testing.assert_allclose(z_of(logits, is_token), expected, rtol=1e-6)


@pytest.mark.long
@given(
    st.integers(0, 2**16),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 9),
)
def test_an_expert_takes_the_first_choices_of_each_row(seed, rows, length, choices, capacity):
    rng = np.random.default_rng(seed)
    experts = rng.integers(0, E + 1, (rows, length, choices))
    kept = within_capacity(jnp.asarray(experts), E, capacity)
    dropped = 0
    for row in range(rows):
        taken = [0] * E
        for token, choice in np.ndindex(length, choices):
            expert = experts[row, token, choice]
            if expert < E and taken[expert] < capacity:
                assert kept.experts[row, token, choice] == expert
                assert kept.places[row, token, choice] == taken[expert]
                taken[expert] += 1
            else:
                assert kept.experts[row, token, choice] == E
                dropped += expert < E
    assert float(kept.dropped.total) == dropped
    assert float(kept.dropped.weight) == (experts < E).sum()


@pytest.mark.long
def test_what_comes_later_in_a_row_drops_nothing_before_it():
    logits, _, _ = drawn()
    experts = choose(logits, jnp.ones((B, T), bool), 2).experts
    whole = within_capacity(experts, E, 3)
    for length in (1, 5, 11):
        part = within_capacity(experts[:, :length], E, 3)
        np.testing.assert_array_equal(part.experts, whole.experts[:, :length])


@pytest.mark.parametrize(
    ("length", "choices", "experts", "factor", "capacity"),
    [
        (16, 2, 8, 1.0, 4),
        (16, 2, 8, 1.25, 5),
        (10, 1, 8, 1.0, 2),
        (4, 2, 8, 100.0, 4),
        (1, 1, 8, 0.1, 1),
        (100, 1, 10, 1.1, 11),
    ],
)
def test_a_capacity_is_so_many_equal_shares(length, choices, experts, factor, capacity):
    assert capacity_of(length, choices, experts, factor) == capacity


@pytest.mark.parametrize("noise", ["gaussian", "gumbel"])
def test_noise_has_its_deviation_and_is_a_rows_own(noise):
    keys = jax.random.split(jax.random.key(0), 4)
    logits = jnp.zeros((4, 500, E))
    drawn = with_noise(logits, keys, noise, 0.5)
    deviation = {"gaussian": 1.0, "gumbel": np.pi / np.sqrt(6)}[noise]
    np.testing.assert_allclose(np.std(drawn), 0.5 * deviation, rtol=0.05)
    alone = with_noise(logits[2:3], keys[2:3], noise, 0.5)
    np.testing.assert_array_equal(drawn[2:3], alone)
    assert (drawn[0] != drawn[1]).any()
    np.testing.assert_array_equal(with_noise(logits, keys, noise, jnp.zeros(4)), logits)


def test_with_gumbel_noise_the_best_expert_is_a_draw_from_the_softmax():
    logits = jnp.broadcast_to(jnp.arange(E, dtype=jnp.float32) / 2, (1, 20_000, E))
    noisy = with_noise(logits, jax.random.split(jax.random.key(1), 1), "gumbel", 1.0)
    found = np.bincount(np.asarray(noisy.argmax(-1)).ravel(), minlength=E) / 20_000
    np.testing.assert_allclose(found, softmax(np.arange(E) / 2), atol=0.015)


def test_jitter_is_a_factor_near_1():
    x = jnp.full((2, 300, 5), 3.0)
    found = jittered(x, jax.random.split(jax.random.key(0), 2), 0.1)
    assert 2.7 <= found.min() < 2.71
    assert 3.29 < found.max() <= 3.3
