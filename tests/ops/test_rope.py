"""Rotary embeddings against complex numbers; the stretched frequencies against the published
loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.ops.rope import apply_rope, llama3_frequencies, rope_frequencies, rope_tables

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
