"""Rotary rotation of the tokens of a batch, as a `RopeSpec` describes it."""

import numpy as np
from jaxtyping import Array, Float, Int

from maxtrain.models.context import Rotation
from maxtrain.models.specs import RopeSpec
from maxtrain.ops.rope import (
    dynamic_frequencies,
    llama3_frequencies,
    longrope_frequencies,
    rope_frequencies,
    rope_tables,
)
from maxtrain.ops.rope_scaling import linear_frequencies, yarn_frequencies


def rotation_of(
    rope: RopeSpec, positions: Int[Array, "B T"], lengths: Int[Array, " B"]
) -> Rotation:
    """Return the rotation of each token.

    With the scalings "dynamic" and "longrope" the frequencies of a row depend on its length, and
    other rows do not matter. The documents of a packed row have the frequencies of the longest of
    them. During generation the newest token determines the length, and keys that are already
    rotated stay as they are.

    Args:
        rope: the rotary positions.
        positions: positions of the tokens.
        lengths: lengths of the rows, from `row_lengths`.
    """
    if rope.follows_length:
        frequencies = _frequencies_of_rows(rope, lengths)[:, None, :]
    else:
        frequencies = _frequencies(rope)
    cos, sin = rope_tables(positions, frequencies, rope.attention_factor)
    return Rotation(cos, sin)


def _frequencies(rope: RopeSpec) -> np.ndarray:
    """Return the frequencies [H / 2] in radians per token of a scaling that does not depend on
    lengths."""
    frequencies = rope_frequencies(rope.head_dim, rope.theta)
    if rope.scaling == "linear":
        return linear_frequencies(frequencies, rope.factor)
    if rope.scaling == "llama3":
        return llama3_frequencies(
            frequencies,
            rope.factor,
            rope.low_freq_factor,
            rope.high_freq_factor,
            rope.original_length,
        )
    if rope.scaling == "yarn":
        return yarn_frequencies(
            frequencies,
            rope.theta,
            rope.factor,
            rope.original_length,
            rope.beta_fast,
            rope.beta_slow,
            rope.truncate,
        )
    if rope.scaling == "none":
        return frequencies
    raise AssertionError(f"rope_scaling={rope.scaling} has no frequencies")


def _frequencies_of_rows(rope: RopeSpec, lengths: Int[Array, " B"]) -> Float[Array, "B F"]:
    """Return the frequencies of each row in radians per token, of a scaling that depends on
    lengths."""
    frequencies = rope_frequencies(rope.head_dim, rope.theta)
    if rope.scaling == "dynamic":
        return dynamic_frequencies(frequencies, rope.factor, rope.original_length, lengths)
    if rope.scaling != "longrope":
        raise AssertionError(f"rope_scaling={rope.scaling} has no frequencies of rows")
    return longrope_frequencies(
        frequencies, rope.short_factors, rope.long_factors, rope.original_length, lengths
    )
