"""Arrow files, as Hugging Face's `datasets` saves them: each row is a document, in the column
--key. Needs no `datasets`."""

import glob
import os
from collections.abc import Callable, Iterator
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.remote import is_url, place
from data_pipeline.sources.columns import arrow, check_column, damaged, native, values
from data_pipeline.sources.document import (
    Document,
    Format,
    Options,
    Piece,
    any_record,
    find_files,
    open_piece,
    record_documents,
)
from data_pipeline.strict_json import loads

_STATE, _SPLITS = (
    "state.json",
    "dataset_dict.json",
)  # what save_to_disk leaves in the folder of a Dataset, of a DatasetDict
_FILE_MAGIC, _STREAM_END = b"ARROW1", b"\xff\xff\xff\xff\0\0\0\0"


def find(pattern: str, options: Options) -> list[Piece]:
    """The files of a folder that save_to_disk made, or of a glob, in rows.

    DataError: a folder of several splits, of selected rows, or of something else; a file is
        damaged, or has no such column.
    UsageError: pyarrow is missing.
    """
    pyarrow, errors = arrow("ipc", f"--arrow {pattern}")
    pieces = []
    for piece in _saved(pattern, options) or find_files(pattern, "arrow", options, ".arrow"):
        try:
            rows = sum(map(len, _columns(pyarrow, piece)))
        except (*errors, EOFError) as error:
            raise damaged(piece.path, error, "an Arrow file") from error
        pieces.append(piece._replace(stop=rows, scale=piece.size / max(rows, 1)))
    return pieces


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the rows of the piece that belong to its part."""
    pyarrow, errors = arrow("ipc", piece.path)
    return record_documents(piece, values(piece, 0, _columns(pyarrow, piece)), *errors)


def _saved(folder: str, options: Options) -> list[Piece]:
    """The files that a dataset on disk consists of; none if the folder is no dataset."""
    if is_url(folder) and glob.has_magic(folder):
        return []
    splits, state = (os.path.join(folder, name) for name in (_SPLITS, _STATE))
    if place(splits).exists():
        names = _load(
            splits,
            lambda content: " or ".join(
                f"--arrow {os.path.join(folder, name)}" for name in content["splits"]
            ),
        )
        raise DataError(
            f"--arrow {folder}: is a DatasetDict of several splits. Name one of them: {names}."
        )
    if not place(state).exists():
        return []
    if _load(state, lambda content: content.get("_indices_files")):
        raise DataError(
            f"--arrow {folder}: selects rows of its files. Save it with flatten_indices().save_to_disk(DIR)."
        )
    pieces = []
    for name in _load(state, _data_files):
        path = os.path.join(folder, name)
        if not place(path).exists():
            raise DataError(
                f"{path}: is missing, but {state} lists it. Restore it from a copy, or save the dataset again."
            )
        pieces += [
            piece._replace(name=name, beside=(state,))
            for piece in find_files(glob.escape(path), "arrow", options)
        ]
    return pieces


def _data_files(content: Any) -> list[str]:
    """The names of the files of a state.json. TypeError, LookupError: it is of another shape."""
    names = [entry["filename"] for entry in content["_data_files"]]
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"filename {name!r} is not a string")
    return names


def _load(path: str, get: Callable[[Any], Any]) -> Any:
    """What `get` finds in a JSON file."""
    content = place(path).read_bytes()
    try:
        return get(loads(content))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise damaged(path, error, "what save_to_disk writes") from error


def _columns(pyarrow: Any, piece: Piece) -> Iterator[Any]:
    """The arrays of the column in a file of either of Arrow's layouts, mapped into memory.
    DataError: no such column."""
    with open_piece(piece) as file:
        whole_file = file.read(len(_FILE_MAGIC)) == _FILE_MAGIC
        file.seek(max(file.seek(0, os.SEEK_END) - len(_STREAM_END), 0))
        if not whole_file and file.read() != _STREAM_END:
            raise EOFError("no end mark: cut short, or of another format")
    source = native(pyarrow, piece, mapped=True)
    opener = pyarrow.ipc.open_file if whole_file else pyarrow.ipc.open_stream
    schema = opener(source).schema
    check_column(schema, piece)
    source.seek(0)
    options = pyarrow.ipc.IpcReadOptions(
        included_fields=[schema.get_field_index(piece.options.key)]
    )
    reader = opener(source, options=options)
    batches = (
        map(reader.get_batch, range(reader.num_record_batches)) if whole_file else iter(reader)
    )
    yield from (batch.column(0) for batch in batches)


FORMAT = Format(
    "arrow", "DIR_OR_GLOB", "a dataset that Hugging Face's save_to_disk made, or Arrow files; needs maxtrain[parquet]",
    "--arrow wikipedia/train --key text --tokenizer path/to/tokenizer.json --holdout 0.001", find, documents, any_record,
)  # fmt: skip
