"""Text files: each is one document. Line ends are kept as they are."""

import glob
import sysconfig
from collections.abc import Iterator
from pathlib import PurePath

from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    decode,
    find_files,
    line_start,
    open_piece,
)

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def documents(piece: InputRange) -> Iterator[Document]:
    """The document of a piece of a file."""
    try:
        with open_piece(piece) as file:
            # 0 unless the file was divided.
            lines_before = file.read(piece.start).count(b"\n")
            document = decode(file.read(piece.size), piece.path, lines_before + 1)
    except OSError as error:
        document = Document(None, f"{piece.path}:1", f"can't be read ({error.strerror})")
    yield document


def find(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob."""
    return find_files(pattern, "text", options)


def python_stdlib(_: str, options: InputOptions) -> list[InputRange]:
    """The Python source of the running interpreter's standard library, without tests and installed
    packages."""
    folder = sysconfig.get_paths()["stdlib"]
    files = find_files(f"{glob.escape(folder)}/**/*.py", "python-stdlib", options)
    pieces = []
    for piece in files:
        folders = PurePath(piece.name).parts
        if _NOT_LIBRARY.isdisjoint(folders):
            pieces.append(piece)
    return pieces


TEXT = Format(
    name="text",
    metavar="GLOB",
    help="text files, each one document",
    example="--text 'books/**/*.txt' --tokenizer bpe:32000 --holdout 0.01",
    find=find,
    documents=documents,
    cut=line_start,
    many=False,
)
PYTHON_STDLIB = Format(
    name="python-stdlib",
    metavar="",
    help="the running Python's own standard library, without tests",
    example="--python-stdlib --tokenizer bpe:4096 --holdout 0.05",
    find=python_stdlib,
    documents=documents,
    cut=line_start,
    many=False,
)
