"""Data sets of tensorflow-datasets that are on disk as ArrayRecord: each example is a document, in
the feature --key.

Read through `as_data_source`, without TensorFlow. Nothing is downloaded or built here.
"""

import os
from collections.abc import Iterator
from typing import Any

from data_pipeline.errors import DataError, blame_storage
from data_pipeline.sources.document import (
    Document,
    Format,
    Options,
    Piece,
    any_record,
    load_package,
    record_documents,
    refuse_url,
)

_BATCH_BYTES = 1 << 22
_DESCRIPTION = ("dataset_info.json", "features.json")


def find(value: str, options: Options) -> list[Piece]:
    """The files of NAME[:SPLIT], in examples; NAME may be a folder, and SPLIT is "train" if nothing
    is said.

    DataError: it is not there, has no such split or feature, or is in another file format.
        UsageError: the package is missing.
    """
    refuse_url("tfds", value)
    tfds = load_package("tensorflow_datasets", "tfds", f"--tfds {value}")
    name = value
    split = ""
    if not os.path.isdir(value):
        name, _, split = value.partition(":")
    split = split or "train"
    try:
        folder = name
        if not os.path.isdir(name):
            folder = tfds.core.read_only_builder.builder_from_files(name).data_dir
        builder = tfds.builder_from_directory(folder)
        info = builder.info
        layout = info.file_format
    except Exception as error:
        # Of many kinds, from finding the folder to parsing what describes it.
        blame_storage(name, error)
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"--tfds {value}: is not a data set on disk ({reason}). Build it with `tfds build {name} "
            "--file_format=array_record`, or name its folder, the one with dataset_info.json."
        ) from error
    if layout is None or layout.value != "array_record":
        found = layout and layout.value
        mend = "Build it with --file_format=array_record"
        raise DataError(
            f"--tfds {value}: is stored as {found}, which has no random access. {mend}."
        )
    if split not in list(info.splits):
        splits = ", ".join(f"{name}:{other}" for other in info.splits)
        raise DataError(f"--tfds {value}: has no split {split!r}. Name one: {splits}.")
    if options.key not in info.features:
        features = ", ".join(sorted(info.features))
        mend = "Name one with --key"
        raise DataError(f"--tfds {value}: has no feature {options.key!r}, but {features}. {mend}.")
    about = tuple(os.path.join(str(builder.data_dir), file) for file in _DESCRIPTION)
    pieces = []
    paths = map(str, info.splits[split].filepaths)
    for path, examples in zip(paths, info.splits[split].shard_lengths):
        scale = os.path.getsize(path) / max(examples, 1)
        pieces.append(
            Piece("tfds", os.path.basename(path), path, 0, examples, options, scale, beside=about)
        )
    return pieces


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the examples of the piece that belong to its part."""
    return record_documents(piece, _examples(piece), OSError, RuntimeError, ValueError, IndexError)


def _examples(piece: Piece) -> Iterator[Any]:
    """The feature of each example; a piece counts them in its file, but the library in the whole
    split."""
    package = load_package("tensorflow_datasets", "tfds", piece.path)
    builder = package.builder_from_directory(os.path.dirname(piece.path))
    split, info = next(
        item for item in builder.info.splits.items() if piece.name in item[1].filenames
    )
    before = sum(info.shard_lengths[: info.filenames.index(piece.name)])
    source = builder.as_data_source(split)
    step = max(int(_BATCH_BYTES / max(piece.scale, 1)), 1)
    for at in range(piece.start, piece.stop, step):
        for example in source.__getitems__(range(before + at, before + min(at + step, piece.stop))):
            yield example[piece.options.key]


FORMAT = Format(
    "tfds", "NAME[:SPLIT]", "data sets of tensorflow-datasets on disk, as ArrayRecord; needs maxtrain[tfds]",
    "--tfds wiki40b/en:train --tokenizer path/to/tokenizer.json --holdout 0.001", find, documents, any_record,
)  # fmt: skip
