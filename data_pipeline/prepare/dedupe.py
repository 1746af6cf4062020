"""Exact duplicates: which documents are the same as an earlier one, in memory that does not grow
with the input.

Each unit of work gets a file of the digests of its documents, as they are used: sorted, one of
each, and apart from them the documents that repeat another of the same unit. So a text is at most
once in a unit's table, however often it is in the input, and a range of digests is a slice of every
table. The ranges are compared one after the other; each leaves a file of the documents that repeat
one of an earlier unit. A unit's own table is made the same way, of sorted runs of its documents. In
the end each unit has a file that says which of its documents are left out. All files are written
atomically: what is there need not be done again.
"""

import bisect
import concurrent.futures
import hashlib
import itertools
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from data_pipeline.base.remote import RemotePath
from data_pipeline.shards import ATTEMPT, move_into, write_atomic
from data_pipeline.shards.files import map_read_only
from data_pipeline.sources.document import Document

DUPLICATE = "duplicate of an earlier document"
# Digests at a time, about: 70 bytes each while they are sorted or compared.
_COMPARED = 1 << 20
# Files that are sent to a URL, or fetched, at the same time.
_AT_ONCE = 8
# Of a place: unit << 32 | number of the document in it.
_PLACE_BITS = 32
_U8 = np.dtype("<u8")


class _Table(NamedTuple):
    """Sorted rows in a file, from byte `offset`: uint64 [count, 3], two halves of a digest and the
    place of its document."""

    path: Path
    count: int
    offset: int = 0

    @classmethod
    def write(cls, path: Path, rows: np.ndarray) -> Self:
        _sort(rows).tofile(path)
        return cls(path, len(rows))

    def cuts(self, borders: np.ndarray) -> list[int]:
        """Return where the rows of each range begin, and where the last range ends."""
        if not self.count:
            return [0] * (len(borders) + 2)
        halves = np.memmap(self.path, _U8, "r", self.offset, (self.count, 3))[:, 0]
        return [0, *(bisect.bisect_left(halves, border) for border in borders), self.count]

    def rows(self, first: int, last: int) -> np.ndarray:
        """Some of the rows: uint64 [n, 3]."""
        offset = self.offset + 24 * first
        return np.fromfile(self.path, _U8, 3 * (last - first), offset=offset).reshape(-1, 3)


