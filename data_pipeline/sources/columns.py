"""Columns of text in Arrow's memory layout: what Parquet and Arrow files share. Only pyarrow's
objects come in here."""

import datetime
import decimal
import json
import math
from collections.abc import Iterable, Iterator
from typing import Any

from data_pipeline.base.errors import DataError, blame_storage
from data_pipeline.base.remote import is_url
from data_pipeline.sources.document import InputRange, load_package, open_piece

_BATCH_BYTES = 1 << 22
# Of a batch whose rows become objects of Python together, and of one row.
_LARGE_BATCH_BYTES = 1 << 26
_LARGEST_ROW_BYTES = 1 << 28
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


def native(package: Any, piece: InputRange, mapped: bool = False) -> Any:
    """Return what pyarrow reads a file from: its path, or its `mapped` memory; or a file behind a
    URL, open.
    """
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


def check_column(schema: Any, piece: InputRange) -> None:
    """DataError: the file has no column of text by this name."""
    key = piece.options.key
    if key not in schema.names:
        names = ", ".join(schema.names)
        fix = "Name one of them with --key"
        raise DataError(f"{piece.path}: has no column {key!r}, but {names}. {fix}.")
    kind = schema.field(key).type
    value_kind = kind
    if str(kind).startswith("dictionary"):
        value_kind = kind.value_type
    if str(value_kind) not in _BYTES:
        fix = "Name a column of text with --key"
        raise DataError(f"{piece.path}: column {key!r} holds {kind}, not text. {fix}.")


def batch_rows(piece: InputRange) -> int:
    """Rows to take up at a time, so that memory stays small whatever the length of documents."""
    return max(min(int(_BATCH_BYTES / max(piece.scale, 1)), 1 << 12), 1)


def values(piece: InputRange, first: int, columns: Iterable[Any]) -> Iterator[bytes | None]:
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


def json_columns(package: Any, schema: Any) -> list[str]:
    """The columns that have something JSON has a form for: all but those of bytes alone."""
    return [field.name for field in schema if _has_json(package.types, field.type)]


def _has_json(types: Any, kind: Any) -> bool:
    """Return whether some values of a type are, or become, JSON values; `types` is
    pyarrow.types.
    """
    if types.is_dictionary(kind):
        return _has_json(types, kind.value_type)
    if types.is_struct(kind):
        return not kind.num_fields or any(_has_json(types, field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _has_json(types, kind.value_type)
    is_text = types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)
    is_number = types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind)
    is_other = types.is_boolean(kind) or types.is_null(kind)
    return is_text or is_number or is_other or types.is_temporal(kind) or types.is_map(kind)


def json_rows(batch: Any) -> Iterator[bytes]:
    """The rows of a batch, each an object in JSON with a key for each column.

    Objects inside have no keys that are null, since Arrow gives all objects of a column the keys of
    all of them. NaN, with which pandas says that there is nothing, and infinity are null. Dates and
    times are text as in ISO 8601, and decimal numbers are text with all of their digits. Bytes are
    text if they are UTF-8, and else null.

    One list in a row may have any number of values, which take few bytes in a file and many as
    Python objects. So rows of a large batch are converted one by one, up to a limit.

    Raises:
        OSError: a row is too large, or has a value that no object of Python has.
    """
    # pyarrow does not look where values lie when it makes objects of them.
    batch.validate(full=True)
    if batch.nbytes <= _LARGE_BATCH_BYTES:
        yield from _json_rows(batch)
        return
    for number in range(batch.num_rows):
        row = batch.slice(number, 1)
        if row.nbytes > _LARGEST_ROW_BYTES:
            what = f"a row of {row.nbytes:,} bytes, more than {_LARGEST_ROW_BYTES:,}"
            raise OSError(f"{what}: divide its lists")
        yield from _json_rows(row)


def _json_rows(batch: Any) -> Iterator[bytes]:
    """Yield all rows at once, in the form of `json_rows`."""
    try:
        rows = batch.to_pylist()
    except ValueError as error:
        # Such as a time with nanoseconds, which no object of Python has.
        raise OSError(str(error)) from error
    for row in rows:
        whole = {name: _in_json(value) for name, value in row.items()}
        yield json.dumps(whole).encode()


def _in_json(value: Any) -> Any:
    """A value of a column as a record in JSON would have it."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_in_json(each) for each in value]
    if isinstance(value, dict):
        known = {name: _in_json(each) for name, each in value.items()}
        return {name: each for name, each in known.items() if each is not None}
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return value
