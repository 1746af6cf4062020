"""How well and how fast sequences are put into groups: `pack` beside the known ways, on lognormal
lengths.

    python -m benchmarks.balance

prints the tables of benchmarks/results/balance.md. The number of groups is the least that `pack`
finds for all but first fit; Karmarkar-Karp and LPT know no limit of tokens, so that their groups
may be over it. CPU seconds, medians over the sets.
"""

import argparse
import heapq
import math
import time
from collections.abc import Callable

import numpy as np

from data_pipeline.balance import pack

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
        (_, i, first), (_, _, second) = heapq.heappop(heap), heapq.heappop(heap)
        both = [(a + c, x + y) for (a, x), (c, y) in zip(first, reversed(second), strict=True)]
        both.sort(key=lambda group: -group[0])
        heapq.heappush(heap, (both[-1][0] - both[0][0], i, both))
    return [members for _, members in heap[0][2]]


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


def measure(
    count: int, sets: int, mean: float, max_tokens: int, cost: tuple[float, float], slow: bool
) -> list[str]:
    """One row of the table for each way: name, worst spread, groups over the bound, fullest group,
    seconds."""
    rows: dict[str, list[tuple[float, int, float, float]]] = {}
    for seed in range(sets):
        lengths = (
            np.random.default_rng(seed).lognormal(mean, 1.0, count).astype(np.int64).clip(1, CAP)
        )
        costs = cost[0] * lengths + cost[1] * lengths.astype(float) ** 2
        bound, whole, listed = (
            math.ceil(lengths.sum() / max_tokens),
            np.rint(costs).astype(int).tolist(),
            lengths.tolist(),
        )

        def ours(lengths: np.ndarray = lengths) -> Members:
            groups = pack(lengths, max_tokens, cost=cost)
            return [g.tolist() for g in groups.of_shard(0)]

        number = len(ours())
        ways: dict[str, Callable[[], Members]] = {"`pack`": ours}
        ways["LPT"] = lambda whole=whole, number=number: longest_first(whole, number)
        if slow:
            ways["Karmarkar-Karp"] = lambda whole=whole, number=number: karmarkar_karp(
                whole, number
            )
            ways["first fit, longest first"] = lambda listed=listed: first_fit(listed, max_tokens)
        for name, way in ways.items():
            start = time.process_time()
            groups = way()
            seconds = time.process_time() - start
            spent, used = ([float(x[g].sum()) for g in groups] for x in (costs, lengths))
            spread = (max(spent) - min(spent)) / np.mean(spent)
            rows.setdefault(name, []).append(
                (spread, len(groups) - bound, max(used) / max_tokens, seconds)
            )
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
    head = "| way | spread, median | worst | groups over the bound | fullest group | CPU seconds |\n|---|--:|--:|--:|--:|--:|"
    square = (1.0, 1 / 4096)
    for count, sets, mean, room, cost in (
        (256, 30, 6.5, CAP, (1.0, 0.0)),
        (256, 30, 7.0, CAP, (1.0, 0.0)),
        (256, 30, 6.5, 4 * CAP, square),
        (100_000, 1, 6.5, CAP, (1.0, 0.0)),
        (100_000, 1, 6.5, 4 * CAP, square),
    ):
        costs = "n" if cost[1] == 0 else "n + n²/4,096"
        print(
            f"\n{sets} x {count:,} lengths, lognormal({mean}, 1) up to {CAP:,}; max_tokens={room:,}, cost {costs}\n\n{head}"
        )
        print("\n".join(measure(count, sets, mean, room, cost, slow=count <= 256)), flush=True)


if __name__ == "__main__":
    main()
