"""Text files: each is one document. Line ends are kept as they are."""

import glob
import sysconfig
from collections.abc import Iterator
from pathlib import PurePath

from data_pipeline.sources.document import (
    Document,
    Format,
    Options,
    Piece,
    decode,
    find_files,
    line_start,
    open_piece,
)

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def documents(piece: Piece) -> Iterator[Document]:
    """The document of a piece of a file."""
    try:
        with open_piece(piece) as file:
            before = file.read(piece.start).count(b"\n")  # 0 unless the file was divided
            document = decode(file.read(piece.size), piece.path, before + 1)
    except OSError as error:
        document = Document(None, f"{piece.path}:1", f"can't be read ({error.strerror})")
    yield document


def find(pattern: str, options: Options) -> list[Piece]:
    """The files of a glob."""
    return find_files(pattern, "text", options)


def python_stdlib(_: str, options: Options) -> list[Piece]:
    """The Python source of the running interpreter's standard library, without tests and installed
    packages."""
    pieces = find_files(
        glob.escape(sysconfig.get_paths()["stdlib"]) + "/**/*.py", "python-stdlib", options
    )
    return [piece for piece in pieces if not _NOT_LIBRARY & set(PurePath(piece.name).parts)]


TEXT = Format(
    "text", "GLOB", "text files, each one document", "--text 'books/**/*.txt' --tokenizer bpe:32000 --holdout 0.01",
    find, documents, line_start, many=False,
)  # fmt: skip
PYTHON_STDLIB = Format(
    "python-stdlib", "", "the running Python's own standard library, without tests",
    "--python-stdlib --tokenizer bpe:4096 --holdout 0.05", python_stdlib, documents, line_start, many=False,
)  # fmt: skip
