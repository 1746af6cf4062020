"""What formats of ids share, text that was turned into tokens elsewhere: the tokenizer that it needs, and checks of ids."""

import os

import numpy as np

from data_pipeline.errors import DataError, UsageError
from data_pipeline.sources.document import EMPTY, Document, Options, Piece


def need_tokenizer(option: str, options: Options) -> None:
    """UsageError: no tokenizer was given that exists already."""
    if options.vocab_size is None:
        raise UsageError(
            f"{option}: holds the ids of a tokenizer, so it can't be read by one that is trained here, or not named. "
            "Give --tokenizer the tokenizer.json that they were made with."
        )


def mapped(path: str, dtype: np.dtype) -> np.ndarray:
    """The ids of a file [T], mapped into memory. DataError: it ends within an id."""
    size = os.path.getsize(path)
    if size % dtype.itemsize:
        raise DataError(
            f"{path}: has {size} bytes, which are no whole number of {dtype.name} ids: cut short, or of another type. "
            "Restore it from a copy, or make it again."
        )
    return np.memmap(path, dtype, "r") if size else np.empty(0, dtype)


def document(piece: Piece, ids: np.ndarray, where: str, offset: int) -> list[Document]:
    """The document of ids [T] that begin at byte `offset`, if it belongs to the piece's part. DataError: an id too large."""
    vocab_size = piece.options.vocab_size or 0
    if len(ids) and (ids.max() >= vocab_size or ids.min() < 0):
        at = int(np.argmax((ids >= vocab_size) | (ids < 0)))
        raise DataError(
            f"{piece.path}: id {ids[at]} at byte {offset + at * ids.itemsize} is outside [0, {vocab_size}), the tokenizer's "
            "vocabulary. Give --tokenizer the one that these ids belong to."
        )
    tokens = ids.astype("<i4")
    document = Document(None, where, tokens=tokens) if len(ids) else Document(None, where, EMPTY)
    return [document] if piece.holds(tokens.tobytes()) else []
