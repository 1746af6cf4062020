"""Records: objects in JSON, which are the lines of a file, plain, .gz or .zst, or the rows of a
Parquet file, whose name ends in .parquet."""

from collections.abc import Callable, Iterator
from typing import Any

from data_pipeline.sources import jsonl, parquet
from data_pipeline.sources.document import Document, Options, Piece, any_record

_PARQUET = ".parquet"


def find(pattern: str, options: Options, format: str) -> list[Piece]:
    """The files of a glob.

    Raises:
        DataError: none matches, or one is not Parquet though its name says so.
        UsageError: a package is needed and not installed.
    """
    pieces = []
    for piece in jsonl.find(pattern, options, format):
        if piece.path.endswith(_PARQUET):
            piece = parquet.find_records(piece, f"--{format} {pattern}")
        pieces.append(piece)
    return pieces


def read(piece: Piece, parse: Callable[[list[bytes]], list[Document]]) -> Iterator[Document]:
    """See `jsonl.parse_records`, for the records of the piece."""
    if not piece.path.endswith(_PARQUET):
        return jsonl.read_lines(piece, parse)

    def place(index: int, exactly: bool) -> str:
        del exactly
        return f"{piece.path}, row {piece.start + index}"

    damage = parquet.errors_of_reading(piece)
    return jsonl.parse_records(piece, parquet.records(piece), parse, place, *damage)


def first_records(piece: Piece) -> Iterator[dict[str, Any]]:
    """The objects among the first records of a piece, to see what it holds; what can't be read is
    left to `read`."""
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
    if piece.path.endswith(_PARQUET):
        return any_record(piece, at)
    return jsonl.cut(piece, at)
