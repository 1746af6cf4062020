"""Parquet files: each row is a document, in the column --key."""

import itertools
from collections.abc import Iterator
from typing import Any

from data_pipeline.sources.columns import arrow, batch_rows, check_column, damaged, native, values
from data_pipeline.sources.document import (
    Document,
    Format,
    Options,
    Piece,
    any_record,
    find_files,
    record_documents,
)

# Of the compressed file; else a column of a whole row group would be read at once.
_BUFFER_BYTES = 1 << 20


def find(pattern: str, options: Options) -> list[Piece]:
    """The files of a glob, in rows. DataError: one is not Parquet, or has no such column.
    UsageError: pyarrow is missing."""
    pyarrow, errors = arrow("parquet", f"--parquet {pattern}")
    pieces = []
    for piece in find_files(pattern, "parquet", options, ".parquet"):
        try:
            with pyarrow.parquet.ParquetFile(native(pyarrow, piece)) as file:
                schema = file.schema_arrow
                metadata = file.metadata
        except errors as error:
            raise damaged(piece.path, error, "a Parquet file") from error
        check_column(schema, piece)
        paths = [metadata.schema.column(at).path for at in range(metadata.num_columns)]
        number = paths.index(options.key)
        size = 0
        for group in range(metadata.num_row_groups):
            size += metadata.row_group(group).column(number).total_uncompressed_size
        rows = metadata.num_rows
        pieces.append(piece._replace(stop=rows, scale=size / max(rows, 1)))
    return pieces


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the rows of the piece that belong to its part."""
    pyarrow, errors = arrow("parquet", piece.path)
    return record_documents(piece, _rows(pyarrow, piece), *errors)


def _rows(pyarrow: Any, piece: Piece) -> Iterator[bytes | None]:
    """The column's values in the piece; whole row groups before it are passed over, and nothing is
    held longer than a batch."""
    settings = {
        "buffer_size": _BUFFER_BYTES,
        "pre_buffer": False,
        "page_checksum_verification": True,
    }
    with pyarrow.parquet.ParquetFile(native(pyarrow, piece), **settings) as file:
        counts = [file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)]
        starts = list(itertools.accumulate(counts, initial=0))
        groups = [
            group
            for group, first in enumerate(starts[:-1])
            if piece.start < first + counts[group] and first < piece.stop
        ]
        if groups:
            batches = file.iter_batches(
                batch_rows(piece), groups, [piece.options.key], use_threads=False
            )
            yield from values(piece, starts[groups[0]], (batch.column(0) for batch in batches))


FORMAT = Format(
    "parquet", "GLOB", "Parquet files, each row one document, in the column --key; needs maxtrain[parquet]",
    "--parquet 'web/*.parquet' --key content --tokenizer path/to/tokenizer.json --holdout 0.001", find, documents, any_record,
)  # fmt: skip
