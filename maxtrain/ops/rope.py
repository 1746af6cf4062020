"""Rotary position embeddings, in float32.

Source: Su et al. 2021, https://arxiv.org/abs/2104.09864, in the layout of Hugging Face checkpoints:
    the two halves of a head are rotated against each other, not neighbouring pairs.
"""

import math
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int


def rope_frequencies(head_dim: int, theta: float) -> np.ndarray:
    """Return the radians per token, [H / 2] float32: theta ** (-2 i / H)."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / head_dim
    return (1.0 / theta**exponents).astype(np.float32)


def llama3_frequencies(
    frequencies: np.ndarray,
    factor: float,
    low_freq_factor: float,
    high_freq_factor: float,
    original_length: int,
) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between.

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


def row_lengths(positions: Int[Array, "B T"], is_token: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """Return the length of each row: its largest position plus 1. Padding is ignored; a row of
    padding alone has length 1."""
    return jnp.max(jnp.where(is_token, positions, 0), axis=1) + 1


def dynamic_frequencies(
    frequencies: np.ndarray, factor: float, original_length: int, lengths: Int[Array, " B"]
) -> Float[Array, "B F"]:
    """Return frequencies of each row, whose base grows with the row beyond the original length.

    Up to the original length they are `frequencies`, bit for bit. The base is multiplied by growth
    ** (H / (H - 2)), so that the last pair is stretched by the whole growth, and the first pair not
    at all.

    Args:
        frequencies: [H / 2] radians a token.
        factor: the growth is 1 + factor * (length / original_length - 1).
        original_length: context of the unstretched model, tokens.
        lengths: lengths of the rows, tokens.

    Source: "NTK-aware" scaling, as in modeling_rope_utils.py of transformers 5
    """
    pairs = len(frequencies)
    # A single pair is not stretched.
    share = np.arange(pairs, dtype=np.float32) / max(pairs - 1, 1)
    beyond = jnp.maximum(lengths - original_length, 0).astype(jnp.float32) / original_length
    growth = 1 + factor * beyond
    stretched = frequencies * growth[:, None] ** -share
    return jnp.where((lengths > original_length)[:, None], stretched, frequencies)


def longrope_frequencies(
    frequencies: np.ndarray,
    short_factors: Sequence[float],
    long_factors: Sequence[float],
    original_length: int,
    lengths: Int[Array, " B"],
) -> Float[Array, "B F"]:
    """Return frequencies of each row, with every pair's wavelength stretched by its own factor.

    Args:
        frequencies: [H / 2] radians a token.
        short_factors: H / 2, for rows up to the original length.
        long_factors: H / 2, for longer rows.
        original_length: context of the unstretched model, tokens.
        lengths: lengths of the rows, tokens.

    Source: Ding et al. 2024, https://arxiv.org/abs/2402.13753
    """
    short = frequencies / np.asarray(short_factors, np.float32)
    long = frequencies / np.asarray(long_factors, np.float32)
    return jnp.where((lengths > original_length)[:, None], long, short)


def rope_tables(
    positions: Int[Array, "B T"],
    frequencies: np.ndarray | Float[Array, "B 1 F"],
    attention_factor: float = 1.0,
) -> tuple[Float[Array, "B T F"], Float[Array, "B T F"]]:
    """Return cos and sin of position times frequency, [B, T, H / 2] float32; computed once for all
    layers.

    Args:
        positions: positions of the tokens.
        frequencies: [H / 2] radians a token, or [B, 1, H / 2] for each row.
        attention_factor: factor of both; scores grow with its square.
    """
    angle = positions.astype(jnp.float32)[..., None] * frequencies
    cos = jnp.cos(angle)
    sin = jnp.sin(angle)
    if attention_factor != 1.0:
        cos = cos * attention_factor
        sin = sin * attention_factor
    return cos, sin


def apply_rope(
    x: Float[Array, "B T N H"], cos: Float[Array, "B T F"], sin: Float[Array, "B T F"]
) -> Float[Array, "B T N H"]:
    """Rotate every head by its position; x has any float type, the result is float32."""
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos = cos[:, :, None, :]
    sin = sin[:, :, None, :]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
