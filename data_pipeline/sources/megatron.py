"""Megatron-LM's indexed data sets: ids in a .bin, and beside it an .idx that says where sequences
and documents begin.

The .idx, little-endian: "MMIDIDX\\0\\0", uint64 version 1, uint8 type of the ids, uint64 S
sequences, uint64 D; int32 tokens of each sequence [S]; int64 byte offset of each [S]; int64 first
sequence of each document, then S [D]; for images also int8 [S].
"""

import os
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import place
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    any_record,
    find_files,
)
from data_pipeline.sources.reading import open_file
from data_pipeline.sources.token_ids import document, file_size, ids, need_tokenizer, numbers

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}


class _Index(NamedTuple):
    """An .idx, mapped into memory, and the ids it belongs to."""

    path: str
    sizes: Any  # int32 [S]
    pointers: Any  # int64 [S]
    firsts: Any  # int64 [D]
    tokens: Any  # [T]


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The data sets of a glob of .bin or .idx, or of their common prefix, in documents.

    DataError: an .idx is missing, damaged or of another version. UsageError: no tokenizer.
    """
    need_tokenizer(f"--megatron {pattern}", options)
    prefix = pattern.removesuffix(".bin").removesuffix(".idx")
    pieces = []
    files = f"{prefix}.bin"
    if os.path.isdir(prefix):
        files = prefix
    for piece in find_files(files, "megatron", options, ".bin"):
        index = _open(piece)
        count = len(index.firsts) - 1
        scale = piece.size / max(count, 1)
        pieces.append(piece._replace(stop=count, scale=scale, beside=(index.path,)))
    return pieces


def _open(piece: InputRange) -> _Index:
    path = piece.path
    index = path.removesuffix(".bin") + ".idx"
    if not place(index).exists():
        fix = "Name a data set of Megatron's preprocess_data.py"
        raise DataError(f"{path}: has no {os.path.basename(index)} beside it. {fix}.")
    with open_file(index) as file:
        header = file.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise _damaged(index, f"does not begin with {_MAGIC!r} and counts")
    _, version, code, sequences, documents = _HEADER.unpack(header)
    readable = f"this program reads version 1 and types {sorted(_TYPES)}"
    if version != 1:
        raise DataError(f"{index}: has version {version}, but {readable}. Make it with those.")
    if code not in _TYPES:
        raise DataError(f"{index}: has ids of type {code}, but {readable}. Make it with those.")
    at = _HEADER.size
    size = file_size(index)
    expected = at + 12 * sequences + 8 * documents
    if size not in (expected, expected + sequences):
        raise _damaged(index, f"has {size} bytes, but its counts ask for {expected}")
    if not sequences or not documents:
        raise _damaged(
            index, f"counts {sequences} sequences and {documents} first sequences of documents"
        )
    sizes = numbers(piece, index, "<i4", at, sequences)
    pointers = numbers(piece, index, "<i8", at + 4 * sequences, sequences)
    firsts = numbers(piece, index, "<i8", at + 12 * sequences, documents)
    if firsts[0] != 0 or firsts[-1] != sequences:
        what = f"lists documents from sequence {firsts[0]} to {firsts[-1]}"
        raise _damaged(index, f"{what}, but there are 0 to {sequences}")
    if size > expected and numbers(piece, index, "i1", expected, sequences)[:].any():
        raise DataError(f"{index}: some sequences are not text. Make it again without them.")
    return _Index(index, sizes, pointers, firsts, ids(piece, np.dtype(_TYPES[code])))


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the piece that belong to its part, without their end marks. DataError: damage,
    or an id too large."""
    index = _open(piece)
    for number in range(piece.start, piece.stop):
        first, last = index.firsts[number : number + 2].tolist()
        if not 0 <= first <= last <= len(index.sizes):
            what = f"document {number} is sequences {first} to {last} of {len(index.sizes)}"
            raise _damaged(index.path, what)
        parts = [_sequence(index, at) for at in range(first, last)]
        if len(parts) == 1:
            tokens = parts[0]
        else:
            tokens = np.concatenate([index.tokens[:0], *parts])
        if len(tokens) and tokens[-1] == piece.options.eod_id:
            tokens = tokens[:-1]
        offset = 0
        if len(tokens):
            offset = int(index.pointers[first])
        yield from document(piece, tokens, f"{piece.path}, document {number}", offset)


def _sequence(index: _Index, number: int) -> np.ndarray:
    """Ids of a sequence [T]."""
    size = int(index.sizes[number])
    pointer = int(index.pointers[number])
    first, rest = divmod(pointer, index.tokens.itemsize)
    if rest or size < 0 or not 0 <= first <= first + size <= len(index.tokens):
        what = f"sequence {number} is {size} tokens from byte {pointer}, outside the .bin"
        raise _damaged(index.path, what)
    return index.tokens[first : first + size]


def _damaged(index: str, what: str) -> DataError:
    return DataError(
        f"{index}: {what}: damaged, or of another format. Restore it from a copy, or make it again."
    )


FORMAT = Format(
    "megatron", "PREFIX", "Megatron-LM's indexed data sets of token ids, a .bin and an .idx each; "
    "globs too",
    "--megatron 'web_text_document' --tokenizer path/to/tokenizer.json --holdout 0.001", find,
    documents, any_record,
)  # fmt: skip
