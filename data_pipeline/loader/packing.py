"""Packing: windows of a cyclic token stream, or whole documents, become the arrays of a host batch.

`pack`: row i of an epoch has the `seq_length` stream tokens from phase + i * seq_length + 1 on as
targets and the token before each as input. The phase differs by epoch, so rows are cut elsewhere
each time, and every token is a target exactly once per epoch. `pack_documents`: a row has the
documents that `bins` gives it, one after the other, then padding. `fold_documents` puts documents
that have a row each into rows that they share; documents that belong together (pairs) have one row
before, and stay together. Each document is a segment of its own.

Where documents have end marks (`eod: append`), the segment of a position is the document of its
TARGET: the end-of-document token that ends one document is, as input, the begin mark of the next
and sits in its segment; a row of documents begins with one too. Where they have none (`eod: none`),
it is the document of its INPUT, so that a segment begins with the first token of its document and
no token of another. Nothing predicts that first token: as a target, beside the last input of the
document before, its loss mask is 0.

Segments count from 1 within a row; 0 is padding, only ever at the row's end. The loss mask is the
shards' own, which is 1 where they have none.
"""

import functools
import hashlib
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from data_pipeline.plan.document_packing import Bins
from data_pipeline.shards import TokenShards, ranges

# The array of a batch with the numbers that documents have in the shards: labels, or margins.
VALUE = "value"
# Of each target, where it lies in the streams of its sources; 0: in none.
PLACE = "place"
# What every batch has; each other array has a number of each position's document.
_PLAIN = frozenset({"inputs", "targets", "segment_ids", "positions", "loss_mask"})


class Windows(NamedTuple):
    """Rows of a batch, each int64 [B]: index of the source, stream index of the first input, number
    of real targets (0 for a padding row).
    """

    source: np.ndarray
    start: np.ndarray
    count: np.ndarray


class HostSlice(NamedTuple):
    """The part of a global batch that a host holds: these rows, int64 [b], and these columns of
    each, without a step.
    """

    rows: np.ndarray
    columns: slice = slice(None)


