"""Stragglers: the host that the other hosts wait for.

A step takes as long on every host, since all devices wait in its collectives for the last one. What
differs is how long a host takes for its own part, before its devices get the next step: it waits
for its batch, and works. Waiting for devices and for other processes is no part of that. A device
that computes slowly is not seen here; `maxtrain doctor` measures devices.
"""

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

# Records in a row in which a host is slow before it is reported; twice as many before it
# is reported again.
PATIENCE = 3
# The share of the time of steps by which a slow host exceeds the others at least: less does not
# matter, whatever the factor.
_SHARE = 0.1


class OwnTime(NamedTuple):
    """Seconds that a host took for its own part of the steps since the last record."""

    seconds: float
    # Of these, how long it waited for its batches.
    data_wait: float


class HostTime(NamedTuple):
    """Time of one process, by its number and the name of its host."""

    process: int
    host: str
    own: OwnTime


class SlowestHost(NamedTuple):
    """The slowest host, and the median of the others, in seconds."""

    of: HostTime
    others: float


def slowest_of(hosts: Sequence[HostTime]) -> SlowestHost | None:
    """None: there is only one process."""
    if len(hosts) < 2:
        return None
    slowest = max(hosts, key=lambda one: one.own.seconds)
    others = [one.own.seconds for one in hosts if one is not slowest]
    return SlowestHost(slowest, statistics.median(others))


def in_record(slowest: SlowestHost | None, steps: int) -> dict[str, Any]:
    """Return the fields of a training record about the slowest host, for each of `steps` steps;
    nothing for one process.
    """
    if slowest is None:
        return {}
    return {
        "slowest_process": slowest.of.process,
        "slowest_host": slowest.of.host,
        "slowest_host_seconds": slowest.of.own.seconds / steps,
        "slowest_host_data_wait_seconds": slowest.of.own.data_wait / steps,
        "other_hosts_seconds": slowest.others / steps,
    }


class Stragglers:
    """Detector of a host that has been slow for some records in a row.

    `factor`: how many times as long as the others it takes at least; 0: no warnings.
    """

    def __init__(self, factor: float):
        self._factor = factor
        self._process: int | None = None
        self._in_a_row = 0
        self._told_at = PATIENCE

    def warning(self, slowest: SlowestHost | None, steps: int, step_seconds: float) -> str:
        """Return the warning after a record of `steps` steps; mostly empty."""
        if slowest is None or not self._is_slow(slowest, steps * step_seconds):
            self._process = None
            return ""
        if slowest.of.process != self._process:
            self._process = slowest.of.process
            self._in_a_row = 0
            self._told_at = PATIENCE
        self._in_a_row += 1
        if self._in_a_row < self._told_at:
            return ""
        self._told_at *= 2
        own = slowest.of.own
        return (
            f"process {slowest.of.process} on {slowest.of.host} holds up the others, "
            f"{self._in_a_row} records in a row: of each step it takes "
            f"{own.seconds / steps:.3g} s for itself, {own.data_wait / steps:.3g} s of them "
            f"waiting for data, and the others {slowest.others / steps:.3g} s "
            f"(observe.slow_host_factor={self._factor:g}). Look at the disk and the load of that "
            f"host."
        )

    def _is_slow(self, slowest: SlowestHost, seconds: float) -> bool:
        """Return whether the slowest host holds up steps that took `seconds` seconds together."""
        if not self._factor:
            return False
        own = slowest.of.own.seconds
        return own > self._factor * slowest.others and own - slowest.others > _SHARE * seconds
