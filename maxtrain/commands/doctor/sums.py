"""Speed of sums over an axis of the mesh: for each group of hosts that sum together, with the limit
of their network. Pure functions.
"""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from maxtrain.parallel.hardware import known_links


def rates_of_groups(
    reports: Sequence[Mapping[str, Any]], position: int
) -> dict[tuple[int, ...], float]:
    """Bytes per second that each device moves, by the processes that sum with each other, through
    others or not.

    Those of a group wait for each other, and the one that came last measures what the sums take: so
    the fastest of a group counts.

    Args:
        reports: of all processes.
        position: of the axis among `sums`.
    """
    processes = collections.defaultdict(list)
    for index, report in enumerate(reports):
        processes[report["sums"][position]["group"]].append(index)
    found = {}
    for indices in processes.values():
        of_group = (reports[index]["sums"][position]["bytes_per_second"] for index in indices)
        found[tuple(indices)] = max(of_group)
    return found


def possible(found: Mapping[str, Any], kind: str) -> float | None:
    """Bytes per second that each device of this kind could move in sums, by its data sheet; None:
    it is not known.

    That is what its links can do, and at most what leaves a host (a slice of TPUs): sums go in
    rings, as many of which leave it as the group has devices there.
    """
    links = known_links(kind)
    if links is None:
        return None
    if found["near"] == found["size"]:
        return links.near
    if links.beyond is None:
        return None
    return min(links.near, found["near"] * links.beyond)
