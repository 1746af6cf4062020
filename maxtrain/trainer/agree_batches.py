"""Whether the processes of a run read the same batches, and what time each takes for itself.

All processes call what is here, at the same steps and in the same order.
"""

import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.loader.loader import HostBatch
from maxtrain.observe.stragglers import HostTime, OwnTime
from maxtrain.parallel.agreement import gather, gather_bytes, raise_together

# Letters of the name of a host, so that all that is said fits.
_LONGEST_NAME = 60


class Compared(NamedTuple):
    """What processes have said of some steps."""

    # Of each batch the checksum of its tokens, over all parts.
    contents: list[int]
    # In the order of the processes.
    hosts: list[HostTime]


def compare_batches(origins: Sequence[HostBatch], part: str, own: OwnTime) -> Compared:
    """Compares the batches of some steps between the processes, and exchanges their own times.

    Args:
        origins: where this process's part of each batch comes from; at least one.
        part: says which part of the last batch this process reads. Several may read the same.
        own: the time that this process took for itself since the last record.

    Raises:
        DataError: the processes do not read the same batches.
        UserError: one can't read its part of them.
    """
    last = origins[-1]
    error = next((origin.error for origin in origins if origin.error), None)
    said = gather(
        {
            "step": last.step + 1,
            "rows": last.digest,
            "part": part,
            "failed": error is not None,
            "host": platform.node()[:_LONGEST_NAME],
            "own": [round(seconds, 6) for seconds in own],
        }
    )
    if any(theirs["failed"] for theirs in said):
        raise_together(error)
    first = said[0]
    for process, theirs in enumerate(said):
        if (theirs["step"], theirs["rows"]) != (first["step"], first["rows"]):
            raise DataError(
                f"process {process} reads rows {theirs['rows']} at step {theirs['step']}, process "
                f"0 rows {first['rows']} at step {first['step']}. Give all processes the same "
                f"config and data, and go on from the last checkpoint."
            )
    mine = np.array([origin.content for origin in origins], np.uint64)
    contents = gather_bytes(mine.view(np.uint8)).view(np.uint64)
    # A part that several processes read counts once.
    content_of_parts: dict[str, np.ndarray] = {}
    for theirs, content in zip(said, contents, strict=True):
        content_of_parts[theirs["part"]] = content
    # Checksums sum modulo 2^64.
    total = np.sum(list(content_of_parts.values()), axis=0, dtype=np.uint64)
    hosts = []
    for process, theirs in enumerate(said):
        hosts.append(HostTime(process, theirs["host"], OwnTime(*theirs["own"])))
    return Compared(total.tolist(), hosts)
