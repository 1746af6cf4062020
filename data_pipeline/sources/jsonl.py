"""JSON lines, plain or .gz: each line is an object, and one of its keys holds the document."""

import functools
import gzip
import json
import zlib
from collections.abc import Iterator

from data_pipeline.sources.document import BOM, EMPTY, Document, Piece, held_out, judge


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the lines of the piece that belong to its part."""
    index = -1
    try:
        for index, raw in enumerate(_lines(piece)):
            if piece.part == "all" or held_out(raw.rstrip(b"\r\n"), piece.share) == (piece.part == "eval"):
                document = _parse(raw, piece.key)
                yield document._replace(where=f"{piece.path}:{_before(piece) + index + 1}") if document.problem else document
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        yield Document(None, f"{piece.path}:{_before(piece) + index + 2}", f"can't be read ({reason})")


def _lines(piece: Piece) -> Iterator[bytes]:
    with gzip.open(piece.path) if piece.path.endswith(".gz") else open(piece.path, "rb") as file:
        file.seek(piece.start)
        for raw in file:
            yield raw
            if file.tell() >= piece.stop and not piece.path.endswith(".gz"):
                return


@functools.lru_cache(maxsize=1)
def _before(piece: Piece) -> int:
    """Lines of the file before the piece: counted only when a message needs it."""
    with open(piece.path, "rb") as file:
        return sum(file.read(min(1 << 20, piece.start - at)).count(b"\n") for at in range(0, piece.start, 1 << 20))


def _parse(raw: bytes, key: str) -> Document:
    raw = raw.removeprefix(BOM)
    if not raw.strip():
        return Document(None, "", EMPTY)
    line = raw.decode(errors="replace")
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return Document(None, "", "broken JSON")
    if not isinstance(record, dict):
        return Document(None, "", "not a JSON object")
    if key not in record:
        return Document(None, "", f"no key {key!r}")
    if not isinstance(record[key], str):
        return Document(None, "", f"key {key!r} is null" if record[key] is None else f"key {key!r} is not a string")
    document = judge(record[key], "", 0)
    damaged = document.text is not None and "\ufffd" in line and line.encode() != raw
    return document._replace(problem="not UTF-8") if damaged else document
