"""JSON lines, plain or .gz: each line is an object, and one of its keys holds the document."""

import gzip
import json
import zlib
from collections.abc import Iterator

from data_pipeline.sources.document import BOM, Document, Piece, held_out, judge


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the lines that begin inside the piece and belong to its part."""
    first_line: int | None = None  # of the piece; counted only when a message needs it
    index = -1
    try:
        for index, raw in enumerate(_lines(piece)):
            if piece.part != "all" and held_out(raw.rstrip(b"\r\n"), piece.share) != (piece.part == "eval"):
                continue
            document = _parse(raw, piece.key)
            if document.problem:
                first_line = _count_lines(piece) if first_line is None else first_line
                document = document._replace(where=f"{piece.path}:{first_line + index + 1}")
            yield document
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        yield Document(None, f"{piece.path}:{_count_lines(piece) + index + 2}", f"can't be read ({reason})")


def _lines(piece: Piece) -> Iterator[bytes]:
    if piece.path.endswith(".gz"):
        with gzip.open(piece.path) as file:
            yield from file
        return
    with open(piece.path, "rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()
        while file.tell() < piece.stop and (raw := file.readline()):
            yield raw


def _count_lines(piece: Piece) -> int:
    """Lines before the piece."""
    count, left = 0, piece.start
    if left:
        with open(piece.path, "rb") as file:
            while left and (data := file.read(min(left, 1 << 20))):
                count, left = count + data.count(b"\n"), left - len(data)
            # a line that reaches into the piece is counted too: the piece's own lines begin after it
            file.seek(piece.start - 1)
            count += file.read(1) != b"\n"
    return count


def _parse(raw: bytes, key: str) -> Document:
    raw = raw.removeprefix(BOM)
    if not raw.strip():
        return Document(None, "", "empty, or only whitespace", harmless=True)
    try:
        line, problem = raw.decode(), ""
    except UnicodeDecodeError:
        line, problem = raw.decode(errors="replace"), "not UTF-8"
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
    return document._replace(problem=problem, harmless=False) if problem and document.text is not None else document
