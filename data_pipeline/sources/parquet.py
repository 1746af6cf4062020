"""Parquet files: each row is a document, in the column --key; or, where they are read for other
formats, a record of all of its columns."""

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

from data_pipeline.base.errors import DataError
from data_pipeline.base.remote import is_url
from data_pipeline.sources.columns import (
    arrow,
    batch_rows,
    check_column,
    damaged,
    json_columns,
    json_rows,
    native,
    values,
)
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    any_record,
    find_files,
    open_piece,
    record_documents,
)
from data_pipeline.sources.parquet_pages import DICTIONARY, Page, pages

# Of values that may be repeated in one batch. A dictionary of one long value and a run length are a
# few bytes in the file, and each row of a batch is a copy of that value.
_REPEATED_BYTES = 1 << 26
# Of a dictionary.
_LARGEST_BYTES = 1 << 28
# Of the elements of lists in a row group: a list of one row may be all of them.
_MOST_ELEMENTS = 1 << 27
# parquet-mr before 1.2.9 gave chunks too few bytes, and pyarrow reads beyond the end of these.
_FIRST_EXACT_WRITER = (1, 2, 9)
# Of a page. Writers close a page after 1,000 rows or 1 MiB, whatever comes last, so that a page of
# long documents may have hundreds of MB.
_MOST_PAGE_BYTES = 1 << 30
# Largest expansion of a page above this size: bytes in memory per byte in the file. No text gets so
# much smaller; zeros do.
_UNSUSPECTED_BYTES = 1 << 26
_MOST_GROWTH = 256
# Of the compressed file; else a column of a whole row group would be read at once.
_BUFFER_BYTES = 1 << 20


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, in rows. DataError: one is not Parquet, or has no such column.
    UsageError: pyarrow is missing."""
    pyarrow, errors = arrow("parquet", f"--parquet {pattern}")
    pieces = []
    for piece in find_files(pattern, "parquet", options, ".parquet"):
        schema, metadata = _open(pyarrow, errors, piece)
        check_column(schema, piece)
        pieces.append(_in_rows(piece, metadata, [options.key]))
    return pieces


def find_records(piece: InputRange, wanted_by: str) -> InputRange:
    """A file whose rows are records, in rows.

    Raises:
        DataError: it is not Parquet, or two columns have one name, or none has values that JSON
            has.
        UsageError: pyarrow is missing.
    """
    pyarrow, errors = arrow("parquet", wanted_by)
    schema, metadata = _open(pyarrow, errors, piece)
    columns = json_columns(pyarrow, schema)
    if not columns or len(set(schema.names)) < len(schema.names):
        names = ", ".join(schema.names) or "none"
        rule = "has two columns with one name, or none with values that JSON has"
        raise DataError(f"{piece.path}: {rule}; columns: {names}. Write it with others.")
    return _in_rows(piece, metadata, columns)


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the rows of the piece that belong to its part."""
    pyarrow, errors = arrow("parquet", piece.path)
    return record_documents(piece, _rows(pyarrow, piece), *errors)


def errors_of_reading(piece: InputRange) -> tuple[type[Exception], ...]:
    """Return the exceptions that `records` raises when a file is damaged."""
    _, errors = arrow("parquet", piece.path)
    return errors


def records(piece: InputRange) -> Iterator[bytes]:
    """The rows of the piece, as of `columns.json_rows`."""
    pyarrow, _ = arrow("parquet", piece.path)
    with _file(pyarrow, piece) as file:
        columns = json_columns(pyarrow, file.schema_arrow)
        for first, batch in _batches(piece, file, columns):
            low = max(piece.start - first, 0)
            high = min(piece.stop - first, batch.num_rows)
            yield from json_rows(batch.slice(low, max(high - low, 0)))


def _open(pyarrow: Any, errors: tuple[type[Exception], ...], piece: InputRange) -> tuple[Any, Any]:
    """The schema and the metadata of a file. DataError: it is not Parquet."""
    try:
        with pyarrow.parquet.ParquetFile(native(pyarrow, piece)) as file:
            # pyarrow decodes the names of columns when it opens the file, but this one only here.
            _ = file.metadata.created_by
            return file.schema_arrow, file.metadata
    except (*errors, UnicodeDecodeError) as error:
        raise damaged(piece.path, error, "a Parquet file") from error


def _in_rows(piece: InputRange, metadata: Any, columns: Sequence[str]) -> InputRange:
    """A piece of a whole file, in rows, each as large as these columns are on average."""
    size = 0
    for number in range(metadata.num_columns):
        if _is_part(metadata.schema.column(number).path, columns):
            for group in range(metadata.num_row_groups):
                size += metadata.row_group(group).column(number).total_uncompressed_size
    rows = metadata.num_rows
    return piece._replace(stop=rows, scale=size / max(rows, 1))


def _is_part(path: str, columns: Sequence[str]) -> bool:
    """Return whether the values at a path of the schema belong to one of these columns.

    The path of a list or an object continues after the column's name, which may have dots itself.
    """
    return any(path == column or path.startswith(f"{column}.") for column in columns)


