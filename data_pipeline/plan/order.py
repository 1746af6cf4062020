"""Order and shares: keyed permutations, and mixtures that are exact in every prefix. Pure
arithmetic on numbers of rows.

* `permute`: draw d of an epoch is row `permute(d)`; keyed by (seed, source uid, epoch) alone, so
  neither other sources nor batch size nor hosts change it.
* `prefix_counts`: integer weights over 2^20 split the first k rows among sources exactly; each
  count is monotone in k and within 2 rows of its share.
"""

import functools
import hashlib
import math

import numpy as np

# So that a count of rows times a weight stays inside an int64.
MAX_ROWS = 1 << 42
_WEIGHT_UNIT = 1 << 20
_ROUNDS = 8


def integer_weights(weights: list[float]) -> tuple[int, ...]:
    """Positive weights as integers of at least 1 that sum to 2^20; the largest takes what rounding
    leaves."""
    largest = max(weights)
    total = math.fsum(w / largest for w in weights)
    result = [max(1, round(w / largest / total * _WEIGHT_UNIT)) for w in weights]
    result[weights.index(largest)] += _WEIGHT_UNIT - sum(result)
    return tuple(result)


def prefix_counts(count, weights: tuple[int, ...]) -> list:
    """Return how many of the first `count` rows belong to each source: exact, and monotone in
    `count`.

    Each source in turn takes its share of what the sources before it left, rounded to the nearest
    row; what is left grows by 0 or 1 per row, so exactly one source's count does.
    `count` is an int, or int64 array, at most 2^42; `weights` sum to 2^20; the result has one such
    count per source.
    """
    remaining = sum(weights)
    left = count
    counts = []
    for weight in weights[:-1]:
        rest = (left * (remaining - weight) + remaining // 2) // remaining
        counts.append(left - rest)
        left = rest
        remaining -= weight
    counts.append(left)
    return counts


@functools.lru_cache(maxsize=4096)
def round_keys(seed: int, uid: str, epoch: int) -> np.ndarray:
    """Keys of the permutation of one epoch of one source, uint64 [8]. Hashed, so (seed 7, epoch 1)
    is unrelated to (8, 0)."""
    identity = f"perm | {seed} | {uid} | {epoch}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, "<u8")


def splitmix64(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: uint64 in, uint64 out, well mixed."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def permute(position: np.ndarray, length: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Keyed bijection of [0, length): a balanced Feistel network on the next even power of two,
    walked until inside.

    Takes int64 [n] positions, each below its length, int64 [n] lengths up to 2^42, and uint64 [n,
    8] keys of `round_keys`.

    Source: Black and Rogaway, "Ciphers with Arbitrary Finite Domains" (2002); splitmix64 finaliser
        as the round function.
    """
    # frexp gives the exact bit length of whole numbers below 2^53.
    _, bits = np.frexp(length - 1.0)
    half = ((np.maximum(2, bits) + 1) // 2).astype(np.uint64)
    mask = (np.uint64(1) << half) - np.uint64(1)
    bound = length.astype(np.uint64)
    keys = keys.T
    result = np.array(position, np.uint64)
    todo = np.arange(result.size)
    x = result
    while todo.size:
        left = x >> half
        right = x & mask
        for key in keys:
            mixed = left ^ (splitmix64(right ^ key) & mask)
            left = right
            right = mixed
        x = (left << half) | right
        result[todo] = x
        # What fell outside goes through the network again.
        outside = np.flatnonzero(x >= bound)
        todo = todo[outside]
        x = x[outside]
        half = half[outside]
        mask = mask[outside]
        bound = bound[outside]
        keys = keys[:, outside]
    return result.astype(np.int64)
