"""Packing: windows of a cyclic token stream, or whole documents, become the arrays of a host batch.

`pack`: row i of an epoch has the `seq_length` stream tokens from phase + i * seq_length + 1 on as
    targets and the token before
each as input. The phase differs by epoch, so rows are cut elsewhere each time, and every token is a
target exactly once per epoch. `pack_documents`: a row has the documents that `bins` gives it, one
after the other, then padding.

The segment of a position is the document of its TARGET: the end-of-document token that ends one
document is, as input, the begin mark of the next and sits in its segment; a row of documents begins
with one too. Segments count from 1 within a row; 0 is padding, only ever at the row's end. The loss
mask is the shards' own, which is 1 where they have none. Where documents have no end mark (`eod:
none`), nothing announces a document's first token: its loss mask is 0, or, in a row of whole
documents, it is no target at all, only an input.
"""

import functools
import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.bins import Bins, targets
from data_pipeline.shards import TokenShards


class Windows(NamedTuple):
    """One row each, int64 [B]: index of its source, stream index of its first input, real targets
    (0: a row of padding)."""

    source: np.ndarray
    start: np.ndarray
    count: np.ndarray


class Part(NamedTuple):
    """What a host holds of a global batch: these rows, int64 [b], and of each these columns,
    without a step."""

    rows: np.ndarray
    columns: slice = slice(None)


