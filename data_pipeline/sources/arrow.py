"""Arrow files, as Hugging Face's `datasets` saves them: each row is a document, in the column
--key. Needs no `datasets`."""

import glob
import os
import shlex
from collections.abc import Callable, Iterator
from typing import Any

from data_pipeline.base.errors import DataError
from data_pipeline.base.inner_names import why_outside
from data_pipeline.base.remote import is_url, place
from data_pipeline.base.strict_json import loads
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

# What save_to_disk leaves in the folder of a Dataset, and of a DatasetDict.
_STATE = "state.json"
_SPLITS = "dataset_dict.json"
_FILE_MAGIC = b"ARROW1"
_STREAM_END = b"\xff\xff\xff\xff\0\0\0\0"


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a folder that save_to_disk made, or those that match a glob, in rows.

    Raises:
        DataError: the folder has several splits, or only selects rows, or is no dataset; or a file
            is damaged, or has no column --key.
        UsageError: pyarrow is missing.
    """
    pyarrow, errors = arrow("ipc", f"--arrow {pattern}")
    files = saved_files(pattern, options, "arrow")
    if not files:
        files = find_files(pattern, "arrow", options, ".arrow")
    pieces = []
    for piece in files:
        try:
            rows = sum(len(column) for column in _columns(pyarrow, piece))
        except (*errors, EOFError) as error:
            raise damaged(piece.path, error, "an Arrow file") from error
        pieces.append(piece._replace(stop=rows, scale=piece.size / max(rows, 1)))
    return pieces


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the rows of the piece that belong to its part."""
    pyarrow, errors = arrow("ipc", piece.path)
    return record_documents(piece, values(piece, 0, _columns(pyarrow, piece)), *errors)


def find_records(piece: InputRange, wanted_by: str) -> InputRange:
    """A file whose rows are records, in rows.

    Raises:
        DataError: it is not Arrow's, or two columns have one name, or none has values that JSON
            has.
        UsageError: pyarrow is missing.
    """
    pyarrow, errors = arrow("ipc", wanted_by)
    rows = 0
    try:
        schema = None
        for batch in _batches(pyarrow, piece, None):
            schema = batch.schema
            rows += batch.num_rows
    except (*errors, EOFError) as error:
        raise damaged(piece.path, error, "an Arrow file") from error
    if schema is not None:
        names = schema.names
        if not json_columns(pyarrow, schema) or len(set(names)) < len(names):
            rule = "has two columns with one name, or none with values that JSON has"
            listed = ", ".join(names) or "none"
            raise DataError(f"{piece.path}: {rule}; columns: {listed}. Write it with others.")
    return piece._replace(stop=rows, scale=piece.size / max(rows, 1))


def errors_of_reading(piece: InputRange) -> tuple[type[Exception], ...]:
    """Return the exceptions that `records` raises when a file is damaged."""
    _, errors = arrow("ipc", piece.path)
    return (*errors, EOFError)


def records(piece: InputRange) -> Iterator[bytes]:
    """The rows of the piece, as of `columns.json_rows`."""
    pyarrow, _ = arrow("ipc", piece.path)
    step = batch_rows(piece)
    first = 0
    for batch in _batches(pyarrow, piece, None):
        wanted = batch.select(json_columns(pyarrow, batch.schema))
        low = max(piece.start - first, 0)
        high = min(piece.stop - first, batch.num_rows)
        for at in range(low, high, step):
            yield from json_rows(wanted.slice(at, min(step, high - at)))
        first += batch.num_rows
        if first >= piece.stop:
            return


