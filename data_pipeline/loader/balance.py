"""Micro-batches of sequences of very different lengths (chat, reinforcement learning), alike in
cost on every device and step.

A pure function of the global list of lengths: each host calls it and takes its share, and nothing
is communicated. Arithmetic is in whole numbers, so that all hosts get the same bits.

`pack` takes any list. `balance_rows` is `data.packing=balanced`:

* A step has the `data.batch_size` documents that it has with `pad`: the same plan, the same order.
  So losses and gradients are those of `pad`, where a loss is a mean over tokens or documents.
* They lie in rows of `data.seq_length` tokens, as few as best fit finds, rounded up to the next
  number of `row_counts`: multiples of `data.balance_rows` that grow by at most an eighth. Each is a
  shape to compile; the documents of steps are alike enough for a few of them.
* `pack` makes all rows of the step alike in cost, so that micro-batches and devices, which have as
  many rows, are at least as alike. A document that is dearer than the mean row can't be made up
  for.
* Rows stand in the order of `_interleaved`. With A micro-batches and D devices, row r is in
  micro-batch r mod A, and the rows of a device follow each other. So the devices have rows of
  neighbouring cost in a micro-batch, and a fair share of dear and cheap rows in the step. Neither A
  nor D is needed for that: the batch depends on config, data and seed alone.
* No document is left out or divided; one that is longer than a row is treated by `data.on_long`.
"""

import dataclasses
import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.plan.document_packing import best_fit

# The spread of the groups' costs, relative to their mean, at which nothing more is exchanged.
_TOLERANCE = 0.005
# Rounds of exchanges in a row without a smaller spread, each with other pairs, before the end.
_MISSES = 32
# A cost in whole numbers is at most 2 to this power: sums are exact for millions of sequences.
_COST_BITS = 40
# Two neighbouring numbers of rows that a batch may have differ by at most one part in _PARTS.
_PARTS = 8


@dataclasses.dataclass(frozen=True, eq=False)
class Groups:
    """The result of `pack`: group g has the sequences `order[offsets[g] : offsets[g + 1]]` and is
    read by shard g % num_shards in step g // num_shards.

    `x[order]` puts anything that is by sequence into the order of groups, `y[inverse]` puts it
    back.

    Attributes:
        order, inverse: int64 [sequences].
        offsets: int64 [groups + 1].
        tokens: int64 [groups], without padding.
        cost: float64 [groups].
        shapes: int64 [steps]: tokens with padding of each group of a step, the same on all shards.
        num_shards: readers that go in step.
    """

    order: np.ndarray
    inverse: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    cost: np.ndarray
    shapes: np.ndarray
    num_shards: int

    @property
    def spread(self) -> float:
        """The difference of the highest and the lowest cost of a group, relative to their mean."""
        return float((self.cost.max() - self.cost.min()) / self.cost.mean())

    def of_shard(self, shard: int) -> list[np.ndarray]:
        """The sequences of each step of one shard, int64."""
        assert 0 <= shard < self.num_shards, f"shard {shard} of {self.num_shards}"
        return np.split(self.order, self.offsets[1:-1])[shard :: self.num_shards]


