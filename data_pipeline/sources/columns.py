"""Columns of text in Arrow's memory layout: what Parquet and Arrow files share. Only pyarrow's
objects come in here."""

from collections.abc import Iterable, Iterator
from typing import Any

from data_pipeline.errors import DataError, blame_storage
from data_pipeline.remote import is_url
from data_pipeline.sources.document import Piece, load_package, open_piece

_BATCH_BYTES = 1 << 22
_BYTES = {  # the type that a column of text has without the promise of being UTF-8
    "string": "binary", "large_string": "large_binary", "string_view": "binary_view",
    "binary": "binary", "large_binary": "large_binary", "binary_view": "binary_view",
}  # fmt: skip


def arrow(name: str, wanted_by: str) -> tuple[Any, tuple[type[Exception], ...]]:
    """pyarrow with its part NAME, and what it raises when a file is not what it should be.
    UsageError: not installed."""
    load_package(f"pyarrow.{name}", "parquet", wanted_by)
    package = load_package("pyarrow", "parquet", wanted_by)
    return package, (OSError, package.ArrowException)


def native(package: Any, piece: Piece, mapped: bool = False) -> Any:
    """What pyarrow reads a file from: its path, or its `mapped` memory; or a file behind a URL,
    open."""
    if is_url(piece.path):
        return package.PythonFile(open_piece(piece), mode="r")
    if mapped:
        return package.memory_map(piece.path)
    return piece.path


def damaged(path: str, error: Exception, what: str) -> DataError:
    """The message for a file that is not what its format asks for. Raises StorageError if it can't
    be read now."""
    blame_storage(path, error)
    reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return DataError(f"{path}: is not {what} ({reason}). Restore it from a copy, or leave it out.")


def check_column(schema: Any, piece: Piece) -> None:
    """DataError: the file has no column of text by this name."""
    key = piece.options.key
    if key not in schema.names:
        names = ", ".join(schema.names)
        mend = "Name one of them with --key"
        raise DataError(f"{piece.path}: has no column {key!r}, but {names}. {mend}.")
    kind = schema.field(key).type
    value_kind = kind
    if str(kind).startswith("dictionary"):
        value_kind = kind.value_type
    if str(value_kind) not in _BYTES:
        mend = "Name a column of text with --key"
        raise DataError(f"{piece.path}: column {key!r} holds {kind}, not text. {mend}.")


def batch_rows(piece: Piece) -> int:
    """Rows to take up at a time, so that memory stays small whatever the length of documents."""
    return max(min(int(_BATCH_BYTES / max(piece.scale, 1)), 1 << 12), 1)


def values(piece: Piece, first: int, columns: Iterable[Any]) -> Iterator[bytes | None]:
    """The rows of a piece out of consecutive arrays of a column, of which the first begins at row
    `first`."""
    step = batch_rows(piece)
    for column in columns:
        low = max(piece.start - first, 0)
        high = min(piece.stop - first, len(column))
        for at in range(low, high, step):
            yield from _as_bytes(column.slice(at, min(step, high - at)))
        first += len(column)
        if first >= piece.stop:
            return


def _as_bytes(part: Any) -> list[bytes | None]:
    """The values of an array of text as bytes: they may not be UTF-8, whatever its type says.

    An ArrowException if they lie outside its memory. pyarrow does not look: it would read there,
    and end the process.
    """
    if hasattr(part, "dictionary_decode"):
        dictionary = part.dictionary.view(_BYTES[str(part.dictionary.type)])
        part = type(part).from_arrays(part.indices, dictionary, safe=False)
        part.validate(full=True)
        part = part.dictionary_decode()
    part = part.view(_BYTES[str(part.type)])
    part.validate(full=True)
    return part.cast("large_binary").to_pylist()
