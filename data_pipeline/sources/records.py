"""Records: objects in JSON, which are the lines of a file, plain, .gz or .zst; the rows of a
Parquet file, whose name ends in .parquet; or the items of one list, in a file whose name ends in
.json."""

from collections.abc import Callable, Iterator
from typing import Any

from data_pipeline.sources import json_list, jsonl, parquet
from data_pipeline.sources.document import Document, Options, Piece, any_record
from data_pipeline.strict_json import loads

_PARQUET = ".parquet"


def find(pattern: str, options: Options, format: str) -> list[Piece]:
    """The files of a glob.

    Raises:
        DataError: none matches, or one is not Parquet though its name says so, or holds a list of
            something else than objects.
        UsageError: a package is needed and not installed.
    """
    pieces = []
    for piece in jsonl.find(pattern, options, format):
        if piece.path.endswith(_PARQUET):
            piece = parquet.find_records(piece, f"--{format} {pattern}")
        elif json_list.is_list(piece):
            piece = json_list.in_records(piece)
        pieces.append(piece)
    return pieces


def read(piece: Piece, parse: Callable[[list[bytes]], list[Document]]) -> Iterator[Document]:
    """See `jsonl.parse_records`, for the records of the piece."""

    def place(index: int, exactly: bool) -> str:
        del exactly
        return f"{piece.path}, row {piece.start + index}"

    if json_list.is_list(piece):
        return jsonl.parse_records(piece, json_list.records(piece), parse, place)
    if not piece.path.endswith(_PARQUET):
        return jsonl.read_lines(piece, parse)
    damage = parquet.errors_of_reading(piece)
    return jsonl.parse_records(piece, parquet.records(piece), parse, place, *damage)


def first_records(piece: Piece) -> Iterator[dict[str, Any]]:
    """The objects among the first records of a piece, to see what it holds; what can't be read is
    left to `read`."""
    if json_list.is_list(piece):
        yield from map(loads, json_list.records(piece))
        return
    if not piece.path.endswith(_PARQUET):
        yield from jsonl.first_records(piece)
        return
    try:
        for raw in parquet.records(piece):
            record = jsonl.parse_object(raw)
            if isinstance(record, dict):
                yield record
    except parquet.errors_of_reading(piece):
        return


def cut(piece: Piece, at: int) -> int | None:
    """The first record from `at` on; None: the file is compressed as a whole."""
    if piece.path.endswith(_PARQUET) or json_list.is_list(piece):
        return any_record(piece, at)
    return jsonl.cut(piece, at)