def pack(
    lengths: np.ndarray | Sequence[int],
    max_tokens: int,
    min_groups: int = 1,
    cost: tuple[float, float] = (1.0, 0.0),
    num_shards: int = 1,
    num_shapes: int = 8,
) -> Groups:
    """Put sequences into as few groups of at most `max_tokens` as best fit finds, alike in cost.

    A heap gives each sequence, the most expensive first, to the cheapest group with room (Graham's
    LPT); where that leads to no end, best fit begins. Then dear and cheap groups exchange
    sequences. O(n log n), whatever the number of groups.

    Args:
        lengths: tokens of each sequence, at least 1; the same list on all hosts.
        max_tokens: room of a group, in tokens.
        min_groups: least number of groups; the result has more where there is no room, or
            `num_shards` does not divide it.
        cost: (a, b) of a sequence's cost a n + b n^2 for n tokens;
            maxtrain.models.cost.sequence_cost gives a model's.
        num_shards: readers that go in step; each has as many groups. Where there are fewer
            sequences, some are empty.
        num_shapes: groups are padded to a multiple of max_tokens / num_shapes, rounded up: as many
            programs to compile at most.

    Raises:
        DataError: no sequence, one without tokens, or one that is longer than `max_tokens`.

    Source: R. L. Graham, Bounds on multiprocessing timing anomalies, 1969; exchanges as in local
        search for P||Cmax.
    """
    sizes = np.asarray(lengths, np.int64)
    _check(sizes, max_tokens)
    linear, quadratic = cost
    assert min(linear, quadratic) >= 0, cost
    assert min(min_groups, num_shards, num_shapes) >= 1, (min_groups, num_shards, num_shapes)
    exact = linear * sizes.astype(float) + quadratic * sizes.astype(float) ** 2
    assert exact.max() > 0, cost
    whole = np.ceil(exact / exact.max() * (1 << _COST_BITS)).astype(np.int64)

    offsets, fitted = best_fit(sizes, max_tokens)
    num_groups = -(-max(min_groups, len(offsets) - 1) // num_shards) * num_shards
    # The longest first: a longer sequence costs more.
    by_cost = np.argsort(-sizes, kind="stable")
    groups = _cheapest_first(sizes[by_cost], whole[by_cost], max_tokens, num_groups)
    if groups:
        members = [by_cost[group] for group in groups]
    else:
        members = np.split(fitted, offsets[1:-1])
    members += [np.empty(0, np.int64)] * (num_groups - len(members))
    _exchange(members, sizes, whole, max_tokens)
    members = _deal(members, whole, num_shards)

    order = np.concatenate(members)
    inverse = np.empty_like(order)
    inverse[order] = np.arange(order.size)
    counts = np.array([group.size for group in members])
    tokens = np.array([sizes[group].sum() for group in members])
    longest = np.maximum(tokens.reshape(-1, num_shards).max(axis=1), 1)
    multiples = -(-longest * num_shapes // max_tokens)
    return Groups(
        order=order,
        inverse=inverse,
        offsets=np.concatenate([[0], np.cumsum(counts)]),
        tokens=tokens,
        cost=np.array([exact[group].sum() for group in members]),
        shapes=-(-multiples * max_tokens // num_shapes),
        num_shards=num_shards,
    )


def _check(sizes: np.ndarray, max_tokens: int) -> None:
    """DataError: there is no sequence, or the length of one can't be used."""
    if not sizes.size:
        raise DataError(
            "lengths is empty, but a batch has at least one sequence. Give the length of each."
        )
    _refuse(sizes, sizes < 1, "is less than 1", "Leave sequences without tokens out")
    rule = f"is more than max_tokens={max_tokens:,}"
    fix = f"Raise it to {sizes.max():,}, or cut or leave out what is longer"
    _refuse(sizes, sizes > max_tokens, rule, fix)


def _refuse(sizes: np.ndarray, is_bad: np.ndarray, rule: str, fix: str) -> None:
    if not is_bad.any():
        return
    first = int(np.argmax(is_bad))
    count = np.count_nonzero(is_bad)
    if count > 1:
        rule += f"; so are {count:,} lengths in all"
    raise DataError(f"lengths[{first}]={sizes[first]:,} {rule}. {fix}.")


def _cheapest_first(
    sizes: np.ndarray, costs: np.ndarray, room: int, num_groups: int
) -> list[list[int]] | None:
    """Each item, in falling order of size, to the cheapest group with room for it; None if there is
    none for one of them.

    A group too full for an item waits until items are small enough for it, so that every one is
    looked at O(1) times an item.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    # Two heaps: those with room, the cheapest first, and the full ones, the most room first.
    open_groups = [(0, g) for g in range(num_groups)]
    waiting = []
    left = [room] * num_groups
    spent = [0] * num_groups
    for item, (size, cost) in enumerate(zip(sizes.tolist(), costs.tolist())):
        while waiting and -waiting[0][0] >= size:
            g = heapq.heappop(waiting)[1]
            heapq.heappush(open_groups, (spent[g], g))
        while open_groups and left[open_groups[0][1]] < size:
            g = heapq.heappop(open_groups)[1]
            heapq.heappush(waiting, (-left[g], g))
        if not open_groups:
            return None
        g = open_groups[0][1]
        groups[g].append(item)
        left[g] -= size
        spent[g] += cost
        heapq.heapreplace(open_groups, (spent[g], g))
    return groups


def _exchange(members: list[np.ndarray], sizes: np.ndarray, costs: np.ndarray, room: int) -> None:
    """Makes groups alike, in place: the dearest exchanges with the cheapest, the next with the
    next, and so on, in rounds.

    After a round without a smaller spread, each one meets another in the next.
    """
    used = np.array([sizes[group].sum() for group in members])
    spent = np.array([costs[group].sum() for group in members])
    tolerance = _TOLERANCE * spent.mean()
    half = len(members) // 2
    least = np.iinfo(np.int64).max
    misses = 0
    while np.ptp(spent) > tolerance and misses < min(half, _MISSES):
        ranks = np.argsort(spent, kind="stable")
        for high, low in zip(ranks[::-1][:half], np.roll(ranks[:half], -misses)):
            difference = spent[high] - spent[low]
            if difference <= tolerance:
                continue
            room_left = room - used[[high, low]]
            swap = _best_swap(members[high], members[low], sizes, costs, room_left, int(difference))
            if swap is None:
                continue
            members[high], members[low] = _swapped(members[high], members[low], *swap)
            for g in (high, low):
                used[g] = sizes[members[g]].sum()
                spent[g] = costs[members[g]].sum()
        spread = np.ptp(spent)
        if spread < least:
            least = spread
            misses = 0
        else:
            misses += 1


def _swapped(
    high: np.ndarray, low: np.ndarray, out: int, back: int
) -> tuple[np.ndarray, np.ndarray]:
    """Two groups after `high` gave item `out` for item `back` of `low` (len(low): for none)."""
    given = high[out : out + 1]
    received = low[back : back + 1]
    new_high = np.concatenate([np.delete(high, out), received])
    new_low = np.concatenate([low[:back], low[back + 1 :], given])
    return new_high, new_low


def _best_swap(
    high: np.ndarray,
    low: np.ndarray,
    sizes: np.ndarray,
    costs: np.ndarray,
    room: np.ndarray,
    difference: int,
) -> tuple[int, int] | None:
    """Return which item of the more expensive group to exchange for which item of the cheaper one
    (len(low) for none), so that their costs become as equal as possible.

    None if no exchange makes them more alike. `room` is what is left in both.
    """
    back_costs = np.append(costs[low], 0)
    back_sizes = np.append(sizes[low], 0)
    ranks = np.argsort(back_costs, kind="stable")
    # What comes back should cost half the difference less than what goes.
    place = np.searchsorted(back_costs[ranks], costs[high] - difference // 2)
    best = difference
    found = None
    for near in (place - 1, place):
        back = ranks[near.clip(0, len(ranks) - 1)]
        after = np.abs(difference - 2 * (costs[high] - back_costs[back]))
        more = sizes[high] - back_sizes[back]
        has_no_room = (more > room[1]) | (-more > room[0])
        after[has_no_room] = difference
        out = int(np.argmin(after))
        if after[out] < best:
            best = after[out]
            found = (out, int(back[out]))
    return found


def _deal(members: list[np.ndarray], costs: np.ndarray, num_shards: int) -> list[np.ndarray]:
    """Groups in the order of steps: those of a step are next to each other in cost, the dearest
    step first.

    Within a step the dearest goes to the shard that has had the least work so far. A group's own
    sequences are by number.
    """
    spent = [int(costs[group].sum()) for group in members]
    ranks = sorted(range(len(members)), key=lambda g: (-spent[g], g))
    work = [0] * num_shards
    dealt = []
    for first in range(0, len(ranks), num_shards):
        shards = sorted(range(num_shards), key=lambda shard: (work[shard], shard))
        of_step = dict(zip(shards, ranks[first : first + num_shards]))
        for shard in range(num_shards):
            work[shard] += spent[of_step[shard]]
            dealt.append(np.sort(members[of_step[shard]]))
    return dealt


class RowPlaces(NamedTuple):
    """Places of a step's documents: the row and the first column of each, both int64
    [documents].
    """

    row: np.ndarray
    column: np.ndarray


def row_counts(num_documents: int, unit: int) -> list[int]:
    """Return the numbers of rows that a batch of `num_documents` documents may have, increasing.

    Multiples of `unit`; the last one has room for documents that need a row each.
    """
    units = 1
    counts = [unit]
    while counts[-1] < num_documents:
        units += max(1, units // _PARTS)
        counts.append(units * unit)
    return counts


def count_batch_rows(sizes: np.ndarray, length: int, unit: int) -> int:
    """Rows of `length` tokens for documents of these sizes, int64 in [1, length]: see
    `row_counts`."""
    offsets, _ = best_fit(sizes, length)
    least = len(offsets) - 1
    return next(count for count in row_counts(len(sizes), unit) if count >= least)


def balance_rows(sizes: np.ndarray, length: int, num_rows: int, quadratic: float) -> RowPlaces:
    """Puts the documents of a step into rows that are alike in cost.

    Args:
        sizes: int64 [documents], in [1, length].
        length: tokens in a row.
        num_rows: from `count_batch_rows`.
        quadratic: b of a document's cost n + b n^2.
    """
    groups = pack(sizes, length, min_groups=num_rows, cost=(1.0, quadratic))
    members = groups.of_shard(0)
    assert len(members) == num_rows, (len(members), num_rows)
    row = np.empty(len(sizes), np.int64)
    column = np.empty(len(sizes), np.int64)
    # Groups come by cost, the dearest first.
    for place, group in zip(_interleaved(num_rows).tolist(), members):
        row[group] = place
        column[group] = np.cumsum(sizes[group]) - sizes[group]
    return RowPlaces(row, column)


def _interleaved(count: int) -> np.ndarray:
    """The numbers from 0 to before `count`, int64, by their bits in reverse: 0, 4, 2, 6, 1, 5, 3,
    7.

    Neighbours in this order lie far apart, and are alike in their last bits.

    Source: J. G. van der Corput, Verteilungsfunktionen, 1935.
    """
    numbers = np.arange(count)
    reverse = np.zeros(count, np.int64)
    for bit in range(count.bit_length()):
        reverse = 2 * reverse + (numbers >> bit & 1)
    return np.argsort(reverse, kind="stable")