def _rows(pyarrow: Any, piece: InputRange) -> Iterator[bytes | None]:
    """The values of the column --key in the piece."""
    with _file(pyarrow, piece) as file:
        for first, batch in _batches(piece, file, [piece.options.key]):
            yield from values(piece, first, [batch.column(0)])


def _file(pyarrow: Any, piece: InputRange) -> Any:
    """The file of a piece, open for reading."""
    settings = {
        "buffer_size": _BUFFER_BYTES,
        "pre_buffer": False,
        "page_checksum_verification": True,
    }
    return pyarrow.parquet.ParquetFile(native(pyarrow, piece), **settings)


def _batches(piece: InputRange, file: Any, columns: Sequence[str]) -> Iterator[tuple[int, Any]]:
    """Some rows at a time of the row groups that the piece has rows of, each with the number of its
    first row; nothing is held longer than a batch."""
    counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
    starts = list(itertools.accumulate(counts, initial=0))
    groups = [
        group
        for group, first in enumerate(starts[:-1])
        if piece.start < first + counts[group] and first < piece.stop
    ]
    if not groups:
        return
    first = starts[groups[0]]
    repeated = max(_dictionary_bytes(piece, file.metadata, groups, columns), 1)
    rows = min(batch_rows(piece), max(_REPEATED_BYTES // repeated, 1))
    for batch in file.iter_batches(rows, groups, list(columns), use_threads=False):
        yield first, batch
        first += batch.num_rows
        if first >= piece.stop:
            return


def _dictionary_bytes(
    piece: InputRange, metadata: Any, groups: Sequence[int], columns: Sequence[str]
) -> int:
    """Return the size of the largest dictionary of these columns in these row groups.

    Raises:
        OSError: a page, a dictionary or a list may be larger than is read.
    """
    largest = 0
    _check_writer(metadata.created_by or "")
    with open_piece(piece) as file:
        for number in range(metadata.num_columns):
            if not _is_part(metadata.schema.column(number).path, columns):
                continue
            for group in groups:
                chunk = metadata.row_group(group).column(number)
                if not chunk.num_values:
                    # No page of it is read.
                    continue
                is_list = metadata.schema.column(number).max_repetition_level > 0
                if is_list:
                    _check_elements(chunk.num_values)
                start = chunk.data_page_offset
                # A dictionary lies before the data, but some writers do not say where. As pyarrow
                # does, another offset is ignored.
                if chunk.has_dictionary_page and 0 < chunk.dictionary_page_offset < start:
                    start = chunk.dictionary_page_offset
                of_chunk = pages(file, start, chunk.total_compressed_size)
                if is_url(piece.path):
                    # The headers of all pages would mean to read the file twice.
                    of_chunk = itertools.islice(of_chunk, 1)
                num_values = 0
                for page in of_chunk:
                    _check_page(page)
                    # pyarrow reads all values of a page, even if the chunk claims to have fewer.
                    num_values += page.num_values
                    if is_list:
                        _check_elements(num_values)
                    if page.kind == DICTIONARY:
                        largest = max(largest, page.uncompressed)
    if largest > _LARGEST_BYTES:
        what = f"a dictionary of {largest:,} bytes"
        raise OSError(f"{what} is larger than {_LARGEST_BYTES:,}: write it with shorter values")
    return largest


def _check_writer(created_by: str) -> None:
    """Raise OSError if pyarrow would read more bytes of a column chunk than its metadata says."""
    writer = created_by.strip().lower()
    if not writer.startswith("parquet-mr"):
        return
    version = re.match(r"parquet-mr\s+version\s+(\d{1,9})\.(\d{1,9})\.(\d{1,9})(?!\d)", writer)
    if version is None or tuple(map(int, version.groups())) < _FIRST_EXACT_WRITER:
        raise OSError(
            f"written by {created_by!r}, whose sizes are not reliable: write it with a parquet-mr "
            "of version 1.2.9 or later"
        )


def _check_elements(count: int) -> None:
    """Raise OSError if the lists of a row group have too many elements."""
    if count > _MOST_ELEMENTS:
        what = f"lists of a row group with {count:,} elements"
        fix = "write it with fewer rows in a row group"
        raise OSError(f"{what}, more than {_MOST_ELEMENTS:,}: {fix}")


def _check_page(page: Page) -> None:
    """OSError: a page takes too much memory."""
    what = f"a page of {page.uncompressed:,} bytes"
    if page.uncompressed > _MOST_PAGE_BYTES:
        raise OSError(f"{what}, more than {_MOST_PAGE_BYTES:,}: write it with smaller pages")
    most = max(_UNSUSPECTED_BYTES, _MOST_GROWTH * page.compressed)
    if page.uncompressed > most:
        raise OSError(
            f"{what} has {page.compressed:,} in the file, less than a part in {_MOST_GROWTH}: "
            "write it with smaller pages, or uncompressed"
        )


FORMAT = Format(
    "parquet", "GLOB", "Parquet files, each row one document, in the column --key; needs "
    "maxtrain[parquet]",
    "--parquet 'web/*.parquet' --key content --tokenizer path/to/tokenizer.json --holdout 0.001",
    find, documents, any_record,
)  # fmt: skip
