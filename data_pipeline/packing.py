"""Packing: windows of a cyclic token stream, or whole documents, become the arrays of a host batch.

`pack`: row i of an epoch has the `seq_length` stream tokens from phase + i * seq_length + 1 on as targets and the token before
each as input. The phase differs by epoch, so rows are cut elsewhere each time, and every token is a target exactly once per
epoch. `pack_documents`: a row has the documents that `bins` gives it, one after the other, then padding.

The segment of a position is the document of its TARGET: the end-of-document token that ends one document is, as input, the
begin mark of the next and sits in its segment; a row of documents begins with one too. Segments count from 1 within a row; 0
is padding, only ever at the row's end. The loss mask is the shards' own, which is 1 where they have none. Where documents have
no end mark (`eod: none`), nothing announces a document's first token: its loss mask is 0, or, in a row of whole documents, it
is no target at all, only an input.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.bins import Bins, targets
from data_pipeline.shards import TokenShards


class Windows(NamedTuple):
    """One row each, int64 [B]: index of its source, stream index of its first input, real targets (0: a row of padding)."""

    source: np.ndarray
    start: np.ndarray
    count: np.ndarray


def count_rows(num_tokens: int, seq_length: int) -> int:
    """Rows in one epoch; the last may be partly padding."""
    return -(-num_tokens // seq_length)


@functools.lru_cache(maxsize=4096)
def phase(seed: int, uid: str, epoch: int, num_tokens: int) -> int:
    """Stream index, in [0, num_tokens), of the first input of row 0 of an epoch."""
    digest = hashlib.blake2b(f"phase | {seed} | {uid} | {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_tokens


def pack(
    shards: Sequence[TokenShards], windows: Windows, length: int, restart_positions: bool, attend_across_documents: bool
) -> dict[str, np.ndarray]:
    """Read B windows of T = `length` positions and build the arrays of a batch.

    Positions restart at 0 in every segment, or count on in the row; across documents, the whole row is one segment. Returns
    inputs, targets, segment_ids, positions (int32 [B, T]) and loss_mask (float32 [B, T], 1 where the target counts).
    """
    shape = (len(windows.start), length)
    inputs, target, loss_mask = np.empty(shape, np.int32), np.empty(shape, np.int32), np.ones(shape, np.float32)
    begins = np.zeros(shape, bool)  # targets that begin a segment
    for source in np.unique(windows.source).tolist():
        rows = np.flatnonzero(windows.source == source)
        tokens, borders = shards[source].windows(windows.start[rows], length + 1)
        inputs[rows], target[rows] = tokens[:, :-1], tokens[:, 1:]
        row, column = rows[borders // (length + 1)], borders % (length + 1) - 1
        row, column = row[column >= 0], column[column >= 0]
        begins[row, column] = not attend_across_documents
        if shards[source].masked:
            loss_mask[rows] = shards[source].mask(windows.start[rows] + 1, length)
        if shards[source].manifest.eod == "none":
            loss_mask[row, column] = 0
    return _batch(inputs, target, loss_mask, begins, windows.count, restart_positions)


def pack_documents(
    shards: Sequence[TokenShards], bins: Sequence[Bins], source: np.ndarray, row: np.ndarray, length: int,
    restart_positions: bool, attend_across_documents: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Read B rows of whole documents, of T = `length` positions, and build the arrays of a batch, as `pack` does.

    Row i is row `row[i]` of `bins[source[i]]`, both int64 [B]; one that is not there is padding. The rest of a row is padding.
    """
    shape = (len(row), length)
    inputs, target, loss_mask = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
    begins, counts, marks = np.zeros(shape, bool), np.zeros(len(row), np.int64), []
    for number in np.unique(source).tolist():
        reader, mine = shards[number], np.flatnonzero(source == number)
        offsets, documents = bins[number].documents(row[mine])
        first, sizes = targets(reader, documents)
        sizes = np.minimum(sizes, length)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        counts[mine] = np.diff(ends[offsets])
        begin = ends[:-1] + np.repeat(mine * length - ends[offsets[:-1]], np.diff(offsets))  # flat, where each document begins
        filled = (source == number)[:, None] & (np.arange(length) < counts[:, None])
        target[filled], loss_mask[filled] = reader.spans(first, sizes)
        begins.ravel()[begin] = not attend_across_documents
        eod = reader.manifest.tokenizer["special_ids"]["eod"]
        marks.append((begin, reader.spans(first - 1, np.ones_like(first))[0] if reader.manifest.eod == "none" else eod))
    inputs[:, 1:] = target[:, :-1]
    for begin, mark in marks:
        inputs.ravel()[begin] = mark
    return _batch(inputs, target, loss_mask, begins, counts, restart_positions)


def _batch(
    inputs: np.ndarray, targets: np.ndarray, loss_mask: np.ndarray, begins: np.ndarray, counts: np.ndarray,
    restart_positions: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of a batch, from where segments begin, bool [B, T], and the real targets of each row, int64 [B]."""
    length = begins.shape[1]
    begins[:, 0] = True
    segment_ids, positions = _segments(begins)
    batch = {"inputs": inputs, "targets": targets, "segment_ids": segment_ids, "positions": positions, "loss_mask": loss_mask}
    if (counts < length).any():
        padding = np.arange(length) >= counts[:, None]
        for array in batch.values():
            array[padding] = 0
    if not restart_positions:
        positions[:] = np.arange(length, dtype=np.int32)
    return batch


def _segments(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, int32 [B, T], from where segments begin; each row begins with one."""
    length, (borders,) = begins.shape[1], np.nonzero(begins.ravel())
    numbers = np.arange(1, borders.size + 1) - np.searchsorted(borders, borders // length * length)
    sizes = np.diff(borders, append=begins.size)
    segment_ids = np.repeat(numbers.astype(np.int32), sizes)
    positions = np.arange(begins.size, dtype=np.int32) - np.repeat(borders.astype(np.int32), sizes)
    return segment_ids.reshape(begins.shape), positions.reshape(begins.shape)
