"""Sampling of tokens: as often as their probability, each row by its own settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from data_pipeline.base.errors import UsageError
from maxtrain.inference.sampling import History, Sampling, SamplingArrays, SamplingProgram, choose

DRAWS = 4000
WEIGHTS = np.array([0.15, 0.1, 0.4, 0.05, 0.3])


def chosen(rows, logits, keys=None, seen=None, counts=None, bias=None):
    """Return the sampled token of each row, by its own settings and its own logits."""
    vocab_size = logits.shape[-1]
    program = SamplingProgram.for_rows(rows, vocab_size)
    settings = SamplingArrays.of(rows, vocab_size)
    if keys is None:
        keys = jax.random.split(jax.random.key(0), len(rows))
    history = None
    if seen is not None:
        if counts is None:
            counts = jnp.zeros(seen.shape, jnp.int32)
        history = History(seen, counts)
    if bias is not None:
        bias = jnp.asarray(bias, jnp.float32)
    return choose(jnp.asarray(logits, jnp.float32), settings, keys, program, history, bias)


def frequencies(sampling, weights):
    logits = np.tile(np.log(weights), (DRAWS, 1))
    tokens = chosen([sampling] * DRAWS, logits).tokens
    return np.bincount(np.asarray(tokens), minlength=len(weights)) / DRAWS


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 3}, [0, 2, 4]),
        ({"top_p": 0.7}, [2, 4]),  # 0.4 + 0.3
        ({"top_p": 0.71}, [0, 2, 4]),
        ({"top_k": 2, "top_p": 0.5}, [2]),  # 0.4 of the 0.7 that are left
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"temperature": 0.5}, [0, 1, 2, 3, 4]),
        ({"top_p": 1e-6}, [2]),
        ({"top_p": 1e-50}, [2]),  # 0 in float32
        ({"temperature": 0.001}, [2]),
        ({"min_p": 0.3}, [0, 2, 4]),  # at least 0.12
        ({"min_p": 1.0}, [2]),
        ({"min_p": 0.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 4, "min_p": 0.5}, [2, 4]),
        # After the temperature the second is 0.5625 of the first, and the third 0.14.
        ({"temperature": 0.5, "min_p": 0.2}, [2, 4]),
    ],
)
def test_tokens_come_as_often_as_their_probability_says(options, kept):
    sampling = Sampling(**{"temperature": 1.0, **options})
    expected = np.where(np.isin(np.arange(5), kept), WEIGHTS / 0.4, 0)
    expected = expected ** (1 / sampling.temperature)
    found = frequencies(sampling, WEIGHTS)
    np.testing.assert_allclose(found, expected / expected.sum(), atol=0.03)
    assert set(np.flatnonzero(found)) == set(kept)


def test_ties_go_to_the_first():
    even = np.full(7, 1 / 7)
    assert frequencies(Sampling(1.0, top_k=1), even)[0] == 1
    assert frequencies(Sampling(0.0), even)[0] == 1


@pytest.mark.long
@pytest.mark.parametrize("vocab_size", [5, pytest.param(300, marks=pytest.mark.long)])
def test_a_row_is_the_same_beside_rows_of_any_settings(vocab_size):
    """Alone and together, tokens are the same, and log-probabilities to rounding."""
    kinds = [
        Sampling(0.0),
        Sampling(1.0),
        Sampling(0.7, top_k=3),
        Sampling(1.3, top_p=0.8),
        Sampling(1.0, min_p=0.2),
        Sampling(1.0, repetition_penalty=1.5),
        Sampling(0.0, repetition_penalty=5.0),
        Sampling(0.9, top_k=40, top_p=0.9, min_p=0.01),
    ]
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((len(kinds), vocab_size)) * 2
    keys = jax.random.split(jax.random.key(3), len(kinds))
    seen = jnp.asarray(rng.random((len(kinds), vocab_size)) < 0.4)
    together = chosen(kinds, logits, keys, seen)
    for row, kind in enumerate(kinds):
        one = slice(row, row + 1)
        alone = chosen([kind], logits[one], keys[one], seen[one])
        assert alone.tokens[0] == together.tokens[row], kind
        np.testing.assert_allclose(alone.logprobs[0], together.logprobs[row], atol=1e-6)


def test_log_probabilities_are_those_of_what_was_drawn_from():
    logits = np.log(WEIGHTS)[None]
    greedy = chosen([Sampling(0.0)], logits)
    np.testing.assert_allclose(greedy.logprobs, np.log([0.4]), atol=1e-6)
    one_of_two = chosen([Sampling(1.0, top_k=2)], logits)
    of_two = {2: 0.4 / 0.7, 4: 0.3 / 0.7}
    expected = np.log(of_two[int(one_of_two.tokens[0])])
    np.testing.assert_allclose(one_of_two.logprobs, [expected], atol=1e-6)
    warm = chosen([Sampling(2.0)], logits)
    roots = np.sqrt(WEIGHTS)
    expected = np.log(roots[int(warm.tokens[0])] / roots.sum())
    np.testing.assert_allclose(warm.logprobs, [expected], atol=1e-6)


def test_a_penalty_makes_what_was_there_less_likely():
    """Positive logits are divided, negative ones multiplied."""
    logits = np.array([[2.0, 1.5, -1.0, 0.0]])
    seen = jnp.asarray([[True, False, True, False]])
    sampling = Sampling(0.0, repetition_penalty=2.0)
    found = chosen([sampling], logits, seen=seen)
    assert found.tokens[0] == 1
    penalised = np.array([1.0, 1.5, -2.0, 0.0])
    expected = 1.5 - np.log(np.exp(penalised).sum())
    np.testing.assert_allclose(found.logprobs, [expected], atol=1e-6)


def slow_logits(logits, sampling, prompt, new, bias):
    """The logits of one row after penalties and bias, token by token."""
    found = []
    for token, logit in enumerate(logits):
        if token in prompt or token in new:
            if logit > 0:
                logit = logit / sampling.repetition_penalty
            else:
                logit = logit * sampling.repetition_penalty
        count = new.count(token)
        logit -= count * sampling.frequency_penalty
        if count > 0:
            logit -= sampling.presence_penalty
        found.append(logit + bias[token])
    return np.array(found)


def test_penalties_biases_and_likeliest_tokens_are_those_of_a_slow_version():
    """Rows with any of them in one batch, some of whose tokens must not come."""
    rng = np.random.default_rng(1)
    vocab_size = 30
    kinds = [
        Sampling(0.0, top_logprobs=3),
        Sampling(0.0, presence_penalty=1.5, top_logprobs=20),
        Sampling(0.0, frequency_penalty=0.7, top_logprobs=1),
        Sampling(0.0, frequency_penalty=-2.0, presence_penalty=-2.0, top_logprobs=5),
        Sampling(0.0, repetition_penalty=1.7, frequency_penalty=0.3, presence_penalty=0.2),
        Sampling(0.7, repetition_penalty=0.6, frequency_penalty=0.3, top_logprobs=4),
        Sampling(1.0, top_k=4, presence_penalty=0.4, top_logprobs=20),
    ]
    shape = (len(kinds), vocab_size)
    logits = rng.standard_normal(shape) * 2
    prompts = [rng.integers(0, vocab_size, 6).tolist() for _ in kinds]
    news = [rng.integers(0, vocab_size, number).tolist() for number in range(0, 35, 5)]
    bias = rng.choice([0.0, 1.5, -3.0, -np.inf], shape)
    seen = np.zeros(shape, bool)
    counts = np.zeros(shape, np.int32)
    for row, (prompt, new) in enumerate(zip(prompts, news)):
        seen[row, prompt + new] = True
        np.add.at(counts[row], new, 1)
    found = chosen(kinds, logits, None, jnp.asarray(seen), jnp.asarray(counts), bias)
    for row, kind in enumerate(kinds):
        expected = slow_logits(logits[row], kind, prompts[row], news[row], bias[row])
        expected = expected / (kind.temperature or 1.0)
        if kind.top_k:
            expected[expected < np.sort(expected)[-kind.top_k]] = -np.inf
        logprobs = expected - np.log(np.exp(expected).sum())
        token = int(found.tokens[row])
        if kind.temperature == 0:
            assert token == logprobs.argmax()
        assert np.isfinite(logprobs[token])
        np.testing.assert_allclose(found.logprobs[row], logprobs[token], atol=1e-5)
        best = np.sort(logprobs)[::-1][:20]
        np.testing.assert_allclose(found.top.logprobs[row], best, atol=1e-5)
        finite = np.isfinite(best)
        tokens = np.asarray(found.top.tokens[row])[finite]
        np.testing.assert_allclose(logprobs[tokens], best[finite], atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"presence_penalty": 2.1}, "presence_penalty=2.1 must be from -2 to 2"),
        ({"frequency_penalty": float("nan")}, "frequency_penalty=nan must be from -2 to 2"),
        ({"logit_bias": ((1, 101.0),)}, "logit_bias=101.0 of token 1 must be from -100"),
        ({"top_logprobs": 21}, "top_logprobs=21 must be from 0 to 20"),
        ({"temperature": -1.0}, "temperature=-1.0 must be 0 or a number of at least"),
        ({"temperature": 1e-9}, "temperature=1e-09 must be 0 or"),
        ({"temperature": float("nan")}, "temperature=nan must be 0 or"),
        ({"temperature": float("inf")}, "temperature=inf must be 0 or"),
        ({"top_k": 0}, "top_k=0 must be at least 1"),
        ({"top_p": 0.0}, "top_p=0.0 must be above 0"),
        ({"top_p": 1.1}, "top_p=1.1 must be above 0 and at most 1"),
        ({"min_p": -0.1}, "min_p=-0.1 must be at least 0"),
        ({"min_p": float("nan")}, "min_p=nan must be at least 0"),
        ({"repetition_penalty": 0.0}, "repetition_penalty=0.0 must be from 0.001"),
        ({"repetition_penalty": 1e-46}, "repetition_penalty=1e-46 must be from 0.001"),
        ({"repetition_penalty": float("inf")}, "repetition_penalty=inf must be from 0.001"),
    ],
)
def test_settings_outside_their_range_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        Sampling(**options)
