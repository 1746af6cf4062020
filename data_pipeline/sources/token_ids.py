"""Common parts of formats with token ids, text that was tokenized elsewhere: the tokenizer that
they need, and checks of ids.
"""

import os
from typing import Any, BinaryIO

import numpy as np

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.base.remote import RemotePath, is_url
from data_pipeline.sources.document import EMPTY, Document, InputOptions, InputRange
from data_pipeline.sources.reading import open_file


def need_tokenizer(option: str, options: InputOptions) -> None:
    """UsageError: no tokenizer was given that exists already."""
    if options.vocab_size is None:
        raise UsageError(
            f"{option}: the files hold token ids, so they need the tokenizer that made them. "
            "Give --tokenizer the path of its tokenizer.json."
        )


class RemoteArray:
    """A row of numbers in a file behind a URL, read where it is looked at: what is used here of a
    mapped array."""

    def __init__(self, file: BinaryIO, dtype: np.dtype, start: int, count: int):
        self._file = file
        self._start = start
        self._count = count
        self.dtype = dtype
        self.itemsize = dtype.itemsize
        self.nbytes = dtype.itemsize * count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, which: int | slice) -> Any:
        if not isinstance(which, slice):
            return self[which % self._count : which % self._count + 1][0]
        first, last, _ = which.indices(self._count)
        self._file.seek(self._start + first * self.itemsize)
        return np.frombuffer(self._file.read(max(last - first, 0) * self.itemsize), self.dtype)


def numbers(piece: InputRange, path: str, dtype: np.dtype | str, start: int, count: int) -> Any:
    """`count` numbers from byte `start` of a file of a piece on, mapped into memory or a
    `RemoteArray`."""
    if is_url(path):
        # The stamp is that of the piece's own file, not of one beside it.
        stamp = ""
        if path == piece.path:
            stamp = piece.stamp
        return RemoteArray(open_file(path, stamp), np.dtype(dtype), start, count)
    if not count:
        return np.empty(0, dtype)
    return np.memmap(path, dtype, "r", start, (count,))


def file_size(path: str) -> int:
    """Bytes of a file, wherever it is. FileNotFoundError: it is not there."""
    if is_url(path):
        return RemotePath(path).found().size
    return os.path.getsize(path)


def ids(piece: InputRange, dtype: np.dtype) -> Any:
    """The ids of a file [T], see `numbers`. DataError: it ends within an id."""
    path = piece.path
    size = file_size(path)
    if size % dtype.itemsize:
        rule = f"has {size} bytes, which are no whole number of {dtype.name} ids"
        fix = "Restore it from a copy, or make it again"
        raise DataError(f"{path}: {rule}: cut short, or of another type. {fix}.")
    return numbers(piece, path, dtype, 0, size // dtype.itemsize)


def document(piece: InputRange, ids: np.ndarray, where: str, offset: int) -> list[Document]:
    """The document of ids [T] that begin at byte `offset`, if it belongs to the piece's part.
    DataError: an id too large."""
    vocab_size = piece.options.vocab_size or 0
    if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
        at = int(np.argmax((ids >= vocab_size) | (ids < 0)))
        what = f"id {ids[at]} at byte {offset + at * ids.itemsize}"
        raise DataError(
            f"{piece.path}: {what} is outside [0, {vocab_size}), the tokenizer's vocabulary. "
            "Give --tokenizer the tokenizer that made these ids."
        )
    tokens = ids.astype("<i4")
    if not piece.holds(tokens.tobytes()):
        return []
    if not len(ids):
        return [Document(None, where, EMPTY)]
    return [Document(None, where, tokens=tokens)]
