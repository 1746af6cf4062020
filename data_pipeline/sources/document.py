"""What all sources share: finding files, pieces of files, and judging text. Knows neither tokenizers nor shards."""

import fnmatch
import glob
import hashlib
import os
from collections.abc import Iterable
from typing import Literal, NamedTuple

from data_pipeline.errors import DataError

BOM = b"\xef\xbb\xbf"


class Piece(NamedTuple):
    """A range of bytes of an input file, of one kind and one part of the data.

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


class Document(NamedTuple):
    """One document, or what was wrong with it.

    `text` is None if nothing of it can be used; with a `problem` it is the mended text. A `harmless` problem is counted but
    never an error, and the text, if any, is used.
    """

    text: str | None
    where: str
    problem: str = ""
    harmless: bool = False


def held_out(name: str | bytes, share: float) -> bool:
    """Whether what has this name belongs to the held-out share: the same answer for ever, whatever else there is."""
    data = name.encode(errors="surrogateescape") if isinstance(name, str) else name
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest()) < share * 2**64


def find_files(pattern: str, kind: Literal["text", "jsonl"], exclude: Iterable[str] = (), key: str = "") -> list[Piece]:
    """Whole files that match, sorted by name.

    Args:
        pattern: a path, or a glob (`**` for any folders; hidden files only if spelled out).
        kind: of the pieces.
        exclude: globs; a file whose relative name or path matches one is left out.
        key: of the pieces.

    Raises:
        DataError: nothing matches, or a folder was named.
    """
    if os.path.isdir(pattern):
        raise DataError(f"--{kind} {pattern}: is a directory. Name its files: --{kind} '{os.path.join(pattern, '**', '*')}'")
    fixed, rest = os.path.dirname(pattern) if not glob.has_magic(pattern) else "", pattern
    if glob.has_magic(pattern):
        while glob.has_magic(rest):
            rest = os.path.dirname(rest)
        fixed = rest
    paths = glob.glob(pattern, recursive=True) if glob.has_magic(pattern) else [pattern] * os.path.exists(pattern)
    found = {os.path.relpath(path, fixed or "."): path for path in paths if os.path.isfile(path)}
    if not found:
        raise DataError(f"--{kind} {pattern}: matches no file. Check the path; quote globs, and use ** to look into folders.")
    kept = [
        name for name in sorted(found) if not any(fnmatch.fnmatch(text, e) for e in exclude for text in (name, found[name]))
    ]
    if not kept:
        raise DataError(f"--{kind} {pattern}: --exclude leaves out all {len(found)} files. Exclude less.")
    return [Piece(kind, name, found[name], 0, os.path.getsize(found[name]), key) for name in kept]


def decode(raw: bytes, path: str, line: int = 1) -> Document:
    """Bytes to text; `line` is the number of the first line."""
    body = raw.removeprefix(BOM)
    try:
        return judge(body.decode(), path, line, bom=len(body) < len(raw))
    except UnicodeDecodeError as error:
        at = line + body.count(b"\n", 0, error.start)
        return Document(body.decode(errors="replace").replace("\0", "\ufffd"), f"{path}:{at}", "not UTF-8")


def judge(text: str, path: str, line: int, bom: bool = False) -> Document:
    """Find what is wrong with text and mend it: NUL, lone surrogates (as JSON can spell them), nothing but whitespace."""
    where = f"{path}:{line}"
    if "\0" in text:
        return Document(
            text.replace("\0", "\ufffd"), f"{path}:{line + text.count(chr(10), 0, text.index(chr(0)))}", "NUL character"
        )
    if not text or text.isspace():
        return Document(None, where, "empty, or only whitespace", harmless=True)
    if not text.isascii() and (mended := text.encode(errors="surrogatepass").decode(errors="replace")) != text:
        return Document(mended, where, "lone surrogate")
    return Document(text, where, "byte order mark removed", harmless=True) if bom else Document(text, where)
