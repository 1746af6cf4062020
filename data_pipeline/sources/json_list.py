"""Files that hold one JSON list of objects, such as Alpaca's: each object is a record."""

import functools
import json
import os
from collections.abc import Iterator
from typing import Any

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import is_url
from data_pipeline.base.strict_json import loads
from data_pipeline.sources.document import BOM, InputRange, open_piece
from data_pipeline.sources.reading import open_file

_SUFFIX = ".json"
# A list is read as a whole.
_MOST_BYTES = 1 << 30


def is_list(piece: InputRange) -> bool:
    """Return whether a file holds a list: its name ends in .json, and it begins with a bracket."""
    if not piece.path.endswith(_SUFFIX):
        return False
    with open_piece(piece) as file:
        head = file.read(1 << 10)
    return head.removeprefix(BOM).lstrip().startswith(b"[")


def in_records(piece: InputRange) -> InputRange:
    """A piece of a whole file, in records. DataError: it holds no list of objects."""
    if piece.size > _MOST_BYTES:
        rule = f"is a list of {piece.size:,} bytes, and at most {_MOST_BYTES:,} are read at once"
        raise DataError(f"{piece.path}: {rule}. Write it as JSON lines: jq -c '.[]' FILE > NEW")
    count = len(_load(piece.path, _stamp(piece)))
    if not count:
        raise DataError(f"{piece.path}: is an empty list. Leave it out.")
    return piece._replace(stop=count, scale=piece.size / count)


def records(piece: InputRange) -> Iterator[bytes]:
    """The objects of the piece, in JSON. DataError: it holds no list of objects."""
    for record in _load(piece.path, _stamp(piece))[piece.start : piece.stop]:
        yield json.dumps(record).encode()


def _stamp(piece: InputRange) -> str:
    """Changes when the file does."""
    if is_url(piece.path):
        return piece.stamp
    return str(os.stat(piece.path).st_mtime_ns)


# Pieces of one file follow each other.
@functools.lru_cache(maxsize=1)
def _load(path: str, stamp: str) -> list[dict[str, Any]]:
    """The list of a file. DataError: it holds none of objects."""
    with open_file(path, stamp) as file:
        content = file.read()
    try:
        values = loads(content.removeprefix(BOM).decode())
    except ValueError as error:
        fix = "Correct it, or write a record in each line"
        raise DataError(f"{path}: begins like a list and is not JSON ({error}). {fix}.") from error
    for number, value in enumerate(values):
        if not isinstance(value, dict):
            rule = f"item {number} of its list is no object"
            raise DataError(f"{path}: {rule}. Correct it, or leave the item out.")
    return values