def count_rows(num_tokens: int, seq_length: int) -> int:
    """Rows in one epoch; the last may be partly padding."""
    return -(-num_tokens // seq_length)


@functools.lru_cache(maxsize=4096)
def phase(seed: int, uid: str, epoch: int, num_tokens: int) -> int:
    """Stream index, in [0, num_tokens), of the first input of row 0 of an epoch."""
    identity = f"phase | {seed} | {uid} | {epoch}"
    digest = hashlib.blake2b(identity.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") % num_tokens


def pack(
    shards: Sequence[TokenShards],
    windows: Windows,
    length: int,
    restart_positions: bool,
    attend_across_documents: bool,
    columns: slice = slice(None),
) -> dict[str, np.ndarray]:
    """Read B windows of `length` positions, of these the T `columns`, and build the arrays of a
    batch.

    Positions restart at 0 in every segment, or count on in the row; across documents, the whole row
    is one segment. Returns inputs, targets, segment_ids, positions (int32 [B, T]) and loss_mask
    (float32 [B, T], 1 where the target counts). Of the columns before, only where documents begin
    is read.
    """
    first, end, _ = columns.indices(length)
    num_rows = len(windows.start)
    tokens = np.empty((num_rows, end - first + 1), np.int32)
    loss_mask = np.ones((num_rows, end - first), np.float32)
    # Which tokens begin a document, in all columns up to the last that is wanted, and one more.
    begins = np.zeros((num_rows, end + 1), bool)
    has_marks = np.ones(num_rows, bool)
    for source in dict.fromkeys(windows.source.tolist()):
        reader = shards[source]
        (rows,) = (windows.source == source).nonzero()
        starts = windows.start[rows]
        borders = reader.fill(tokens, rows, starts + first)
        if first:
            # Segments count from the row's first column on, so all its borders are needed. They
            # come as if these rows stood one below the other: each moves down to its own row.
            borders = reader.borders(starts, end + 1)
            rows_below = rows - np.arange(len(rows))
            borders += rows_below[borders // (end + 1)] * (end + 1)
        begins.ravel()[borders] = True
        if reader.masked:
            loss_mask[rows] = reader.mask(starts + first + 1, end - first)
        if reader.manifest.eod == "none":
            has_marks[rows] = False
            loss_mask[rows] *= ~begins[rows, first + 1 :]
    inputs = tokens[:, :-1].copy()
    targets = tokens[:, 1:].copy()
    # With an end mark a segment begins where its first target is, else where its first input is.
    begins = np.where(has_marks[:, None], begins[:, 1:], begins[:, :-1])
    begins &= not attend_across_documents
    return _batch(inputs, targets, loss_mask, begins, windows.count, restart_positions)


def pack_documents(
    shards: Sequence[TokenShards],
    bins: Sequence[Bins],
    source: np.ndarray,
    row: np.ndarray,
    length: int,
    restart_positions: bool,
    attend_across_documents: bool,
    columns: slice = slice(None),
    numbers: Mapping[str, Sequence[np.ndarray]] = MappingProxyType({}),
    begins_of_sources: np.ndarray | None = None,
) -> dict[str, np.ndarray]:
    """Read B rows of whole documents, of `length` positions the T `columns`, and build the arrays
    of a batch, as `pack` does.

    Row i is row `row[i]` of `bins[source[i]]`, both int64 [B]; one that is not there is padding.
    The rest of a row is padding. Where the documents of the sources have numbers, there is also
    value, float32 [B, T]: that of each position's document. So is each of `numbers`, by its name,
    which has those of all documents of each source, float32 [num_documents]. With
    `begins_of_sources`, int64, there is also place, int64 [B, T]: 1 + the number of each target in
    the stream of its source, whose first token has the number that is given; 0 in padding.
    """
    first_column, end, _ = columns.indices(length)
    # A column more on either side, if there is one: with an end mark an input is the target before
    # it, without one a target is the input behind it.
    before = max(0, first_column - 1)
    after = min(length, end + 1)
    shape = (len(row), after - before)
    tokens = np.zeros(shape, np.int32)
    # Of each token: whether it is learnt, and whether a document begins with it, or goes on.
    learnt = np.zeros(shape, np.float32)
    is_first = np.zeros((len(row), after), bool)
    goes_on = np.zeros(shape, bool)
    counts = np.zeros(len(row), np.int64)
    has_marks = np.ones(len(row), bool)
    marks = np.zeros(len(row), np.int32)
    names = [*numbers, *([VALUE] if shards[0].valued else [])]
    more: dict[str, np.ndarray] = {name: np.zeros(shape, np.float32) for name in names}
    if begins_of_sources is not None:
        more[PLACE] = np.zeros(shape, np.int64)
    for number in np.unique(source).tolist():
        reader = shards[number]
        is_mine = source == number
        mine = np.flatnonzero(is_mine)
        offsets, documents = bins[number].documents(row[mine])
        first, sizes = reader.documents(documents)
        sizes = np.minimum(sizes, length)

        # Of each document: its row in the batch, and the column of its first token.
        ends = np.concatenate([[0], np.cumsum(sizes)])
        counts[mine] = np.diff(ends[offsets])
        in_each_row = np.diff(offsets)
        of_row = np.repeat(mine, in_each_row)
        column = ends[:-1] - np.repeat(ends[offsets[:-1]], in_each_row)

        # The tokens that lie in the columns wanted.
        skip = (before - column).clip(0, sizes)
        kept = (after - column).clip(0, sizes) - skip
        some = kept > 0
        filled = is_mine[:, None] & (np.arange(before, after) < counts[:, None])
        tokens[filled], learnt[filled] = reader.spans((first + skip)[some], kept[some])
        for name, array in more.items():
            if name == PLACE:
                array[filled] = 1 + ranges((first + skip)[some], kept[some])
            else:
                of_documents = _of_documents(name, reader, number, documents, numbers)
                array[filled] = np.repeat(of_documents, kept)
        if begins_of_sources is not None:
            more[PLACE][filled] += begins_of_sources[number]

        is_inside = column < after
        is_first[of_row[is_inside], column[is_inside]] = True
        goes_on |= filled & ~is_first[:, before:]
        if reader.manifest.eod == "none":
            has_marks[mine] = False
        else:
            marks[mine] = reader.manifest.tokenizer["special_ids"]["eod"]

    previous = np.zeros_like(tokens)
    previous[:, 1:] = tokens[:, :-1]
    marked = np.where(is_first[:, before:], marks[:, None], previous)
    inputs = np.where(has_marks[:, None], marked, tokens)
    targets = _as_targets(tokens, has_marks, goes_on)
    loss_mask = _as_targets(learnt, has_marks, goes_on)
    if PLACE in more:
        more[PLACE] = _as_targets(more[PLACE], has_marks, goes_on)

    def wanted(array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array[:, first_column - before : end - before])

    inputs, targets, loss_mask = map(wanted, (inputs, targets, loss_mask))
    more = {name: wanted(array) for name, array in more.items()}
    begins = is_first[:, :end].copy()
    begins &= not attend_across_documents
    return _batch(inputs, targets, loss_mask, begins, counts, restart_positions, more)


def _of_documents(
    name: str,
    reader: TokenShards,
    source: int,
    documents: np.ndarray,
    numbers: Mapping[str, Sequence[np.ndarray]],
) -> np.ndarray:
    """The numbers by this name that documents of a source have, float32 [documents]."""
    if name == VALUE:
        return reader.values(documents)
    return numbers[name][source][documents]


def _as_targets(array: np.ndarray, has_marks: np.ndarray, goes_on: np.ndarray) -> np.ndarray:
    """Move what belongs to tokens [B, T] to the positions that have these tokens as targets.

    In rows with end marks, bool [B], these are the positions of the tokens. In others they are
    those before, and a token with which no document goes on, bool [B, T], is no target.
    """
    behind = np.zeros_like(array)
    behind[:, :-1] = np.where(goes_on[:, 1:], array[:, 1:], 0)
    return np.where(has_marks[:, None], array, behind)


def fold_documents(
    documents: dict[str, np.ndarray],
    sizes: np.ndarray,
    row: np.ndarray,
    column: np.ndarray,
    shape: tuple[int, int],
    restart_positions: bool,
    attend_across_documents: bool,
    columns: slice = slice(None),
) -> dict[str, np.ndarray]:
    """Put documents that have a row each into rows that they share, and build the arrays of a
    batch, as `pack` does.

    A row may have several documents that belong together: they are moved as one, and each begins a
    segment.

    Args:
        documents: the arrays [n, t] of `pack_documents`.
        sizes: int64 [n], positions of each of these rows that are not padding.
        row, column: int64 [n], where each begins.
        shape: rows and positions of the batch; what no document fills is padding.
        restart_positions, attend_across_documents, columns: as for `pack`.
    """
    num_rows, length = shape
    width = documents["inputs"].shape[1]
    from_where = ranges(np.arange(len(sizes)) * width, sizes)
    to_where = ranges(row * length + column, sizes)

    def folded(name: str) -> np.ndarray:
        array = np.zeros(num_rows * length, documents[name].dtype)
        array[to_where] = documents[name].ravel()[from_where]
        return np.ascontiguousarray(array.reshape(shape)[:, columns])

    _, end, _ = columns.indices(length)
    begins_before = np.zeros(documents["segment_ids"].shape, bool)
    if width:
        begins_before[:, 0] = not attend_across_documents
    begins_before[:, 1:] = np.diff(documents["segment_ids"], axis=1) > 0
    begins = np.zeros(num_rows * length, bool)
    begins[to_where] = begins_before.ravel()[from_where]
    begins = begins.reshape(shape)
    counts = np.bincount(row, sizes, num_rows).astype(np.int64)
    more = {name: folded(name) for name in documents.keys() - _PLAIN}
    return _batch(
        folded("inputs"),
        folded("targets"),
        folded("loss_mask"),
        begins[:, :end].copy(),
        counts,
        restart_positions,
        more,
    )


def _batch(
    inputs: np.ndarray,
    targets: np.ndarray,
    loss_mask: np.ndarray,
    begins: np.ndarray,
    counts: np.ndarray,
    restart_positions: bool,
    more: Mapping[str, np.ndarray] = MappingProxyType({}),
) -> dict[str, np.ndarray]:
    """The arrays of a batch, from where segments begin and how many positions of each row are not
    padding, int64 [B].

    `begins` is bool [B, end] where the others are [B, T]: these are the last T of its columns.
    `more`: further arrays of each position, by their names.
    """
    end = begins.shape[1]
    first = end - inputs.shape[1]
    begins[:, 0] = True
    segment_ids, positions = _segments(begins)
    positions = np.ascontiguousarray(positions[:, first:])
    batch = {
        "inputs": inputs,
        "targets": targets,
        "segment_ids": np.ascontiguousarray(segment_ids[:, first:]),
        "positions": positions,
        "loss_mask": loss_mask,
    }
    batch |= more
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
    length = begins.shape[1]
    (borders,) = begins.ravel().nonzero()
    row_starts = borders // length * length
    numbers = np.arange(1, borders.size + 1) - borders.searchsorted(row_starts)
    sizes = np.append(borders[1:], begins.size) - borders
    segment_ids = numbers.astype(np.int32).repeat(sizes)
    positions = borders.astype(np.int32).repeat(sizes)
    np.subtract(np.arange(begins.size, dtype=np.int32), positions, out=positions)
    return segment_ids.reshape(begins.shape), positions.reshape(begins.shape)
