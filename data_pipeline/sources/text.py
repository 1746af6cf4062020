"""Text files: each is one document. Line ends are kept as they are."""

import glob
import sysconfig
from collections.abc import Iterator
from pathlib import PurePath

from data_pipeline.sources.document import Document, Piece, decode, find_files

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


def documents(piece: Piece) -> Iterator[Document]:
    """The document of a piece of a file."""
    try:
        with open(piece.path, "rb") as file:
            before = file.read(piece.start).count(b"\n")  # 0 unless the file was divided
            document = decode(file.read(piece.size), piece.path, before + 1)
    except OSError as error:
        document = Document(None, f"{piece.path}:1", f"can't be read ({error.strerror})")
    yield document


def python_stdlib() -> list[Piece]:
    """The Python source of the running interpreter's standard library, without tests and installed packages."""
    pieces = find_files(glob.escape(sysconfig.get_paths()["stdlib"]) + "/**/*.py", "text")
    return [piece for piece in pieces if not _NOT_LIBRARY & set(PurePath(piece.name).parts)]
