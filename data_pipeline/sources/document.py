"""Common parts of all formats: finding files, pieces of files, checking text. This module knows
neither tokenizers nor shards.
"""

import glob
import hashlib
import os
import shlex
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np

from data_pipeline.base import remote
from data_pipeline.base.errors import DataError, UsageError, blame_storage
from data_pipeline.base.extras import (
    load_package as load_package,  # its adapters' way to their packages
)
from data_pipeline.base.remote import is_url
from data_pipeline.chat.chat import Template
from data_pipeline.sources.chat_map import ChatMap
from data_pipeline.sources.reading import open_file

BOM = b"\xef\xbb\xbf"
EMPTY = "empty, or only whitespace"
MARKED = "byte order mark removed"
SAME = "chosen and rejected are the same"
NO_WORDS = "an answer without text is learnt"
# Counted, but never an error.
HARMLESS = (EMPTY, MARKED, SAME, NO_WORDS)


class PreferenceForm(NamedTuple):
    """Form of preference records: pairs with a prompt ("explicit"), pairs of whole conversations
    ("implicit") or answers with a label ("unpaired"); and the type of their content.
    """

    kind: Literal["explicit", "implicit", "unpaired"]
    content: str

    @property
    def group(self) -> int:
        """Documents of a record."""
        return 1 if self.kind == "unpaired" else 2

    def describe(self) -> str:
        """Describe the form for messages."""
        kinds = {
            "explicit": "pairs with a prompt",
            "implicit": "pairs of whole conversations",
            "unpaired": "answers with a label",
        }
        return f"{kinds[self.kind]}, {self.content}"


class InputOptions(NamedTuple):
    """Options of a command that apply to all of its input; the tokenizer only if one was given."""

    key: str = "text"  # of records: which field holds the document
    vocab_size: int | None = None
    eod_id: int | None = None
    tokenizer: str = ""  # as given
    special: tuple[str, ...] = ()  # its special tokens
    chat_template: str = ""  # as given
    chat_date: str = ""
    template: Template | None = None  # what became of the last four
    chat_map: ChatMap | None = None  # from columns to messages; None: records have messages
    system: str = ""  # the system message of conversations that have none
    columns: str = ""  # as given
    margin: bool = False  # of preferences: how much better the chosen one is, too
    preferences: PreferenceForm | None = None  # the form of the first record


class InputRange(NamedTuple):
    """A range of an input file, of whole documents or lines, of one format and one part of the
    data.

    `name` is relative to the glob's fixed folder, so that what depends on it does not depend on
    where the input lies. `start` and `stop` count bytes or, where the format's own reader does,
    records or tokens of about `scale` bytes each. `part` and `share`, for formats whose files hold
    many documents, say which of them belong here. `beside` are other files that it is read with.
    `path` may be a URL.
    """

    format: str
    name: str
    path: str
    start: int
    stop: int
    options: InputOptions = InputOptions()
    scale: float = 1.0
    part: Literal["all", "train", "eval"] = "all"
    share: float = 0.0
    beside: tuple[str, ...] = ()
    stamp: str = ""  # of a file behind a URL: changes when it does

    @property
    def size(self) -> int:
        """Bytes, about."""
        return round((self.stop - self.start) * self.scale)

    def holds(self, raw: bytes) -> bool:
        """Return whether a document of these bytes belongs to its part."""
        return self.part == "all" or held_out(raw, self.share) == (self.part == "eval")


