"""Records: objects in JSON, which are the lines of a file, plain, .gz or .zst; the rows of a
Parquet or Arrow file, whose name ends in .parquet or .arrow, or of a folder that Hugging Face's
save_to_disk made; or the items of one list, in a file whose name ends in .json."""

from collections.abc import Callable, Iterator
from pathlib import PurePath
from types import ModuleType
from typing import Any

from data_pipeline.base.strict_json import loads
from data_pipeline.sources import arrow, json_list, jsonl, parquet
from data_pipeline.sources.document import Document, InputOptions, InputRange, any_record

# The modules that read rows of columns, by the ends of files' names.
_OF_COLUMNS: dict[str, ModuleType] = {".parquet": parquet, ".arrow": arrow}


def find(pattern: str, options: InputOptions, format: str) -> list[InputRange]:
    """The files of a glob, or of a folder that save_to_disk made.

    Raises:
        DataError: none matches, or one is not Parquet or Arrow though its name says so, or holds a
            list of something else than objects, or the folder has several splits.
        UsageError: a package is needed and not installed.
    """
    pieces = []
    found = arrow.saved_files(pattern, options, format) or jsonl.find(pattern, options, format)
    for piece in found:
        of_columns = _of_columns(piece)
        if of_columns:
            piece = of_columns.find_records(piece, f"--{format} {pattern}")
        elif json_list.is_list(piece):
            piece = json_list.in_records(piece)
        pieces.append(piece)
    return pieces


def read(piece: InputRange, parse: Callable[[list[bytes]], list[Document]]) -> Iterator[Document]:
    """See `jsonl.parse_records`, for the records of the piece."""

    def place(index: int, exactly: bool) -> str:
        del exactly
        return f"{piece.path}, row {piece.start + index}"

    if json_list.is_list(piece):
        return jsonl.parse_records(piece, json_list.records(piece), parse, place)
    of_columns = _of_columns(piece)
    if not of_columns:
        return jsonl.read_lines(piece, parse)
    damage = of_columns.errors_of_reading(piece)
    return jsonl.parse_records(piece, of_columns.records(piece), parse, place, *damage)


def _of_columns(piece: InputRange) -> ModuleType | None:
    """The module that reads the rows of a file; None: its records are lines or a list."""
    return _OF_COLUMNS.get(PurePath(piece.path).suffix)


def first_records(piece: InputRange) -> Iterator[dict[str, Any]]:
    """The objects among the first records of a piece, to see what it holds; what can't be read is
    left to `read`."""
    if json_list.is_list(piece):
        yield from map(loads, json_list.records(piece))
        return
    of_columns = _of_columns(piece)
    if not of_columns:
        yield from jsonl.first_records(piece)
        return
    try:
        for raw in of_columns.records(piece):
            record = jsonl.parse_object(raw)
            if isinstance(record, dict):
                yield record
    except of_columns.errors_of_reading(piece):
        return


def cut(piece: InputRange, at: int) -> int | None:
    """The first record from `at` on; None: the file is compressed as a whole."""
    if _of_columns(piece) or json_list.is_list(piece):
        return any_record(piece, at)
    return jsonl.cut(piece, at)
