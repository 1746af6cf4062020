"""JSON lines, plain, .gz or .zst: each line is an object, and one of its keys holds the
document."""

import contextlib
import functools
import gzip
import itertools
import shlex
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from data_pipeline.base.errors import DataError, blame_storage
from data_pipeline.base.strict_json import StrictJsonError, loads
from data_pipeline.sources.document import (
    BOM,
    EMPTY,
    Document,
    Format,
    InputOptions,
    InputRange,
    checked_document,
    find_files,
    line_start,
    load_package,
    open_piece,
)

_PACKED = (".gz", ".zst")
# Bytes, with the line break.
LONGEST_LINE = 1 << 28
# Of a record, in a message: keys, and characters of each.
_MOST_KEYS = 12
_LONGEST_KEY = 60
# Lines that are parsed together, and their bytes.
_AT_ONCE = 64
_BYTES_AT_ONCE = 1 << 20


def find(pattern: str, options: InputOptions, format: str = "jsonl") -> list[InputRange]:
    """The files of a glob. UsageError: the package for .zst is needed and not installed."""
    pieces = find_files(pattern, format, options)
    for piece in pieces:
        _reader(piece.path)
    return pieces


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the lines of the piece that belong to its part."""
    key = piece.options.key
    return read_lines(piece, lambda lines: [_parse(raw, key) for raw in lines])


def cut(piece: InputRange, at: int) -> int | None:
    """The first line from byte `at` on; None: the file is compressed."""
    if piece.path.endswith(_PACKED):
        return None
    return line_start(piece, at)


def read_lines(
    piece: InputRange, parse: Callable[[list[bytes]], list[Document]]
) -> Iterator[Document]:
    """See `parse_records`, for the lines of the piece."""
    reader, damage = _reader(piece.path)
    lines = _lines(piece, reader)

    def place(index: int, exactly: bool) -> str:
        if exactly:
            return f"{piece.path}:{_before(piece) + index + 1}"
        return f"{piece.path}:line {index + 1} after byte {piece.start}"

    yield from parse_records(piece, lines, parse, place, OSError, EOFError, damage)


def parse_records(
    piece: InputRange,
    records: Iterable[bytes],
    parse: Callable[[list[bytes]], list[Document]],
    place: Callable[[int, bool], str],
    *damage: type[Exception],
) -> Iterator[Document]:
    """The documents that `parse` makes of the records of the piece that belong to its part.

    Args:
        records: those of the piece, in JSON, in their order.
        parse: gets some of them at a time, and gives a document for each; it need not say where
            they are. A DataError of it, which is about one of them, ends all, whatever is to be
            done about bad documents.
        place: where a record is, by its number in the piece; exactly, which may take long, only for
            one that a message is about.
        damage: what reading the next record raises when there is any: the rest of the piece is then
            one bad document.
    """
    index = -1
    batch: list[tuple[int, bytes]] = []
    size = 0
    problem = None
    try:
        for index, raw in enumerate(records):
            if piece.holds(raw.rstrip(b"\r\n")):
                batch.append((index, raw))
                size += len(raw)
            if len(batch) == _AT_ONCE or size >= _BYTES_AT_ONCE:
                yield from _parse_batch(piece, batch, parse, place)
                batch = []
                size = 0
    except damage as error:
        blame_storage(piece.path, error)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        problem = Document(None, place(index + 1, True), f"can't be read ({reason})")
    yield from _parse_batch(piece, batch, parse, place)
    if problem:
        yield problem


def _parse_batch(
    piece: InputRange,
    batch: list[tuple[int, bytes]],
    parse: Callable[[list[bytes]], list[Document]],
    place: Callable[[int, bool], str],
) -> Iterator[Document]:
    """The documents of records, each with its number in the piece; with the places that they are
    from."""
    try:
        documents = parse([raw for _, raw in batch])
    except DataError as error:
        if len(batch) == 1:
            raise DataError(f"{place(batch[0][0], True)}: {error}") from error
        # Which of them is it about? One by one.
        for record in batch:
            yield from _parse_batch(piece, [record], parse, place)
        return
    for (index, _), document in zip(batch, documents, strict=True):
        yield document._replace(where=place(index, bool(document.problem)))


def first_records(piece: InputRange) -> Iterator[dict[str, Any]]:
    """The objects among the first lines of a piece, to see what it holds; what can't be read is
    left to `read_lines`."""
    reader, damage = _reader(piece.path)
    try:
        for raw in itertools.islice(_lines(piece, reader), _AT_ONCE):
            record = parse_object(raw)
            if isinstance(record, dict):
                yield record
    except (OSError, EOFError, damage):
        return


def parse_object(raw: bytes) -> dict[str, Any] | str:
    """The object of a line, or what is wrong with it. Bytes that are not UTF-8 become U+FFFD."""
    if len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
        return f"a line of {LONGEST_LINE:,} bytes or more"
    raw = raw.removeprefix(BOM)
    if not raw.strip():
        return EMPTY
    try:
        record = loads(raw.decode(errors="replace"))
    except StrictJsonError as error:
        return error.kind
    except ValueError:
        return "broken JSON"
    if not isinstance(record, dict):
        return "not a JSON object"
    return record


def _reader(path: str) -> tuple[Callable[..., Any], type[Exception]]:
    """Return a function that opens a file for reading lines, and the exceptions of a damaged
    file.
    """
    if path.endswith(".gz"):
        return gzip.open, zlib.error
    if path.endswith(".zst"):
        package = "backports.zstd"
        if sys.version_info >= (3, 14):
            package = "compression.zstd"
        zstd = load_package(package, "zstd", f"--jsonl {path}")
        # Some corpora are packed with `zstd --long=31`.
        wide = {zstd.DecompressionParameter.window_log_max: 31}
        return functools.partial(zstd.open, options=wide), zstd.ZstdError
    return contextlib.nullcontext, OSError


def _lines(piece: InputRange, reader: Callable[..., Any]) -> Iterator[bytes]:
    """The lines from the piece's start on; of one that is too long, the beginning: a few packed
    bytes may hold any number."""
    packed = piece.path.endswith(_PACKED)
    with open_piece(piece) as raw_file, reader(raw_file) as file:
        file.seek(piece.start)
        while raw := file.readline(LONGEST_LINE):
            yield raw
            while len(raw) == LONGEST_LINE and not raw.endswith(b"\n"):
                raw = file.readline(LONGEST_LINE)
            if not packed and file.tell() >= piece.stop:
                return


@functools.lru_cache(maxsize=1)
def _before(piece: InputRange) -> int:
    """Lines of the file before the piece: counted only when a message needs it."""
    step = 1 << 20
    count = 0
    with open_piece(piece) as file:
        for at in range(0, piece.start, step):
            count += file.read(min(step, piece.start - at)).count(b"\n")
    return count


def _parse(raw: bytes, key: str) -> Document:
    record = parse_object(raw)
    if isinstance(record, str):
        return Document(None, "", record)
    if key not in record:
        return Document(None, "", f"no key {key!r}", detail=list_keys(record, "--key"))
    text = record[key]
    if text is None:
        return Document(None, "", f"key {key!r} is null", detail=list_keys(record, "--key"))
    if not isinstance(text, str):
        problem = f"key {key!r} is not a string"
        return Document(None, "", problem, detail=list_keys(record, "--key"))
    document = checked_document(text, "", 0)
    if document.text is not None and not is_utf8(raw):
        return document._replace(problem="not UTF-8")
    return document


def list_keys(record: dict[str, Any], option: str = "") -> str:
    """List the keys of a record, and the option that names the key with the longest text."""
    if not record:
        return ", and no other"
    listed = ", ".join(key[:_LONGEST_KEY] for key in list(record)[:_MOST_KEYS])
    words = f"; its keys are {listed}"
    if len(record) > _MOST_KEYS:
        words += " and more"
    texts = {key: value for key, value in record.items() if isinstance(value, str)}
    if option and texts:
        longest = max(texts, key=lambda key: len(texts[key]))
        example = f"{option} {shlex.quote(longest[:_LONGEST_KEY])}"
        words += f". Name the one that holds the text, such as {example}"
    return words


def is_utf8(raw: bytes) -> bool:
    """Return whether a line is valid UTF-8; `parse_object` repairs a line that is not."""
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


FORMAT = Format(
    "jsonl", "GLOB", "JSON lines, plain, .gz or .zst, each one document, in its --key",
    "--jsonl 'web/*.jsonl.gz' --key content --tokenizer path/to/tokenizer.json --holdout 0.001",
    find, documents, cut,
)  # fmt: skip