class Document(NamedTuple):
    """One document; a document with a problem is repaired, or empty if nothing of it can be used.

    It is `text`; or `tokens`, ids [T] of the tokenizer in use, without an end-of-document mark; or
    `spans`, text and whether it is a training target. `problem` is what is wrong with it in words
    that many documents share, `detail` what is its own.

    `rejected`: spans of a second document, if it is a pair: then `spans` is the chosen one.
    `value`: a number that belongs to it. `columns`: a JSON object that belongs to it. `apart`: its
    spans are encoded one by one, and its end mark is a target, for nothing else in it ends an
    answer.
    """

    text: str | None
    where: str
    problem: str = ""
    tokens: np.ndarray | None = None
    spans: list[tuple[str, bool]] | None = None
    detail: str = ""
    rejected: list[tuple[str, bool]] | None = None
    value: float | None = None
    apart: bool = False
    columns: str | None = None

    @property
    def members(self) -> list[list[tuple[str, bool]]]:
        """The spans of each document: of one, or of both of a pair; none if it has no spans."""
        return [spans for spans in (self.spans, self.rejected) if spans is not None]

    @property
    def is_preference(self) -> bool:
        """Return whether the document is a pair, or has a label."""
        return self.rejected is not None or self.value is not None

    @property
    def empty(self) -> bool:
        return not (self.text or self.spans or (self.tokens is not None and len(self.tokens)))


class Format(NamedTuple):
    """A format of input: the option --NAME, what it finds, and how its pieces are read.

    A piece is a whole file until it is divided. `cut(piece, at)` is the first place from `at` on,
    at most its stop, where it can be; None if it can't. Files that hold `many` documents are
    divided for parallel work and their documents held out one by one; else a file is one document,
    held out by its name, and only cut to hold out the tail.
    """

    name: str
    metavar: str  # of the option's values; empty: it takes none, and `find` gets an empty one
    help: str
    example: str  # arguments of `prepare` after OUT
    find: Callable[[str, InputOptions], list[InputRange]]
    documents: Callable[[InputRange], Iterator[Document]]
    cut: Callable[[InputRange, int], int | None]
    many: bool = True


def open_piece(piece: InputRange) -> BinaryIO:
    """The file of a piece, wherever it is. DataError: it is behind a URL, and was changed since it
    was found. StorageError: it can't be read now."""
    return open_file(piece.path, piece.stamp)


def refuse_url(option: str, pattern: str) -> None:
    """UsageError: a format whose own library reads local files only was given a URL."""
    if is_url(pattern):
        fix = "Copy its files to a disk of this machine and name them there"
        raise UsageError(f"--{option} {pattern}: is read by a library that can't open URLs. {fix}.")


def line_start(piece: InputRange, at: int) -> int:
    """Return where the first line from byte `at` on begins, at most the piece's stop."""
    with open_piece(piece) as file:
        file.seek(max(at - 1, 0))
        if at:
            file.readline()
        return min(file.tell(), piece.stop)


def any_record(piece: InputRange, at: int) -> int:
    """Return `at`, where a piece begins that can be divided between any two records."""
    return min(at, piece.stop)


def held_out(name: str | bytes, share: float) -> bool:
    """Return whether a name belongs to the held-out share: always the same answer, whatever else
    there is.
    """
    if isinstance(name, str):
        name = name.encode(errors="surrogateescape")
    digest = hashlib.blake2b(name, digest_size=8).digest()
    return int.from_bytes(digest) < share * 2**64


def _fixed_parts(parts: Iterable[str]) -> Iterator[str]:
    """The folders of a glob before the first that has a wildcard."""
    for part in parts:
        if glob.has_magic(part):
            return
        yield part


def find_files(
    pattern: str, format: str, options: InputOptions, ending: str = ""
) -> list[InputRange]:
    """Whole files, in bytes, that match a path or a glob, sorted by name; DataError: nothing
    matches, or a folder was named."""
    if is_url(pattern):
        return _find_remote(pattern, format, options, ending)
    if os.path.isdir(pattern):
        quoted = shlex.quote(os.path.join(pattern, "**", f"*{ending}"))
        raise DataError(
            f"--{format} {pattern}: is a directory. Name its files: --{format} {quoted}"
        )
    fixed = Path(*_fixed_parts(Path(pattern).parts[:-1]))
    found = {}
    for path in glob.glob(pattern, recursive=True):
        if os.path.isfile(path):
            found[os.path.relpath(path, fixed)] = path
    if not found:
        fix = "Check the path; quote globs, and use ** to look into folders"
        raise DataError(f"--{format} {pattern}: matches no file. {fix}.")
    return [
        InputRange(format, name, found[name], 0, os.path.getsize(found[name]), options)
        for name in sorted(found)
    ]


