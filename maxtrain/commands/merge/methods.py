"""Merge methods for the same tensor of several models; numpy, float32, sums in float64.

Every function takes arrays of one shape. What is random is drawn from a generator that the caller
makes of a seed and the tensor's name.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np

Sparsify = Literal["none", "magnitude", "random", "outliers", "della"]
Rescale = Literal["none", "l1", "density"]
# Vectors whose angle is smaller are interpolated on a straight line.
_COLINEAR = 0.9995
_TINY = 1e-8


def linear(
    arrays: Sequence[np.ndarray], weights: Sequence[float], normalize: bool = True
) -> np.ndarray:
    """The weighted sum; `normalize`: divided by the sum of weights, which must not be 0.

    Source: Wortsman et al. 2022, https://arxiv.org/abs/2203.05482.
    """
    total = np.zeros(arrays[0].shape)
    for array, weight in zip(arrays, weights, strict=True):
        total += weight * array.astype(np.float64)
    if normalize:
        total /= _sum_of(weights)
    return total.astype(np.float32)


def _sum_of(weights: Sequence[float]) -> float:
    total = float(sum(weights))
    if abs(total) < _TINY:
        raise ValueError(
            f"weights {list(weights)} add up to 0, and what they make is divided by their sum. "
            "Set other weights, or normalize: false."
        )
    return total


def moving_average(arrays: Sequence[np.ndarray], decay: float) -> np.ndarray:
    """The exponential moving average of arrays in their order, which begins with the first."""
    average = arrays[0].astype(np.float64)
    for array in arrays[1:]:
        average = decay * average + (1 - decay) * array
    return average.astype(np.float32)


def slerp(first: np.ndarray, second: np.ndarray, t: float) -> np.ndarray:
    """Interpolate on the arc between two arrays seen as vectors; t is 0 at the first, and 1 at the
    second.

    Lengths are interpolated with the directions, as in mergekit; nearly parallel arrays are
    interpolated on a straight line.
    """
    a = first.astype(np.float64)
    b = second.astype(np.float64)
    cosine = float((_unit(a) * _unit(b)).sum())
    if abs(cosine) > _COLINEAR:
        return ((1 - t) * a + t * b).astype(np.float32)
    angle = np.arccos(cosine)
    of_first = np.sin((1 - t) * angle) / np.sin(angle)
    of_second = np.sin(t * angle) / np.sin(angle)
    return (of_first * a + of_second * b).astype(np.float32)


def _unit(vector: np.ndarray) -> np.ndarray:
    length = np.linalg.norm(vector)
    if length > _TINY:
        return vector / length
    return vector


def nuslerp(
    first: np.ndarray,
    second: np.ndarray,
    weights: Sequence[float],
    base: np.ndarray | None = None,
    flatten: bool = True,
    row_wise: bool = False,
) -> np.ndarray:
    """Slerp of two arrays by their weights: of the whole arrays, or each row or column for itself.

    Args:
        weights: of both; with a sum of 0 they count alike.
        base: what differences are taken from; None: nothing.
        flatten: an array is one vector; else its last dim holds the vectors' numbers.
        row_wise: with flatten=False: the first dim does, instead of the last.
    """
    total = weights[0] + weights[1]
    t = 0.5
    if abs(total) >= 1e-6:
        t = weights[1] / total
    start = np.zeros(first.shape)
    if base is not None:
        start = base.astype(np.float64)
    a = first - start
    b = second - start
    shape = a.shape
    if flatten:
        a = a.reshape(-1)
        b = b.reshape(-1)
    elif row_wise:
        a = a.swapaxes(0, -1)
        b = b.swapaxes(0, -1)
    of_a = a / np.maximum(np.linalg.norm(a, axis=-1, keepdims=True), 1e-7)
    of_b = b / np.maximum(np.linalg.norm(b, axis=-1, keepdims=True), 1e-7)
    cosine = np.clip((of_a * of_b).sum(-1, keepdims=True), -1, 1)
    angle = np.arccos(cosine)
    sine = np.sin(angle)
    is_straight = np.abs(sine) < _TINY
    safe = np.where(is_straight, 1.0, sine)
    arc = (np.sin((1 - t) * angle) * a + np.sin(t * angle) * b) / safe
    merged = np.where(is_straight, (1 - t) * a + t * b, arc)
    if row_wise and not flatten:
        merged = merged.swapaxes(0, -1)
    return (start + merged.reshape(shape)).astype(np.float32)


def model_stock(
    base: np.ndarray, arrays: Sequence[np.ndarray], filter_wise: bool = False
) -> np.ndarray:
    """Interpolate between a base and the mean of models fine-tuned from it, by the angle between
    them.

    Args:
        base: the pre-trained one.
        arrays: two or more.
        filter_wise: by an angle for each row, instead of one for the array.

    Source: Jang et al. 2024, https://arxiv.org/abs/2403.19522. With more than two, the mean of the
        cosines of all pairs, as in mergekit.
    """
    start = base.astype(np.float64)
    if filter_wise and start.ndim > 1:
        rows = (start.shape[0], -1)
    else:
        rows = (1, -1)
    offsets = [(array - start).reshape(rows) for array in arrays]
    cosines = []
    for index, one in enumerate(offsets):
        for other in offsets[index + 1 :]:
            lengths = np.linalg.norm(one, axis=-1) * np.linalg.norm(other, axis=-1)
            cosine = (one * other).sum(-1) / np.maximum(lengths, 1e-6)
            cosines.append(np.clip(cosine, -1, 1))
    cosine = np.mean(cosines, axis=0)[:, None]
    count = len(arrays)
    t = count * cosine / (1 + (count - 1) * cosine)
    merged = start.reshape(rows) + t * np.mean(offsets, axis=0)
    return merged.reshape(base.shape).astype(np.float32)


def task_vectors(
    base: np.ndarray,
    deltas: Sequence[np.ndarray],
    weights: Sequence[float],
    *,
    consensus: bool = False,
    normalize: bool = False,
    factor: float = 1.0,
) -> np.ndarray:
    """The base, and the weighted sum of what others differ by.

    Args:
        base: the tensor of the base.
        deltas: of the others, from the base, perhaps sparse.
        weights: of these.
        consensus: of each number only those count whose sign is that of the weighted sum.
        normalize: divided by the sum of the weights that count.
        factor: what the sum is multiplied with.

    Sources: Ilharco et al. 2022, https://arxiv.org/abs/2212.04089; consensus: Yadav et al. 2023,
        https://arxiv.org/abs/2306.01708.
    """
    stacked = np.stack(deltas).astype(np.float32)
    sizes = np.asarray(weights, np.float32).reshape(-1, *(1,) * base.ndim)
    weighted = stacked * sizes
    if consensus:
        majority = np.where(weighted.sum(0) >= 0, 1, -1)
        counts = np.sign(weighted) == majority
        mixed = np.where(counts, weighted, 0).sum(0, dtype=np.float64)
        divisor = np.where(counts, sizes, 0).sum(0, dtype=np.float64)
        divisor = np.where(divisor == 0, 1.0, divisor)
    else:
        mixed = weighted.sum(0, dtype=np.float64)
        divisor = np.float64(1.0)
        if normalize:
            divisor = np.float64(_sum_of(weights))
    if normalize:
        mixed = mixed / divisor
    return (base + factor * mixed).astype(np.float32)


def sparse(
    delta: np.ndarray,
    how: Sparsify,
    density: float,
    *,
    gamma: float = 0.01,
    epsilon: float = 0.15,
    rescale: Rescale = "none",
    draw: np.random.Generator | None = None,
) -> np.ndarray:
    """A part of a difference, the rest 0.

    Args:
        delta: the difference.
        how: "magnitude": the largest; "random": each with the same probability; "outliers": the
            largest but for the very largest; "della": each with a probability that grows with its
            magnitude in its row.
        density: the part that is kept; 1 keeps all.
        gamma: of "outliers", the part of the largest that is dropped.
        epsilon: of "della", how far probabilities lie from the density.
        rescale: what makes up for what is dropped: "l1": the sum of magnitudes stays; "density":
            the kept part is divided by the density.
        draw: random numbers.

    Raises:
        ValueError: nothing would be kept, or probabilities lie outside 0 and 1.

    Sources: Yadav et al. 2023, https://arxiv.org/abs/2306.01708; Yu et al. 2023,
        https://arxiv.org/abs/2311.03099; Davari and Belilovsky 2023,
        https://arxiv.org/abs/2312.06795; Deep et al. 2024, https://arxiv.org/abs/2406.11617.
        Differs: with gamma so small that it drops nothing, mergekit drops everything.
    """
    if how == "none" or density >= 1:
        return delta
    if how == "magnitude":
        kept = _largest(delta, density)
    elif how == "outliers":
        kept = _without_outliers(delta, density, gamma)
    else:
        assert draw is not None
        probability: np.ndarray | float = density
        if how == "della":
            probability = _by_rank(delta, density, epsilon)
        kept = draw.random(delta.shape) < probability
    result = np.where(kept, delta, np.float32(0))
    if rescale == "density":
        return (result / density).astype(np.float32)
    if rescale == "l1":
        before = np.abs(delta).sum(dtype=np.float64)
        after = np.abs(result).sum(dtype=np.float64)
        if min(before, after) > 1e-7:
            result = result * (before / after)
    return result.astype(np.float32)


def _largest(delta: np.ndarray, density: float) -> np.ndarray:
    count = int(density * delta.size)
    if count == 0:
        raise ValueError(
            f"density={density} keeps none of {delta.size:,} numbers. Set density to more."
        )
    order = np.argsort(-np.abs(delta).reshape(-1), kind="stable")
    kept = np.zeros(delta.size, bool)
    kept[order[:count]] = True
    return kept.reshape(delta.shape)


def _without_outliers(delta: np.ndarray, density: float, gamma: float) -> np.ndarray:
    top = int(gamma * delta.size)
    bottom = delta.size - int(density * delta.size) - top
    if bottom < 0:
        top += bottom
        bottom = 0
    order = np.argsort(np.abs(delta).reshape(-1), kind="stable")
    kept = np.zeros(delta.size, bool)
    kept[order[bottom : delta.size - top]] = True
    return kept.reshape(delta.shape)


def _by_rank(delta: np.ndarray, density: float, epsilon: float) -> np.ndarray:
    """The probability of each number, by its rank in its row."""
    if density + epsilon >= 1 or density - epsilon <= 0:
        raise ValueError(
            f"epsilon={epsilon} must leave density={density} plus and minus epsilon between 0 and "
            f"1. Set epsilon to less than {min(density, 1 - density):g}."
        )
    rows = np.atleast_2d(np.abs(delta))
    ranks = np.argsort(np.argsort(rows, axis=1, kind="stable"), axis=1, kind="stable")
    most = max(rows.shape[1] - 1, 1)
    probabilities = density - epsilon + 2 * epsilon * ranks / most
    if rows.shape[1] == 1:
        probabilities = np.full(rows.shape, density)
    return probabilities.reshape(delta.shape)
