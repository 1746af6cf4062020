"""Rotary position embeddings, in float32.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, in the layout of Hugging Face checkpoints:
    the two halves of a head are rotated against each other, not neighbouring pairs.
"""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Radians a token, [H / 2] float32: theta ** (-2 i / H)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return (1.0 / theta**exponents).astype(np.float32)


def llama3_frequencies(
    frequencies: np.ndarray,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> np.ndarray:
    """Stretches long wavelengths by `factor`, keeps short ones, and blends between.

    Args:
        frequencies: [H / 2] radians a token.
        factor: stretch of the long wavelengths.
        low_freq_factor: wavelengths over original_length / low_freq_factor are stretched fully.
        high_freq_factor: wavelengths under original_length / high_freq_factor are kept.
        original_length: context of the unstretched model, tokens.

    Source: Llama 3.1's reference code.
    """
    wavelength = 2 * math.pi / frequencies
    blend = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    stretched = (1 - blend) * frequencies / factor
    kept = blend * frequencies
    return (stretched + kept).astype(np.float32)


def rope_tables(
    positions: Int[Array, "B T"], frequencies: np.ndarray
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """cos and sin of position times frequency, [B, T, H / 2] float32; made once and used by every
    layer."""
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T F"], sin: Float[Array, "B T F"]
) -> Float[Array, "B T N H"]:
    """Rotates every head by its position; x any float type, result float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = cos[:, :, None, :]
    sin = sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
