"""Scaling of rotary positions for longer contexts: frequencies that do not depend on the length of
a row, and the factors of cos and sin. No jax here.

Source: modeling_rope_utils.py of transformers 5, which computes them for Hugging Face checkpoints.
"""

import math

import numpy as np

# This keeps the two bounds of YaRN's blend apart if they are the same pair.
_LEAST_WIDTH = 0.001


def linear_frequencies(frequencies: np.ndarray, factor: float) -> np.ndarray:
    """Stretch every wavelength by `factor`.

    Args:
        frequencies: [H / 2] radians a token.
        factor: stretch of the wavelengths.

    Source: Chen et al. 2023, https://arxiv.org/abs/2306.15595
    """
    return (frequencies / factor).astype(np.float32)


def yarn_frequencies(
    frequencies: np.ndarray,
    theta: float,
    factor: float,
    original_length: int,
    beta_fast: float,
    beta_slow: float,
    truncate: bool,
) -> np.ndarray:
    """Stretch long wavelengths by `factor`, keep short ones, and blend in between, pair by pair.

    Args:
        frequencies: [H / 2] radians a token.
        theta: base of the frequencies, above 1.
        factor: stretch of the long wavelengths.
        original_length: context of the unstretched model, tokens.
        beta_fast: pairs with more turns than this in the original length are kept.
        beta_slow: pairs with fewer turns than this are stretched fully.
        truncate: whether the blend begins and ends at whole pairs, rounded outwards.

    Source: Peng et al. 2023, https://arxiv.org/abs/2309.00071
    """
    pairs = len(frequencies)
    first = _pair_with_turns(beta_fast, pairs, theta, original_length)
    last = _pair_with_turns(beta_slow, pairs, theta, original_length)
    if truncate:
        first = math.floor(first)
        last = math.ceil(last)
    first = max(first, 0)
    # The bound is that of the head's dims, not of its pairs, as in the published code.
    last = min(last, 2 * pairs - 1)
    if first == last:
        last += _LEAST_WIDTH
    stretch = np.clip((np.arange(pairs) - first) / (last - first), 0.0, 1.0)
    stretched = frequencies / factor * stretch
    kept = frequencies * (1 - stretch)
    return (stretched + kept).astype(np.float32)


def _pair_with_turns(turns: float, pairs: int, theta: float, length: int) -> float:
    """Return the fractional index of the pair that rotates this often in `length` tokens."""
    return pairs * math.log(length / (turns * 2 * math.pi)) / math.log(theta)


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """Return YaRN's factor of cos and sin: 0.1 ln(factor) + 1.

    With both `mscale` and `mscale_all_dim`, return the ratio of `yarn_scale` with each of them.
    """
    if mscale is None or mscale_all_dim is None:
        return yarn_scale(factor, 1.0)
    return yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all_dim)


def yarn_scale(factor: float, mscale: float) -> float:
    """Return 0.1 mscale ln(factor) + 1; 1 if nothing is stretched."""
    if factor <= 1:
        return 1.0
    return 0.1 * mscale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_length: int) -> float:
    """Return LongRoPE's factor of cos and sin: sqrt(1 + ln(factor) / ln(original_length)).

    Args:
        factor: ratio of the context to the original one; up to 1: the result is 1.
        original_length: context of the unstretched model, tokens; above 1.

    Source: Ding et al. 2024, https://arxiv.org/abs/2402.13753
    """
    if factor <= 1:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_length))