def saved_files(folder: str, options: InputOptions, format: str) -> list[InputRange]:
    """The files that a dataset on disk consists of, for the option of a format; none if the folder
    is no dataset.

    DataError: it has several splits, or only selects rows, or a file is missing.
    """
    if is_url(folder) and glob.has_magic(folder):
        return []
    splits = os.path.join(folder, _SPLITS)
    if place(splits).exists():
        folders = [os.path.join(folder, name) for name in _load(splits, _split_names)]
        names = " or ".join(f"--{format} {shlex.quote(path)}" for path in folders)
        rule = "is a DatasetDict of several splits"
        raise DataError(f"--{format} {folder}: {rule}. Name one of them: {names}.")
    state = os.path.join(folder, _STATE)
    if not place(state).exists():
        return []
    if _load(state, _indices_files):
        fix = "Save it with flatten_indices().save_to_disk(DIR)"
        raise DataError(f"--{format} {folder}: selects rows of its files. {fix}.")
    pieces = []
    for name in _load(state, _data_files):
        path = os.path.join(folder, name)
        if not place(path).exists():
            fix = "Restore it from a copy, or save the dataset again"
            raise DataError(f"{path}: is missing, but {state} lists it. {fix}.")
        for piece in find_files(glob.escape(path), format, options):
            pieces.append(piece._replace(name=name, beside=(state,)))
    return pieces


def _split_names(content: Any) -> list[str]:
    """The names of the splits in a dataset_dict.json.

    Raises:
        TypeError, LookupError: the file does not have the expected fields.
    """
    return [_inner(name) for name in content["splits"]]


def _inner(name: Any) -> str:
    """A name of a file or folder inside the data set. TypeError: it is none."""
    why = why_outside(name)
    if why:
        raise TypeError(f"the name {name!r:.120} {why}")
    return name


def _indices_files(content: Any) -> Any:
    """The files in a state.json that say which rows were selected; None or empty: all rows are."""
    return content.get("_indices_files")


def _data_files(content: Any) -> list[str]:
    """The names of the data files in a state.json.

    Raises:
        TypeError, LookupError: the file does not have the expected fields.
    """
    return [_inner(entry["filename"]) for entry in content["_data_files"]]


def _load(path: str, get: Callable[[Any], Any]) -> Any:
    """Return what `get` finds in a JSON file.

    Raises:
        DataError: the file is no JSON, or `get` can't find it.
    """
    content = place(path).read_bytes()
    try:
        return get(loads(content))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(path, error, "what save_to_disk writes") from error


def _columns(pyarrow: Any, piece: InputRange) -> Iterator[Any]:
    """The arrays of the column --key, batch by batch, mapped into memory.

    Raises:
        DataError: there is no such column.
        EOFError: the file is cut short, or is of another format.
    """
    for batch in _batches(pyarrow, piece, piece.options.key):
        yield batch.column(0)


def _batches(pyarrow: Any, piece: InputRange, key: str | None) -> Iterator[Any]:
    """The batches of a file with the column `key` alone (None: with all), mapped into memory.

    Raises:
        DataError: there is no such column.
        EOFError: the file is cut short, or is of another format.
    """
    has_file_layout = _has_file_layout(piece)
    opener = pyarrow.ipc.open_stream
    if has_file_layout:
        opener = pyarrow.ipc.open_file
    source = native(pyarrow, piece, mapped=True)
    options = None
    if key is not None:
        schema = opener(source).schema
        check_column(schema, piece)
        source.seek(0)
        field = schema.get_field_index(key)
        options = pyarrow.ipc.IpcReadOptions(included_fields=[field])
    reader = opener(source, options=options)
    if has_file_layout:
        yield from map(reader.get_batch, range(reader.num_record_batches))
    else:
        yield from reader


def _has_file_layout(piece: InputRange) -> bool:
    """Return whether a file has Arrow's file layout, not its stream layout.

    Raises:
        EOFError: it has neither.
    """
    with open_piece(piece) as file:
        if file.read(len(_FILE_MAGIC)) == _FILE_MAGIC:
            return True
        num_bytes = file.seek(0, os.SEEK_END)
        file.seek(max(num_bytes - len(_STREAM_END), 0))
        if file.read() != _STREAM_END:
            raise EOFError("no end mark: cut short, or of another format")
    return False


FORMAT = Format(
    name="arrow",
    metavar="DIR_OR_GLOB",
    help="a dataset that Hugging Face's save_to_disk made, or Arrow files; needs maxtrain[parquet]",
    example="--arrow wikipedia/train --key text --tokenizer path/to/tokenizer.json --holdout 0.001",
    find=find,
    documents=documents,
    cut=any_record,
)
