"""Stream packing: windows of a cyclic token stream become the arrays of a host batch.

Row i of an epoch has the `seq_length` stream tokens from phase + i * seq_length + 1 on as targets and the token before each
as input. The phase differs by epoch, so rows are cut elsewhere each time, and every token is a target exactly once per epoch.

The segment of a position is the document of its TARGET: the end-of-document token that ends one document is, as input, the
begin mark of the next and sits in its segment. Segments count from 1 within a row; 0 is padding, only ever at the row's end.
Where documents have no end mark (`eod: none`), nothing announces a document's first token: its loss mask is 0.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.shards import TokenShards


class Window(NamedTuple):
    """One row: `start` is the stream index of its first input, `count` the real targets (0: a row of padding)."""

    shards: TokenShards
    start: int
    count: int


def count_rows(num_tokens: int, seq_length: int) -> int:
    """Rows in one epoch; the last may be partly padding."""
    return -(-num_tokens // seq_length)


@functools.lru_cache(maxsize=4096)
def phase(seed: int, uid: str, epoch: int, num_tokens: int) -> int:
    """Stream index, in [0, num_tokens), of the first input of row 0 of an epoch."""
    digest = hashlib.blake2b(f"phase | {seed} | {uid} | {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_tokens


def pack(
    windows: Sequence[Window], seq_length: int, *, restart_positions: bool = True, attend_across_documents: bool = False
) -> dict[str, np.ndarray]:
    """Read windows and build the arrays of a batch; vectorised over its rows.

    Args:
        windows: one per row, B of them.
        seq_length: T, positions in a row.
        restart_positions: positions count from 0 in every segment, else from 0 in the row.
        attend_across_documents: the whole row is one segment.

    Returns:
        inputs, targets, segment_ids, positions (int32 [B, T]) and loss_mask (float32 [B, T], 1 where the target counts).
    """
    shape = (len(windows), seq_length)
    inputs, targets, loss_mask = np.empty(shape, np.int32), np.empty(shape, np.int32), np.ones(shape, np.float32)
    borders = []
    for row, (shards, start, count) in enumerate(windows):
        if count:
            tokens = shards.read(start, count + 1)
            inputs[row, :count], targets[row, :count] = tokens[:-1], tokens[1:]
            starts = shards.document_starts(start + 1, count)
            borders.append(starts + row * seq_length)
            if shards.manifest.eod == "none":
                loss_mask[row, starts] = 0
    borders = [] if attend_across_documents else borders
    segment_ids, positions = _segments(np.concatenate([*borders, np.arange(len(windows)) * seq_length]), shape)
    batch = {"inputs": inputs, "targets": targets, "segment_ids": segment_ids, "positions": positions, "loss_mask": loss_mask}
    for row, window in enumerate(windows):
        for array in batch.values() if window.count < seq_length else ():
            array[row, window.count :] = 0
    if not restart_positions:
        positions[:] = np.arange(seq_length)
    return batch


def _segments(borders: np.ndarray, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, int32 [B, T], from the flat indices at which segments begin (any order, repeats allowed)."""
    rows, length = shape
    borders = np.unique(borders)
    row_start = np.arange(rows) * length
    first = np.searchsorted(borders, row_start)  # each row's first border
    numbers = np.arange(1, borders.size + 1) - np.repeat(first, np.diff(first, append=borders.size))
    sizes = np.diff(borders, append=rows * length)
    segment_ids = np.repeat(numbers.astype(np.int32), sizes)
    positions = np.arange(rows * length, dtype=np.int32) - np.repeat(borders.astype(np.int32), sizes)
    return segment_ids.reshape(shape), positions.reshape(shape)
