"""ArrayRecord files: each record is a document, its text in UTF-8."""

from collections.abc import Iterator
from typing import Any

from data_pipeline.base.errors import DataError, blame_storage
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    any_record,
    find_files,
    load_package,
    record_documents,
    refuse_url,
)
from data_pipeline.sources.reading import open_file

_BATCH_BYTES = 1 << 22
# About: records and what ends a file are padded to 64 KiB each.
_PADDING_BYTES = 1 << 17


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, in records. DataError: one is no ArrayRecord. UsageError: the package is
    missing."""
    refuse_url("arrayrecord", pattern)
    pieces = []
    for piece in find_files(pattern, "arrayrecord", options):
        reader = _open(piece.path)
        records = reader.num_records()
        reader.close()
        size = max(piece.size - _PADDING_BYTES, records)
        pieces.append(piece._replace(stop=records, scale=size / max(records, 1)))
    return pieces


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the records of the piece that belong to its part."""
    return record_documents(piece, _records(piece), RuntimeError, OSError)


def _open(path: str) -> Any:
    """A reader of a file that is what it should be: the library itself finds 0 records in one that
    is not, and says nothing."""
    package = load_package(
        "array_record.python.array_record_module", "arrayrecord", f"--arrayrecord {path}"
    )
    open_file(path).close()
    # One batch at a time, in this thread.
    reader = package.ArrayRecordReader(path, "readahead_buffer_size:0")
    if reader.ok():
        return reader
    try:
        reader.close()
        reason = "its end is missing"
    except RuntimeError as error:
        blame_storage(path, error)
        reason = str(error) or "its end is missing"
    fix = "Restore it from a copy, or leave it out"
    raise DataError(f"{path}: is not an ArrayRecord file ({reason}). {fix}.")


def _records(piece: InputRange) -> Iterator[bytes]:
    reader = _open(piece.path)
    step = max(int(_BATCH_BYTES / max(piece.scale, 1)), 1)
    try:
        for at in range(piece.start, piece.stop, step):
            yield from reader.read(at, min(at + step, piece.stop))
    finally:
        reader.close()


FORMAT = Format(
    "arrayrecord", "GLOB", "ArrayRecord files, each record one document in UTF-8",
    "--arrayrecord 'web/*.array_record' --tokenizer path/to/tokenizer.json --holdout 0.001", find,
    documents, any_record,
)  # fmt: skip