def _find_remote(pattern: str, format: str, options: InputOptions, ending: str) -> list[InputRange]:
    found = remote.find(pattern)
    if not found and remote.RemotePath(pattern).is_dir():
        quoted = shlex.quote(f"{pattern.rstrip('/')}/**/*{ending}")
        raise DataError(
            f"--{format} {pattern}: is a directory. Name its files: --{format} {quoted}"
        )
    if not found:
        fix = "Check bucket and path; quote globs; ** looks into folders"
        raise DataError(f"--{format} {pattern}: matches no file. {fix}.")
    fixed = "/".join(_fixed_parts(pattern.split("/")[:-1]))
    named = {file.path.url.removeprefix(f"{fixed}/"): file for file in found}
    return [
        InputRange(format, name, f.path.url, 0, f.size, options, stamp=f.stamp)
        for name, f in sorted(named.items())
    ]


def record_documents(
    piece: InputRange, records: Iterable[Any], *damage: type[Exception]
) -> Iterator[Document]:
    """The documents that are text, str or UTF-8, among the records of a piece, if they belong to
    its part.

    `damage` is what reading the next record raises when there is any: the rest of the piece is then
    one bad document. StorageError: the record can't be read now.
    """
    row = piece.start - 1
    try:
        for row, record in enumerate(records, piece.start):
            if isinstance(record, str):
                record = record.encode(errors="surrogatepass")
            if isinstance(record, bytes):
                is_here = piece.holds(record)
            else:
                is_here = piece.holds(b"")
            if is_here:
                document = _record_document(record, piece.options.key)
                yield document._replace(where=f"{piece.path}, row {row}")
    except damage as error:
        blame_storage(piece.path, error)
        reason = getattr(error, "strerror", None) or str(error).partition("\n")[0]
        yield Document(None, f"{piece.path}, row {row + 1}", f"can't be read ({reason})")


def _record_document(record: Any, key: str) -> Document:
    """The document of a record's field, bytes if it is text; it does not say where it is."""
    if isinstance(record, bytes):
        return decode(record, "", 0, keep_mark=True)
    if record is None:
        return Document(None, "", f"{key!r} is null")
    return Document(None, "", f"{key!r} is not a string")


def decode(raw: bytes, path: str, line: int = 1, keep_mark: bool = False) -> Document:
    """Bytes to text; `line` is the number of the first line. A byte order mark belongs to a file
    and is removed; `keep_mark`: it is part of a record."""
    body = raw
    if not keep_mark:
        body = raw.removeprefix(BOM)
    try:
        document = checked_document(body.decode(), path, line)
    except UnicodeDecodeError as error:
        at = line + body.count(b"\n", 0, error.start)
        repaired = body.decode(errors="replace").replace("\0", "\ufffd")
        return Document(repaired, f"{path}:{at}", "not UTF-8")
    if len(body) < len(raw) and not document.problem:
        return document._replace(problem=MARKED)
    return document


def checked_document(text: str, path: str, line: int) -> Document:
    """Find the problems of a text and repair them: NUL, lone surrogates (as JSON can spell them),
    nothing but whitespace.
    """
    if "\0" in text:
        line += text.count("\n", 0, text.index("\0"))
        return Document(text.replace("\0", "\ufffd"), f"{path}:{line}", "NUL character")
    if not text or text.isspace():
        return Document(None, f"{path}:{line}", EMPTY)
    if not text.isascii():
        repaired = text.encode(errors="surrogatepass").decode(errors="replace")
        if repaired != text:
            return Document(repaired, f"{path}:{line}", "lone surrogate")
    return Document(text, f"{path}:{line}")
