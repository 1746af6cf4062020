"""Corrupted inputs: some tokens, or spans of them, that the model reads are replaced; what it is to
predict stays as it is.

Which ones is a pure function of (seed, source, epoch, row), so a row is corrupted alike on any
host, and otherwise in the next epoch. Spans begin anywhere with equal probability, may overlap, and
have geometric lengths; the probability is chosen so that the expected share of corrupted positions
is exactly `rate`, at a row's first position as much as in its middle.

Source: random replacement as in Xie et al., "Data Noising as Smoothing in Neural Network Language
Models" (2017); spans with geometric lengths as in Joshi et al., "SpanBERT" (2020).
"""

import functools
import hashlib
import math

import numpy as np

from data_pipeline.config import CorruptionConfig
from data_pipeline.plan.order import splitmix64

# Odd, so that numbers of positions are spread over all of 2^64.
_STEP = np.uint64(0x9E3779B97F4A7C15)
# Mean lengths before a row from which its first positions may still be corrupted: all but 1e-17 of
# the spans that reach into it.
_REACH = 40


@functools.lru_cache(maxsize=4096)
def row_seed(seed: int, uid: str, epoch: int) -> int:
    """Return the random seed of the rows in one epoch of one source, uint64."""
    identity = f"corruption | {seed} | {uid} | {epoch}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@functools.lru_cache(maxsize=64)
def start_probability(rate: float, span: float) -> float:
    """Probability that a span begins at a position, so that a share `rate` is covered by spans of
    mean length `span`.

    A position is free if no span that began j positions before it is longer than j: the product
    over j of 1 - p * (1 - 1 / span)^j is 1 - rate.
    """
    stay = 1.0 - 1.0 / span
    reach = stay ** np.arange(math.ceil(_REACH * span))

    def covered(p: float) -> float:
        return -math.expm1(np.log1p(-p * reach).sum())

    # By halves, until there is no number between the two.
    low = 0.0
    high = rate
    while True:
        middle = (low + high) / 2
        if middle in (low, high):
            return high
        if covered(middle) < rate:
            low = middle
        else:
            high = middle


def corrupted(
    seeds: np.ndarray, rows: np.ndarray, length: int, config: CorruptionConfig
) -> np.ndarray:
    """Return the positions of rows that are corrupted, bool [b, T], from the `row_seed` of each
    row, uint64 [b], and its number in the epoch, int64 [b].
    """
    probability = start_probability(config.rate, config.span)
    if config.span == 1:
        return _uniform(seeds, rows, length, 0) < probability
    # Spans that begin before a row may reach into it.
    before = math.ceil(_REACH * config.span)
    begins = _uniform(seeds, rows, before + length, 0) < probability
    sizes = _uniform(seeds, rows, before + length, 1)
    lengths = 1 + np.floor(np.log1p(-sizes) / math.log1p(-1.0 / config.span))
    positions = np.arange(before + length)
    ends = np.where(begins, positions + lengths, 0.0)
    covered = np.maximum.accumulate(ends, axis=1) > positions
    return covered[:, before:]


def corrupt(
    inputs: np.ndarray,
    seeds: np.ndarray,
    rows: np.ndarray,
    length: int,
    columns: slice,
    config: CorruptionConfig,
    vocab_size: int,
    keep: np.ndarray,
) -> None:
    """Replaces input ids int32 [b, t], in place, but for those where `keep`, bool [b, t]: begin
    marks and padding.

    They are `columns` of rows of `length` tokens; seeds and rows as in `corrupted`.
    """
    where = corrupted(seeds, rows, length, config)[:, columns] & ~keep
    if config.token_id is not None:
        inputs[where] = config.token_id
    else:
        drawn = _uniform(seeds, rows, length, 2)[:, columns] * vocab_size
        inputs[where] = drawn.astype(np.int32)[where]


def _uniform(seeds: np.ndarray, rows: np.ndarray, length: int, stream: int) -> np.ndarray:
    """Numbers in [0, 1), float64 [b, length], of an independent stream for each purpose."""
    row = splitmix64(seeds + rows.astype(np.uint64) * _STEP)[:, None]
    number = np.arange(length, dtype=np.uint64) * np.uint64(4) + np.uint64(stream + 1)
    bits = splitmix64(row ^ splitmix64(number * _STEP))
    return (bits >> np.uint64(11)) * 2.0**-53
