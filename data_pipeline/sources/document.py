"""What all sources share: finding files, pieces of files, and judging text. Knows neither tokenizers nor shards."""

import glob
import hashlib
import itertools
import os
from pathlib import Path
from typing import Literal, NamedTuple

from data_pipeline.errors import DataError

BOM = b"\xef\xbb\xbf"
EMPTY, MARKED = "empty, or only whitespace", "byte order mark removed"
HARMLESS = (EMPTY, MARKED)  # counted, but never an error


class Piece(NamedTuple):
    """A range of bytes of an input file, of whole lines, of one kind and one part of the data.

    `name` is relative to the glob's fixed folder, so that what depends on it does not depend on where the input lies.
    `part` and `share`, for kinds whose documents are divided one by one, say which of them belong here.
    """

    kind: Literal["text", "jsonl"]
    name: str
    path: str
    start: int
    stop: int
    key: str = ""
    part: Literal["all", "train", "eval"] = "all"
    share: float = 0.0

    @property
    def size(self) -> int:
        return self.stop - self.start

    def line_start(self, at: int) -> int:
        """Where the first line at or after byte `at` begins, at most `stop`."""
        with open(self.path, "rb") as file:
            file.seek(max(at - 1, 0))
            if at:
                file.readline()
            return min(file.tell(), self.stop)


class Document(NamedTuple):
    """One document, or what was wrong with it: then `text` is the mended one, or None if nothing of it can be used."""

    text: str | None
    where: str
    problem: str = ""


def held_out(name: str | bytes, share: float) -> bool:
    """Whether what has this name belongs to the held-out share: the same answer for ever, whatever else there is."""
    data = name.encode(errors="surrogateescape") if isinstance(name, str) else name
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) < share * 2**64


def find_files(pattern: str, kind: Literal["text", "jsonl"], key: str = "") -> list[Piece]:
    """Whole files that match a path or a glob, sorted by name; DataError: nothing matches, or a folder was named."""
    if os.path.isdir(pattern):
        raise DataError(f"--{kind} {pattern}: is a directory. Name its files: --{kind} '{os.path.join(pattern, '**', '*')}'")
    fixed = Path(*itertools.takewhile(lambda part: not glob.has_magic(part), Path(pattern).parts[:-1]))
    found = {os.path.relpath(path, fixed): path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)}
    if not found:
        raise DataError(f"--{kind} {pattern}: matches no file. Check the path; quote globs, and use ** to look into folders.")
    return [Piece(kind, name, found[name], 0, os.path.getsize(found[name]), key) for name in sorted(found)]


def decode(raw: bytes, path: str, line: int = 1) -> Document:
    """Bytes to text; `line` is the number of the first line."""
    body = raw.removeprefix(BOM)
    try:
        document = judge(body.decode(), path, line)
    except UnicodeDecodeError as error:
        at = line + body.count(b"\n", 0, error.start)
        return Document(body.decode(errors="replace").replace("\0", "\ufffd"), f"{path}:{at}", "not UTF-8")
    return document._replace(problem=MARKED) if len(body) < len(raw) and not document.problem else document


def judge(text: str, path: str, line: int) -> Document:
    """Find what is wrong with text and mend it: NUL, lone surrogates (as JSON can spell them), nothing but whitespace."""
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        return Document(text.replace("\0", "\ufffd"), f"{path}:{line}", "NUL character")
    if not text or text.isspace():
        return Document(None, f"{path}:{line}", EMPTY)
    if not text.isascii() and (mended := text.encode(errors="surrogatepass").decode(errors="replace")) != text:
        return Document(mended, f"{path}:{line}", "lone surrogate")
    return Document(text, f"{path}:{line}")
