"""Quality and speed of grouping sequences: `pack` compared with known algorithms, on lognormal
lengths.

    python -m benchmarks.balance

prints the tables of benchmarks/results/balance.md. Karmarkar-Karp and LPT get the number of groups
that `pack` finds, and know no limit of tokens, so their groups may exceed it; first fit chooses its
own number. Times are CPU seconds, medians over the sets.
"""

import argparse
import functools
import heapq
import math
import time
from collections.abc import Callable

import numpy as np

from data_pipeline.loader.balance import pack

CAP = 8192
Members = list[list[int]]


def karmarkar_karp(costs: list[int], num_groups: int) -> Members:
    """The largest differencing method with tuples of `num_groups` sums, as several trainers use it
    (O(n k log k))."""
    heap = []
    for i, cost in enumerate(costs):
        sums = [(cost, [i])] + [(0, [])] * (num_groups - 1)
        heap.append((-cost, i, sums))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, i, first = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        # The largest group of one is joined with the smallest of the other.
        both = []
        for (cost, members), (other_cost, others) in zip(first, reversed(second), strict=True):
            both.append((cost + other_cost, members + others))
        both.sort(key=lambda group: -group[0])
        difference = both[0][0] - both[-1][0]
        heapq.heappush(heap, (-difference, i, both))
    _, _, groups = heap[0]
    return [members for _, members in groups]


def longest_first(costs: list[int], num_groups: int) -> Members:
    """Graham's LPT."""
    heap = [(0, g) for g in range(num_groups)]
    groups: Members = [[] for _ in range(num_groups)]
    for i in sorted(range(len(costs)), key=lambda i: -costs[i]):
        spent, g = heap[0]
        groups[g].append(i)
        heapq.heapreplace(heap, (spent + costs[i], g))
    return groups


def first_fit(lengths: list[int], max_tokens: int) -> Members:
    """First fit, the longest first."""
    groups: Members = []
    left: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = next((g for g, room in enumerate(left) if room >= lengths[i]), None)
        if at is None:
            at = len(left)
            left.append(max_tokens)
            groups.append([])
        groups[at].append(i)
        left[at] -= lengths[i]
    return groups


def packed(lengths: np.ndarray, max_tokens: int, cost: tuple[float, float]) -> Members:
    """Groups as `pack` makes them."""
    groups = pack(lengths, max_tokens, cost=cost)
    return [group.tolist() for group in groups.of_shard(0)]


def measure(
    count: int, sets: int, mean: float, max_tokens: int, cost: tuple[float, float], slow: bool
) -> list[str]:
    """One row of the table for each algorithm.

    Args:
        count: lengths in a set.
        sets: how many sets are drawn.
        mean: of the logarithm of a length.
        max_tokens: of a group.
        cost: of a token, and of the square of a length.
        slow: whether the slow algorithms are measured, too.
    """
    rows: dict[str, list[tuple[float, int, float, float]]] = {}
    linear, quadratic = cost
    for seed in range(sets):
        drawn = np.random.default_rng(seed).lognormal(mean, 1.0, count)
        lengths = drawn.astype(np.int64).clip(1, CAP)
        costs = linear * lengths + quadratic * lengths.astype(float) ** 2
        bound = math.ceil(lengths.sum() / max_tokens)
        whole_costs = np.rint(costs).astype(int).tolist()
        number = len(packed(lengths, max_tokens, cost))
        algorithms: dict[str, Callable[[], Members]] = {
            "`pack`": functools.partial(packed, lengths, max_tokens, cost),
            "LPT": functools.partial(longest_first, whole_costs, number),
        }
        if slow:
            algorithms |= {
                "Karmarkar-Karp": functools.partial(karmarkar_karp, whole_costs, number),
                "first fit, longest first": functools.partial(
                    first_fit, lengths.tolist(), max_tokens
                ),
            }
        for name, algorithm in algorithms.items():
            start = time.process_time()
            groups = algorithm()
            seconds = time.process_time() - start
            spent = [float(costs[group].sum()) for group in groups]
            fullest = max(float(lengths[group].sum()) for group in groups) / max_tokens
            spread = (max(spent) - min(spent)) / np.mean(spent)
            row = (spread, len(groups) - bound, fullest, seconds)
            rows.setdefault(name, []).append(row)
    lines = []
    for name, results in rows.items():
        spread, over, fullest, seconds = np.array(results).T
        cells = [
            f"{np.median(spread):.4f}",
            f"{spread.max():.4f}",
            f"{over.max():.0f}",
            f"{fullest.max():.1%}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} | {np.median(seconds):.4f} |")
    return lines


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    head = (
        "| way | spread, median | worst | groups over the bound | fullest group | CPU seconds |\n"
        "|---|--:|--:|--:|--:|--:|"
    )
    square = (1.0, 1 / 4096)
    for count, sets, mean, room, cost in (
        (256, 30, 6.5, CAP, (1.0, 0.0)),
        (256, 30, 7.0, CAP, (1.0, 0.0)),
        (256, 30, 6.5, 4 * CAP, square),
        (100_000, 1, 6.5, CAP, (1.0, 0.0)),
        (100_000, 1, 6.5, 4 * CAP, square),
    ):
        formula = "n + n²/4,096"
        if cost != square:
            formula = "n"
        drawn = f"{sets} x {count:,} lengths, lognormal({mean}, 1) up to {CAP:,}"
        print(f"\n{drawn}; max_tokens={room:,}, cost {formula}\n\n{head}")
        print("\n".join(measure(count, sets, mean, room, cost, slow=count <= 256)), flush=True)


if __name__ == "__main__":
    main()