def count_rows(num_tokens: int, seq_length: int) -> int:
    """Rows in one epoch; the last may be partly padding."""
    return -(-num_tokens // seq_length)


@functools.lru_cache(maxsize=4096)
def phase(seed: int, uid: str, epoch: int, num_tokens: int) -> int:
    """Stream index, in [0, num_tokens), of the first input of row 0 of an epoch."""
    digest = hashlib.blake2b(f"phase | {seed} | {uid} | {epoch}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_tokens


def pack(
    shards: Sequence[TokenShards], windows: Windows, length: int, restart_positions: bool, attend_across_documents: bool,
    columns: slice = slice(None),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Read B windows of `length` positions, of these the T `columns`, and build the arrays of a
    batch.

    Positions restart at 0 in every segment, or count on in the row; across documents, the whole row
    is one segment. Returns inputs, targets, segment_ids, positions (int32 [B, T]) and loss_mask
    (float32 [B, T], 1 where the target counts). Of the columns before, only where documents begin
    is read.
    """
    first, end, _ = columns.indices(length)
    tokens = np.empty((len(windows.start), end - first + 1), np.int32)
    begins = np.zeros(
        (len(tokens), end + 1), bool
    )  # tokens that begin a document, of the whole rows
    loss_mask = np.ones((len(tokens), end - first), np.float32)
    for source in dict.fromkeys(windows.source.tolist()):
        (rows,) = (windows.source == source).nonzero()
        borders = shards[source].fill(tokens, rows, windows.start[rows] + first)
        if first:
            borders = shards[source].borders(windows.start[rows], end + 1)
            borders += (rows - np.arange(len(rows)))[borders // (end + 1)] * (end + 1)
        begins.ravel()[borders] = True
        if shards[source].masked:
            loss_mask[rows] = shards[source].mask(windows.start[rows] + first + 1, end - first)
        if shards[source].manifest.eod == "none":
            loss_mask[rows] *= ~begins[rows, first + 1 :]
    inputs, target, begins = tokens[:, :-1].copy(), tokens[:, 1:].copy(), begins[:, 1:].copy()
    begins &= not attend_across_documents
    return _batch(inputs, target, loss_mask, begins, windows.count, restart_positions)


def pack_documents(
    shards: Sequence[TokenShards], bins: Sequence[Bins], source: np.ndarray, row: np.ndarray, length: int,
    restart_positions: bool, attend_across_documents: bool, columns: slice = slice(None),
) -> dict[str, np.ndarray]:  # fmt: skip
    """Read B rows of whole documents, of `length` positions the T `columns`, and build the arrays
    of a batch, as `pack` does.

    Row i is row `row[i]` of `bins[source[i]]`, both int64 [B]; one that is not there is padding.
    The rest of a row is padding.
    """
    first_column, end, _ = columns.indices(length)
    before = max(0, first_column - 1)  # its target is the first input
    shape = (len(row), end - before)
    inputs, target, loss_mask = (
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, np.float32),
    )
    begins, counts, marks = np.zeros((len(row), end), bool), np.zeros(len(row), np.int64), []
    for number in np.unique(source).tolist():
        reader, mine = shards[number], np.flatnonzero(source == number)
        offsets, documents = bins[number].documents(row[mine])
        first, sizes = targets(reader, documents)
        sizes = np.minimum(sizes, length)
        ends = np.concatenate([[0], np.cumsum(sizes)])
        counts[mine] = np.diff(ends[offsets])
        of_row, column = (
            np.repeat(mine, np.diff(offsets)),
            ends[:-1] - np.repeat(ends[offsets[:-1]], np.diff(offsets)),
        )
        skip = (before - column).clip(0, sizes)
        kept = (end - column).clip(0, sizes) - skip
        filled = (source == number)[:, None] & (np.arange(before, end) < counts[:, None])
        target[filled], loss_mask[filled] = reader.spans((first + skip)[kept > 0], kept[kept > 0])
        begins[of_row[column < end], column[column < end]] = not attend_across_documents
        of_row, column, first = (
            part[(column >= before) & (column < end)] for part in (of_row, column, first)
        )
        eod = reader.manifest.tokenizer["special_ids"]["eod"]
        mark = (
            reader.spans(first - 1, np.ones_like(first))[0]
            if reader.manifest.eod == "none"
            else eod
        )
        marks.append((of_row, column - before, mark))
    inputs[:, 1:] = target[:, :-1]
    for of_row, column, mark in marks:
        inputs[of_row, column] = mark
    inputs, target, loss_mask = (
        np.ascontiguousarray(part[:, first_column - before :])
        for part in (inputs, target, loss_mask)
    )
    return _batch(inputs, target, loss_mask, begins, counts, restart_positions)


def _batch(
    inputs: np.ndarray, targets: np.ndarray, loss_mask: np.ndarray, begins: np.ndarray, counts: np.ndarray,
    restart_positions: bool,
) -> dict[str, np.ndarray]:  # fmt: skip
    """The arrays of a batch, from where segments begin and the real targets of each row, int64 [B].

    `begins` is bool [B, end] where the others are [B, T]: these are the last T of its columns.
    """
    end = begins.shape[1]
    first = end - inputs.shape[1]
    begins[:, 0] = True
    segment_ids, positions = (np.ascontiguousarray(part[:, first:]) for part in _segments(begins))
    batch = {
        "inputs": inputs,
        "targets": targets,
        "segment_ids": segment_ids,
        "positions": positions,
        "loss_mask": loss_mask,
    }
    if (counts < end).any():
        padding = np.arange(first, end) >= counts[:, None]
        for array in batch.values():
            array[padding] = 0
    if not restart_positions:
        positions[:] = np.arange(first, end, dtype=np.int32)
    return batch


def _segments(begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Segment ids and positions, int32 [B, T], from where segments begin; each row begins with
    one."""
    length, (borders,) = begins.shape[1], begins.ravel().nonzero()
    numbers = np.arange(1, borders.size + 1) - borders.searchsorted(borders // length * length)
    sizes = np.append(borders[1:], begins.size) - borders
    segment_ids = numbers.astype(np.int32).repeat(sizes)
    positions = borders.astype(np.int32).repeat(sizes)
    np.subtract(np.arange(begins.size, dtype=np.int32), positions, out=positions)
    return segment_ids.reshape(begins.shape), positions.reshape(begins.shape)
