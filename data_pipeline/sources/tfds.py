"""Data sets of tensorflow-datasets that are on disk as ArrayRecord: the feature --key of each
example is a document.

They are read through `as_data_source`, without TensorFlow. Nothing is downloaded or built here.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from data_pipeline.base.errors import DataError, blame_storage
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    any_record,
    load_package,
    record_documents,
    refuse_url,
)

_BATCH_BYTES = 1 << 22
_DESCRIPTION = ("dataset_info.json", "features.json")


def find(value: str, options: InputOptions) -> list[InputRange]:
    """The files of NAME[:SPLIT], in examples.

    Args:
        value: NAME is a data set, or its folder; SPLIT is "train" if it is left out.
        options: name the feature that is read.

    Raises:
        DataError: the data set is not on disk, has no such split or feature, or is stored in
            another file format.
        UsageError: tensorflow-datasets is missing.
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
        # The library raises errors of many kinds, from missing folders to JSON that it can't parse.
        blame_storage(name, error)
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"--tfds {value}: is not a data set on disk ({reason}). Build it with `tfds build "
            f"{name} "
            "--file_format=array_record`, or name its folder, the one with dataset_info.json."
        ) from error
    found = None
    if layout is not None:
        found = layout.value
    if found != "array_record":
        fix = "Build it with --file_format=array_record"
        raise DataError(f"--tfds {value}: is stored as {found}, which has no random access. {fix}.")
    if split not in list(info.splits):
        splits = ", ".join(f"{name}:{other}" for other in info.splits)
        raise DataError(f"--tfds {value}: has no split {split!r}. Name one: {splits}.")
    if options.key not in info.features:
        features = ", ".join(sorted(info.features))
        fix = "Name one with --key"
        raise DataError(f"--tfds {value}: has no feature {options.key!r}, but {features}. {fix}.")
    descriptions = tuple(os.path.join(str(builder.data_dir), file) for file in _DESCRIPTION)
    pieces = []
    paths = map(str, info.splits[split].filepaths)
    for path, examples in zip(paths, info.splits[split].shard_lengths):
        piece = InputRange(
            format="tfds",
            name=os.path.basename(path),
            path=path,
            start=0,
            stop=examples,
            options=options,
            scale=os.path.getsize(path) / max(examples, 1),
            beside=descriptions,
        )
        pieces.append(piece)
    return pieces


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the examples of the piece that belong to its part."""
    return record_documents(piece, _examples(piece), OSError, RuntimeError, ValueError, IndexError)


def _examples(piece: InputRange) -> Iterator[Any]:
    """The feature of each example of a piece, read in batches of about _BATCH_BYTES."""
    package = load_package("tensorflow_datasets", "tfds", piece.path)
    builder = package.builder_from_directory(os.path.dirname(piece.path))
    split = _split_of(piece, builder.info.splits)
    info = builder.info.splits[split]
    # A piece counts examples from the start of its file, the library from the start of the split.
    files_before = info.filenames.index(piece.name)
    examples_before = sum(info.shard_lengths[:files_before])
    source = builder.as_data_source(split)
    batch_size = max(int(_BATCH_BYTES / max(piece.scale, 1)), 1)
    for start in range(piece.start, piece.stop, batch_size):
        stop = min(start + batch_size, piece.stop)
        batch = source.__getitems__(range(examples_before + start, examples_before + stop))
        for example in batch:
            yield example[piece.options.key]


def _split_of(piece: InputRange, splits: Mapping[str, Any]) -> str:
    """The name of the split that a file belongs to."""
    for split, info in splits.items():
        if piece.name in info.filenames:
            return split
    raise ValueError(f"no split has the file {piece.name}")


FORMAT = Format(
    name="tfds",
    metavar="NAME[:SPLIT]",
    help="data sets of tensorflow-datasets on disk, as ArrayRecord; needs maxtrain[tfds]",
    example="--tfds wiki40b/en:train --tokenizer path/to/tokenizer.json --holdout 0.001",
    find=find,
    documents=documents,
    cut=any_record,
)