class Digests(NamedTuple):
    """The digests of one unit: its file in `folder`, and what `compare` found out about it. Where
    work is done on several machines, all of them see the folder."""

    folder: Path | RemotePath
    number: int  # of the unit: earlier units have lower ones

    @property
    def path(self) -> Path | RemotePath:
        return self.folder / f"{self.number:05d}.digests"

    @property
    def base(self) -> int:
        """The place of its first document."""
        return self.number << _PLACE_BITS

    def save(self, documents: Iterable[Document]) -> None:
        """Write the file: how many documents and rows; a bit for each document, 1 if it repeats;
        the table of the rows."""
        # A folder of this attempt, for there may be another one at the same unit. For a URL: where
        # the system keeps temporary files.
        beside = None
        if isinstance(self.folder, Path):
            beside = self.folder
        with tempfile.TemporaryDirectory(prefix=ATTEMPT, dir=beside) as name:
            own = Path(name)
            runs = []
            count = 0
            for batch in itertools.batched(map(digest, documents), _COMPARED):
                rows = np.empty((len(batch), 3), _U8)
                rows[:, :2] = np.frombuffer(b"".join(batch), _U8).reshape(-1, 2)
                rows[:, 2] = np.arange(count, count + len(batch)) + self.base
                runs.append(_Table.write(own / str(len(runs)), rows))
                count += len(batch)
            repeated = np.zeros(-(-count // 64) * 64, bool)
            kept = 0
            with open(own / self.path.name, "wb") as file:
                file.seek(16 + len(repeated) // 8)
                for _, rows in _merged(runs):
                    again = _repeats(rows)
                    repeated[(rows[again, 2] - np.uint64(self.base)).astype(np.int64)] = True
                    file.write(rows[~again].tobytes())
                    kept += len(rows) - int(again.sum())
                file.seek(0)
                file.write(np.array([count, kept], _U8).tobytes() + np.packbits(repeated).tobytes())
                file.flush()
                os.fsync(file.fileno())
            move_into(self.folder, [own / self.path.name])

    @property
    def answer(self) -> Path | RemotePath:
        """A file: how many documents, then a bit for each, 1 if it repeats an earlier one, of this
        unit or another."""
        return self.path.with_suffix(".repeated")

    def repeated(self) -> bytes:
        """Return one byte for each document of the unit: 1 if the document repeats an earlier
        one.
        """
        content = np.frombuffer(self.answer.read_bytes(), np.uint8)
        return np.unpackbits(content[8:], count=int(content[:8].view(_U8)[0])).tobytes()


def digest(document: Document) -> bytes:
    """16 bytes of what a document teaches: its text; or its ids; or its spans, with what of them is
    a target; of a pair both, in order; and its number."""
    result = hashlib.blake2b(digest_size=16)
    if document.is_preference:
        result.update(repr((len(document.members), document.value)).encode())
    if document.spans is not None:
        for spans in document.members:
            for text, target in spans:
                data = text.encode()
                result.update(b"%d %d\0" % (target, len(data)) + data)
            if len(document.members) > 1:
                result.update(b"next\0")
    elif document.tokens is not None:
        result.update(np.ascontiguousarray(document.tokens, "<i8").data)
    else:
        result.update((document.text or "").encode())
    return result.digest()


def compare(folder: Path | RemotePath, num_units: int, here: Path) -> None:
    """Find the documents that repeat an earlier one, from the digests of all units of the folder;
    leaves the answer of each.

    `here`: a folder of this machine for what is compared; the same folder, if that is one.
    """
    units = [Digests(folder, number) for number in range(num_units)]
    names = {path.name for path in folder.iterdir()}
    here_already = {path.name for path in here.iterdir()}
    local = {unit: here / unit.path.name for unit in units}

    def fetch(path: RemotePath) -> None:
        path.download(here / path.name)

    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        missing = []
        for unit in units:
            path = unit.path
            if isinstance(path, RemotePath) and path.name not in here_already:
                missing.append(path)
        list(pool.map(fetch, missing))

        compared = {int(path.stem) for path in here.glob("*.repeats")}
        tables = [_table(path) for path in local.values()]
        for number, rows in _merged(tables, compared):
            repeats = np.sort(rows[_repeats(rows), 2])
            write_atomic(here / f"{number:05d}.repeats", repeats.tobytes())
        sizes = {path: path.stat().st_size for path in here.glob("*.repeats")}
        places = [map_read_only(path, size).view(_U8) for path, size in sizes.items() if size]

        def write_answer(unit: Digests) -> None:
            write_atomic(unit.answer, _answer(local[unit], unit.base, places))

        list(pool.map(write_answer, [unit for unit in units if unit.answer.name not in names]))


def _table(path: Path) -> _Table:
    """The table of a unit, of the local file of its digests."""
    count, kept = np.fromfile(path, _U8, 2).tolist()
    return _Table(path, kept, 16 + -(-count // 64) * 8)


def _answer(path: Path, base: int, places: list[np.ndarray]) -> bytes:
    """Return the content of an answer file, from the local file of a unit's digests and all sorted
    places that ranges found.
    """
    (count,) = np.fromfile(path, _U8, 1).tolist()
    flags = np.unpackbits(np.fromfile(path, np.uint8, -(-count // 8), offset=16), count=count)
    for found in places:
        first, last = found.searchsorted(np.array([base, base + (1 << _PLACE_BITS)], _U8))
        flags[(found[first:last] - np.uint64(base)).astype(np.int64)] = 1
    return np.array([count], _U8).tobytes() + np.packbits(flags).tobytes()


def _merged(tables: list[_Table], done: Iterable[int] = ()) -> Iterator[tuple[int, np.ndarray]]:
    """All rows of some tables, sorted, in ranges of similar size: number of the range, uint64 [n,
    3]; without those `done`."""
    num_ranges = max(1, -(-sum(table.count for table in tables) // _COMPARED))
    borders = np.array([(2**64 * number) // num_ranges for number in range(1, num_ranges)], _U8)
    cuts = [table.cuts(borders) for table in tables]
    for number in sorted({*range(num_ranges)} - {*done}):
        parts = [table.rows(*places[number : number + 2]) for table, places in zip(tables, cuts)]
        yield number, _sort(np.concatenate([np.empty((0, 3), _U8), *parts]))


def _sort(rows: np.ndarray) -> np.ndarray:
    """Rows by digest and, of equal ones, by place."""
    return rows[np.lexsort((rows[:, 2], rows[:, 1], rows[:, 0]))]


def _repeats(rows: np.ndarray) -> np.ndarray:
    """Return which of the sorted rows have the digest of the row before: bool [n]."""
    again = np.zeros(len(rows), bool)
    again[1:] = (rows[1:, :2] == rows[:-1, :2]).all(axis=1)
    return again
