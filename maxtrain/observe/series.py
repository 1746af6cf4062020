"""Numbers over steps, from records of `read_metrics`: what curves are drawn of."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

# A point is the mean over at most this fraction of the curve (1 / n), to each side.
_SMOOTHING = 50
LEAST_SMOOTHED = 2 * _SMOOTHING


def evaluation_series(evals: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Records of evaluations that can be compared, by set; one that was exchanged goes on under a
    name of its own."""
    series: dict[str, list[Mapping[str, Any]]] = {}
    names: dict[str, list[str]] = {}  # of each set, the different texts that it was, in their order
    for record in evals:
        texts = names.setdefault(record["set"], [])
        text = record.get("data", texts[-1] if texts else "")
        if text not in texts:
            texts.append(text)
        number = texts.index(text) + 1
        series.setdefault(
            record["set"] if number == 1 else f"{record['set']} ({number})", []
        ).append(record)
    return series


def columns(records: Sequence[Mapping[str, Any]], name: str) -> np.ndarray:
    """Steps and values of the records in which that number is finite, as [2, records]."""
    pairs = np.array(
        [(r["step"], r[name]) for r in records if r.get(name) is not None], float
    ).reshape(-1, 2)
    return pairs[np.isfinite(pairs[:, 1])].T


def smooth(values: np.ndarray) -> np.ndarray:
    """Mean over a centred window of up to a 25th of the curve, narrower at its ends; short curves
    as they are."""
    index, sums = np.arange(len(values)), np.concatenate([[0.0], np.cumsum(values)])
    half = np.minimum(len(values) // _SMOOTHING, np.minimum(index, index[::-1]))
    return (sums[index + half + 1] - sums[index - half]) / (2 * half + 1)
