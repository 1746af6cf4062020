"""Rotary embeddings against complex numbers; stretched frequencies against the published formulas,
in Python's floats."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.models.rotation import rotation_of
from maxtrain.models.specs import RopeSpec
from maxtrain.ops.rope import (
    apply_rope,
    llama3_frequencies,
    rope_frequencies,
    rope_tables,
    row_lengths,
)
from maxtrain.ops.rope_scaling import (
    linear_frequencies,
    longrope_attention_factor,
    yarn_attention_factor,
    yarn_frequencies,
)

H, THETA = 16, 10_000.0
FREQUENCIES = np.array([THETA ** (-2 * i / H) for i in range(H // 2)])


@jax.jit
def rotate(x, positions):
    return apply_rope(x, *rope_tables(positions.astype(jnp.int32), rope_frequencies(H, THETA)))


def rotate_complex(x, positions):
    """The two halves of a head are the real and imaginary parts of H / 2 numbers, each turned by
    position * frequency."""
    x = np.asarray(x, np.float64)
    turned = x[..., : H // 2] + 1j * x[..., H // 2 :]
    turned = turned * np.exp(1j * positions[..., None, None] * FREQUENCIES)
    return np.concatenate([turned.real, turned.imag], axis=-1)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_is_a_rotation_of_complex_numbers_and_its_gradient_the_rotation_back(dtype):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 6, 3, H)), dtype)
    g = rng.standard_normal(x.shape).astype(np.float32)
    positions = np.array([[0, 1, 2, 0, 1, 2], [0, 7, 100, 1000, 1001, 8191]])
    out, vjp = jax.vjp(lambda x: rotate(x, positions), x)
    assert out.dtype == jnp.float32
    # Frequency and angle are float32: at 8191 radians each is off by up to 8191 * 2**-24 = 5e-4.
    np.testing.assert_allclose(out, rotate_complex(x, positions), atol=2e-3)
    np.testing.assert_allclose(out[0], rotate_complex(x, positions)[0], atol=1e-6)
    (dx,) = vjp(jnp.asarray(g))
    assert dx.dtype == dtype
    tolerance = 1e-6 if dtype == jnp.float32 else 2.0**-6
    np.testing.assert_allclose(
        np.asarray(dx[0], np.float64), rotate_complex(g, -positions)[0], atol=tolerance
    )


def test_frequencies_equal_the_definition():
    frequencies = rope_frequencies(H, THETA)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, FREQUENCIES, rtol=1e-6)


@pytest.mark.every_dose
@pytest.mark.long
@settings(deadline=None, max_examples=50)
@given(
    i=st.integers(0, 500), j=st.integers(0, 500), shift=st.integers(0, 500), seed=st.integers(0, 99)
)
def test_scores_depend_on_the_distance_only(i, j, shift, seed):
    q, k = np.random.default_rng(seed).standard_normal((2, 1, 1, 1, H)).astype(np.float32)
    q, k = q / np.linalg.norm(q), k / np.linalg.norm(k)
    i, j = np.array([[[i]], [[j]]])
    here = (rotate(q, i) * rotate(k, j)).sum()
    there = (rotate(q, i + shift) * rotate(k, j + shift)).sum()
    # Four angles of at most 1000 radians, each rounded to 2**-24 of itself: 2.4e-4 in the worst of
    # cases.
    np.testing.assert_allclose(here, there, atol=2.4e-4)


def published(frequencies, factor, low_freq_factor, high_freq_factor, original_length):
    """`apply_scaling` of Llama 3.1's reference code, term by term, in Python's floats."""
    low_wavelength, high_wavelength = (
        original_length / low_freq_factor,
        original_length / high_freq_factor,
    )
    scaled = []
    for frequency in map(float, frequencies):
        wavelength = 2 * math.pi / frequency
        if wavelength < high_wavelength:
            scaled.append(frequency)
        elif wavelength > low_wavelength:
            scaled.append(frequency / factor)
        else:
            smooth = (original_length / wavelength - low_freq_factor) / (
                high_freq_factor - low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / factor + smooth * frequency)
    return scaled


@settings(deadline=None, max_examples=50)
@given(
    head_dim=st.sampled_from([16, 64, 128]),
    theta=st.sampled_from([1e4, 5e5]),
    factor=st.floats(1, 64),
    low=st.floats(0.5, 2),
    width=st.floats(0.5, 8),
    length=st.sampled_from([512, 8192]),
)
def test_llama3_frequencies_equal_the_published_loop(head_dim, theta, factor, low, width, length):
    frequencies = rope_frequencies(head_dim, theta)
    scaled = llama3_frequencies(frequencies, factor, low, low + width, length)
    assert scaled.dtype == np.float32
    # Near the bounds the blend is steep in the wavelength's float32 rounding: 1e-5 of a frequency.
    np.testing.assert_allclose(
        scaled, published(frequencies, factor, low, low + width, length), rtol=1e-5
    )


def test_llama3_frequencies_keep_the_short_and_stretch_the_long():
    frequencies = rope_frequencies(128, 500_000.0)
    scaled = llama3_frequencies(frequencies, 8.0, 1.0, 4.0, 8192)
    assert (scaled[:29] == frequencies[:29]).all()
    assert (scaled[36:] == frequencies[36:] / 8).all()
    assert (np.diff(scaled) < 0).all()


def published_yarn(head_dim, theta, factor, length, fast, slow, truncate):
    """The paper's ramp, pair by pair: gamma is 1 where a wavelength is kept, 0 where it is
    stretched, and linear in the number of the pair between."""

    def pair_of(turns):
        """The pair whose wavelength fits `turns` times into the length: 2 pi theta ** (2 d / D) is
        length / turns."""
        return head_dim / 2 * math.log(length / (2 * math.pi * turns), theta)

    low, high = pair_of(fast), pair_of(slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = low + 0.001 if low == high else high
    scaled = []
    for d in range(head_dim // 2):
        frequency = theta ** (-2 * d / head_dim)
        gamma = 1 - min(max((d - low) / (high - low), 0), 1)
        scaled.append((1 - gamma) * frequency / factor + gamma * frequency)
    return scaled


@settings(deadline=None, max_examples=50)
@given(
    head_dim=st.sampled_from([2, 16, 64, 128]),
    theta=st.sampled_from([1e4, 150_000.0, 5e5]),
    factor=st.floats(1, 64),
    slow=st.floats(0.5, 4),
    width=st.floats(0.5, 60),
    length=st.sampled_from([16, 4096, 32_768]),
    truncate=st.booleans(),
)
def test_yarn_frequencies_equal_the_published_ramp(
    head_dim, theta, factor, slow, width, length, truncate
):
    frequencies = rope_frequencies(head_dim, theta)
    fast = slow + width
    scaled = yarn_frequencies(frequencies, theta, factor, length, fast, slow, truncate)
    assert scaled.dtype == np.float32
    expected = published_yarn(head_dim, theta, factor, length, fast, slow, truncate)
    np.testing.assert_allclose(scaled, expected, rtol=2e-6)


def test_yarn_keeps_the_short_and_stretches_the_long():
    """A head of 64, as in gpt-oss: base 150,000, 32 times 4,096 tokens, whole pairs or not."""
    frequencies = rope_frequencies(64, 150_000.0)
    scaled = yarn_frequencies(frequencies, 150_000.0, 32.0, 4096, 32.0, 1.0, True)
    # 64 ln(4096 / (32 * 2 pi)) / (2 ln 150,000) is 8.09, and with one turn it is 17.4.
    assert (scaled[:9] == frequencies[:9]).all() and scaled[9] < frequencies[9]
    np.testing.assert_array_equal(scaled[18:], frequencies[18:] / 32)
    assert scaled[17] > frequencies[17] / 32
    other = yarn_frequencies(frequencies, 150_000.0, 32.0, 4096, 32.0, 1.0, False)
    np.testing.assert_array_equal(other[18:], frequencies[18:] / 32)
    assert other[9] > scaled[9] and other[17] < scaled[17]


def test_published_attention_factors():
    assert yarn_attention_factor(32.0) == pytest.approx(0.1 * math.log(32) + 1, rel=1e-12)
    assert yarn_attention_factor(1.0) == yarn_attention_factor(0.5) == 1.0
    # DeepSeek V2: both 0.707, so that nothing is multiplied; and two that differ.
    assert yarn_attention_factor(40.0, 0.707, 0.707) == 1.0
    ratio = (0.1 * 2 * math.log(40) + 1) / (0.1 * 0.5 * math.log(40) + 1)
    assert yarn_attention_factor(40.0, 2.0, 0.5) == pytest.approx(ratio, rel=1e-12)
    assert yarn_attention_factor(32.0, 2.0, None) == yarn_attention_factor(32.0)
    # Phi 3: 128 Ki tokens after 4 Ki.
    assert longrope_attention_factor(32.0, 4096) == pytest.approx(math.sqrt(1 + 5 / 12))
    assert longrope_attention_factor(1.0, 4096) == 1.0


SHORT = (1.0, 1.0, 1.1, 1.2, 1.5, 2.0, 2.5, 3.0)
LONG = (1.0, 1.5, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0)
LENGTH = 32  # the original one
SPECS = {
    "none": RopeSpec(H, THETA),
    "linear": RopeSpec(H, THETA, "linear", factor=4.0),
    "dynamic": RopeSpec(H, THETA, "dynamic", factor=4.0, original_length=LENGTH),
    "llama3": RopeSpec(H, THETA, "llama3", original_length=LENGTH),
    "yarn": RopeSpec(H, THETA, "yarn", original_length=LENGTH, attention_factor=1.2),
    "longrope": RopeSpec(
        H,
        THETA,
        "longrope",
        original_length=LENGTH,
        attention_factor=1.5,
        short_factors=SHORT,
        long_factors=LONG,
    ),
}


def defined_frequencies(rope, length):
    """Return the frequencies of a row of this length, by definition."""
    if rope.scaling == "linear":
        return FREQUENCIES / rope.factor
    if rope.scaling == "dynamic":
        seen = max(length, LENGTH)
        growth = rope.factor * seen / LENGTH - (rope.factor - 1)
        base = THETA * growth ** (H / (H - 2))
        return np.array([base ** (-2 * i / H) for i in range(H // 2)])
    if rope.scaling == "llama3":
        return np.array(published(FREQUENCIES, 8.0, 1.0, 4.0, LENGTH))
    if rope.scaling == "yarn":
        return np.array(published_yarn(H, THETA, rope.factor, LENGTH, 32.0, 1.0, True))
    if rope.scaling == "longrope":
        return FREQUENCIES / (LONG if length > LENGTH else SHORT)
    return FREQUENCIES


@jax.jit
def tables(positions, is_token):
    return {
        name: rotation_of(rope, positions, row_lengths(positions, is_token))
        for name, rope in SPECS.items()
    }


LENGTHS_OF_ROWS = (1, LENGTH - 1, LENGTH, LENGTH + 1, 3 * LENGTH)


@pytest.mark.parametrize("scaling", SPECS)
@pytest.mark.parametrize("length", LENGTHS_OF_ROWS)
def test_a_row_is_rotated_as_defined_and_its_neighbours_do_not_matter(scaling, length):
    """Rows up to the original length and beyond it, in one batch and each alone; padding has
    positions as large as those of a whole row."""
    width = max(LENGTHS_OF_ROWS)
    positions = np.tile(np.arange(width, dtype=np.int32), (len(LENGTHS_OF_ROWS), 1))
    is_token = np.arange(width) < np.array(LENGTHS_OF_ROWS)[:, None]
    row = LENGTHS_OF_ROWS.index(length)
    cos, sin = tables(positions, is_token)[scaling]
    alone = tables(positions[row : row + 1, :length], is_token[row : row + 1, :length])[scaling]
    np.testing.assert_array_equal(cos[row, :length], alone.cos[0])
    np.testing.assert_array_equal(sin[row, :length], alone.sin[0])
    rope = SPECS[scaling]
    angle = np.arange(length)[:, None] * defined_frequencies(rope, length)
    # An angle of at most 95 radians, and its frequency, each rounded to 2**-24 of itself, and a
    # power in float32, which is off by a few of them.
    np.testing.assert_allclose(alone.cos[0], rope.attention_factor * np.cos(angle), atol=1e-4)
    np.testing.assert_allclose(alone.sin[0], rope.attention_factor * np.sin(angle), atol=1e-4)


def test_dynamic_grows_only_beyond_the_original_length():
    """Up to it nothing changes, in any bit. One token more changes all pairs but the first."""
    positions = np.arange(LENGTH + 1, dtype=np.int32)[None]
    full = tables(positions[:, :LENGTH], np.ones((1, LENGTH), bool))
    np.testing.assert_array_equal(full["dynamic"].sin, full["none"].sin)
    more = tables(positions, np.ones((1, LENGTH + 1), bool))
    slower = more["dynamic"].sin[0, 1] < more["none"].sin[0, 1]
    assert slower.tolist() == [False] + [True] * (H // 2 - 1)


def test_a_factor_of_1_is_none():
    frequencies = rope_frequencies(H, THETA)
    np.testing.assert_array_equal(linear_frequencies(frequencies, 1.0), frequencies)
    for truncate in (True, False):
        scaled = yarn_frequencies(frequencies, THETA, 1.0, LENGTH, 32.0, 1.0, truncate)
        np.testing.assert_allclose(scaled, frequencies, rtol=2e-7)
    scaled = llama3_frequencies(frequencies, 1.0, 1.0, 4.0, LENGTH)
    np.testing.assert_allclose(scaled, frequencies, rtol=2e-7)


def test_a_single_pair_is_not_stretched_by_a_growing_base():
    rope = RopeSpec(2, THETA, "dynamic", factor=4.0, original_length=4)
    positions = jnp.arange(9)[None]
    cos, _ = rotation_of(rope, positions, row_lengths(positions, positions >= 0))
    np.testing.assert_allclose(cos[0, :, 0], np.cos(np.arange(9)), atol=1e-6)


def test_the_length_of_a_row_is_that_of_its_longest_document():
    """A row of padding has length 1."""
    positions = jnp.array([[0, 1, 2, 0, 1, 5], [0, 1, 7, 0, 1, 2], [0, 1, 2, 3, 4, 5]])
    is_token = jnp.array([[1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0]]) > 0
    assert row_lengths(positions, is_token).tolist() == [3, 8, 1]


def test_factors_for_another_number_of_pairs_are_refused():
    with pytest.raises(ValueError, match=r"short_factors has 7 numbers, .* each of the 8 pairs"):
        RopeSpec(H, THETA, "longrope", short_factors=SHORT[1:], long_factors=LONG)
