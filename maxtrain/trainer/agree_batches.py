"""Checks that all processes of a run read the same batches, and an exchange of their own times.

All processes must call these functions at the same steps and in the same order.
"""

import platform
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.loader.loader import HostBatch
from maxtrain.observe.stragglers import HostTime, OwnTime
from maxtrain.parallel.agreement import gather, gather_bytes, raise_together

# Longest host name in letters, so that the gathered message fits its buffer.
_LONGEST_NAME = 60


class BatchAgreement(NamedTuple):
    """The reports of the processes about some steps."""

    # The checksum of the tokens of each batch, over all parts.
    contents: list[int]
    # The times of each host, in the order of the processes.
    hosts: list[HostTime]


def compare_batches(origins: Sequence[HostBatch], part: str, own: OwnTime) -> BatchAgreement:
    """Compare the batches of some steps between the processes, and exchange their own times.

    Args:
        origins: where this process's part of each batch comes from; at least one.
        part: the name of the part of the last batch that this process reads. Several processes may
            read the same part.
        own: the time that this process took for itself since the last record.

    Raises:
        DataError: the processes do not read the same batches.
        UserError: a process cannot read its part of the batches.
    """
    last = origins[-1]
    error = next((origin.error for origin in origins if origin.error), None)
    reports = gather(
        {
            "step": last.step + 1,
            "rows": last.digest,
            "part": part,
            "failed": error is not None,
            "host": platform.node()[:_LONGEST_NAME],
            "own": [round(seconds, 6) for seconds in own],
        }
    )
    if any(report["failed"] for report in reports):
        raise_together(error)
    first = reports[0]
    for process, report in enumerate(reports):
        if (report["step"], report["rows"]) != (first["step"], first["rows"]):
            raise DataError(
                f"process {process} reads rows {report['rows']} at step {report['step']}, process "
                f"0 rows {first['rows']} at step {first['step']}. Give all processes the same "
                f"config and data, and go on from the last checkpoint."
            )
    mine = np.array([origin.content for origin in origins], np.uint64)
    contents = gather_bytes(mine.view(np.uint8)).view(np.uint64)
    # A part that several processes read counts once.
    content_of_parts: dict[str, np.ndarray] = {}
    for report, content in zip(reports, contents, strict=True):
        content_of_parts[report["part"]] = content
    # Checksums sum modulo 2^64.
    total = np.sum(list(content_of_parts.values()), axis=0, dtype=np.uint64)
    hosts = []
    for process, report in enumerate(reports):
        hosts.append(HostTime(process, report["host"], OwnTime(*report["own"])))
    return BatchAgreement(total.tolist(), hosts)
