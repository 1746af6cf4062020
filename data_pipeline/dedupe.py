"""Exact duplicates: which documents are the same as an earlier one, in memory that does not grow with the input.

Each unit of work gets a file of the digests of its documents, as they are used: sorted, one of each, and apart from them the
documents that repeat another of the same unit. So a text is at most once in a unit's table, however often it is in the input,
and a range of digests is a slice of every table. The ranges are compared one after the other; each leaves a file of the
documents that repeat one of an earlier unit. All files are written atomically: what is there need not be done again.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data_pipeline.shards import write_atomic
from data_pipeline.sources.document import Document

DUPLICATE = "duplicate of an earlier document"
_COMPARED = 1 << 22  # digests at a time, about: 48 bytes each while they are compared
_PLACE_BITS = 32  # of a place: unit << 32 | number of the document in it
_U8 = np.dtype("<u8")


class Digests(NamedTuple):
    """The digests of one unit: its file in `folder`, and what `compare` found out about it."""

    folder: Path
    number: int  # of the unit: earlier units have lower ones

    @property
    def path(self) -> Path:
        return self.folder / f"{self.number:05d}.digests"

    def save(self, documents: Iterable[Document]) -> None:
        """Write the file: how many repeat another, how many do not; the numbers of the first; a table of the others.

        The table is uint64 [n, 3], sorted: two halves of a digest, and the number of its first document.
        """
        digests = bytearray()
        for document in documents:
            digests += digest(document)
        halves = np.frombuffer(digests, _U8).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: of equal ones the first comes first
        halves = halves[order]
        again = _repeats(halves)
        table = np.column_stack([halves[~again], order[~again].astype(_U8)])
        header = np.array([again.sum(), len(table)], _U8)
        write_atomic(self.path, b"".join(a.astype(_U8).tobytes() for a in (header, np.sort(order[again]), table)))

    def table(self, first: int = 0, last: int | None = None) -> np.ndarray:
        """Rows of the table: uint64 [n, 3]."""
        repeated, count = np.fromfile(self.path, _U8, 2).tolist()
        rows = (count if last is None else last) - first
        return np.fromfile(self.path, _U8, 3 * rows, offset=8 * (2 + repeated + 3 * first)).reshape(-1, 3)

    def repeated(self) -> bytes:
        """One byte for each document of the unit: 1 if it repeats an earlier one, of this unit or another."""
        repeated, count = np.fromfile(self.path, _U8, 2).tolist()
        flags = np.zeros(repeated + count, np.uint8)
        flags[np.fromfile(self.path, _U8, repeated, offset=16).astype(np.int64)] = 1
        base = self.number << _PLACE_BITS
        for path in self.folder.glob("*.repeats"):
            if path.stat().st_size:
                places = np.memmap(path, _U8, "r")
                first, last = places.searchsorted(np.array([base, base + (1 << _PLACE_BITS)], _U8))
                flags[(places[first:last] - np.uint64(base)).astype(np.int64)] = 1
        return flags.tobytes()


def digest(document: Document) -> bytes:
    """16 bytes of what a document teaches: its text; or its ids; or its spans, with what of them is a target."""
    result = hashlib.blake2b(digest_size=16)
    if document.spans is not None:
        for text, target in document.spans:
            data = text.encode()
            result.update(b"%d %d\0" % (target, len(data)) + data)
    elif document.tokens is not None:
        result.update(np.ascontiguousarray(document.tokens, "<i8").data)
    else:
        result.update((document.text or "").encode())
    return result.digest()


def compare(folder: Path, num_units: int) -> None:
    """Find the documents that repeat one of an earlier unit, from the digests of all units of the folder."""
    units = [Digests(folder, number) for number in range(num_units)]
    num_digests = sum(int(np.fromfile(unit.path, _U8, 2)[1]) for unit in units)
    num_ranges = max(1, -(-num_digests // _COMPARED))
    todo = {number: path for number in range(num_ranges) if not (path := folder / f"{number:05d}.repeats").exists()}
    if not todo:
        return
    borders = np.array([(2**64 * number) // num_ranges for number in range(1, num_ranges)], _U8)
    firsts = (unit.table()[:, 0] for unit in units)
    cuts = np.array([[0, *first.searchsorted(borders), len(first)] for first in firsts], int).reshape(-1, num_ranges + 1)
    for number, path in todo.items():
        parts = [np.empty((0, 3), _U8)]
        for unit, (first, last) in zip(units, cuts[:, number : number + 2].tolist()):
            part = unit.table(first, last)
            part[:, 2] |= np.uint64(unit.number << _PLACE_BITS)
            parts.append(part)
        rows = np.concatenate(parts)
        rows = rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]
        write_atomic(path, np.sort(rows[_repeats(rows[:, :2]), 2]).tobytes())


def _repeats(halves: np.ndarray) -> np.ndarray:
    """Which digests, sorted, uint64 [n, 2], are equal to the one before: bool [n]."""
    again = np.zeros(len(halves), bool)
    again[1:] = (halves[1:] == halves[:-1]).all(axis=1)
    return again
