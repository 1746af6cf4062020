"""Files that hold only token ids, nanoGPT's .bin and OLMo's .npy: each document ends with the
end-of-document id.

The ids are little-endian uint16. They are wider if the tokenizer's vocabulary needs more than 16
bits, or if the upper halves of the file's first ids are all 0. OLMo's files have no header,
although their names end in .npy. A file with numpy's header is read as the header says.
"""

import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from data_pipeline.base.errors import DataError, UsageError, UserError
from data_pipeline.base.remote import is_url
from data_pipeline.sources.document import (
    Document,
    Format,
    InputOptions,
    InputRange,
    find_files,
    open_piece,
)
from data_pipeline.sources.token_ids import document, file_size, ids, need_tokenizer, numbers

_NUMPY = b"\x93NUMPY"
_LLM_C = np.array([20240520], "<i4").tobytes()
_HEAD_BYTES = 1 << 16
# How many tokens are searched at a time for an end-of-document id.
_WINDOW = 1 << 20
# The most tokens of a document, so that memory stays bounded.
_LONGEST = 1 << 25


def find_nanogpt(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, in tokens."""
    return _find("nanogpt", ".bin", pattern, options)


def find_olmo(pattern: str, options: InputOptions) -> list[InputRange]:
    """The files of a glob, in tokens."""
    return _find("olmo", ".npy", pattern, options)


def _find(name: str, ending: str, pattern: str, options: InputOptions) -> list[InputRange]:
    """The files that match a glob, in tokens.

    Raises:
        DataError: nothing matches, or a file has a header that can't be read here.
        UsageError: there is no tokenizer, or the tokenizer has no end-of-document id.
    """
    need_tokenizer(f"--{name} {pattern}", options)
    if options.eod_id is None:
        raise UsageError(
            f"--{name} {pattern}: documents end with an end-of-document id, and the tokenizer has "
            "none. Name it as eos_token in a tokenizer_config.json beside the tokenizer."
        )
    pieces = []
    for piece in find_files(pattern, name, options, ending):
        tokens = _open(piece)
        pieces.append(piece._replace(stop=len(tokens), scale=float(tokens.itemsize)))
    return pieces


def _open(piece: InputRange) -> Any:
    """The ids of a file [T], mapped into memory or read where they are looked at."""
    with open_piece(piece) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_LLM_C):
        fix = "Take it off: tail -c +1025 FILE > NEW"
        raise DataError(f"{piece.path}: begins with llm.c's header of 1024 bytes. {fix}")
    if head.startswith(_NUMPY):
        return _open_numpy(piece, head)
    return ids(piece, np.dtype(f"<u{_width(head, piece.options.vocab_size or 0)}"))


def _width(head: bytes, vocab_size: int) -> int:
    """Bytes of an id in a file that begins with `head`: 2, or more if the vocabulary needs them or
    the upper halves of all ids are 0."""
    width = 2
    values = np.frombuffer(head[: len(head) // 8 * 8], "<u2")
    while width < 8:
        is_needed = vocab_size > 1 << 8 * width
        halves_are_zero = len(values) >= 32 and not values[1::2].any()
        if not is_needed and not halves_are_zero:
            break
        width *= 2
        values = values[::2]
    return width


def _open_numpy(piece: InputRange, head: bytes) -> Any:
    """The ids of a file with numpy's header.

    Raises:
        DataError: the header is damaged, or the array is not one row of integers.
    """
    try:
        tokens = _load(piece, head)
    except (UserError, OSError):
        raise
    except Exception as error:
        # numpy parses the header as Python, so a damaged one can raise almost anything.
        fix = "Restore it from a copy, or make it again"
        raise DataError(f"{piece.path}: has numpy's header, but {error}. {fix}.") from error
    if getattr(tokens, "ndim", 1) != 1 or tokens.dtype.kind not in "iu":
        fix = "Save ids as one row of integers: ids.ravel()"
        raise DataError(f"{piece.path}: holds {tokens.dtype} {tokens.shape}. {fix}.")
    return tokens


def _load(piece: InputRange, head: bytes) -> Any:
    """The array of a file with numpy's header, of any shape.

    Raises:
        ValueError, EOFError: the file is damaged.
    """
    if not is_url(piece.path):
        return np.load(piece.path, mmap_mode="r", allow_pickle=False)
    file = io.BytesIO(head)
    version, _ = np.lib.format.read_magic(file)
    if version == 1:
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    if len(shape) != 1 or dtype.kind not in "iu":
        # The caller refuses it by its type and number of dims; the values are not needed.
        return np.empty((0,) * len(shape), dtype)
    count = int(np.prod(shape))
    first_byte = file.tell()
    if first_byte + count * dtype.itemsize > file_size(piece.path):
        raise EOFError("it is cut short")
    return numbers(piece, piece.path, dtype, first_byte, count)


def _ends(tokens: np.ndarray, start: int, piece: InputRange) -> Iterator[int]:
    """The positions of end-of-document ids from `start` to the piece's stop; one window of tokens
    is in memory at a time."""
    for at in range(start, piece.stop, _WINDOW):
        stop = min(at + _WINDOW, piece.stop)
        window = tokens[at:stop]
        ends = at + np.flatnonzero(window == piece.options.eod_id)
        yield from ends.tolist()


def cut(piece: InputRange, at: int) -> int:
    """The first place from token `at` on where a document begins, or the piece's stop."""
    start = max(at - 1, piece.start)
    for end in _ends(_open(piece), start, piece):
        return end + 1
    return piece.stop


def documents(piece: InputRange) -> Iterator[Document]:
    """Documents of the piece that belong to its part.

    Raises:
        DataError: an id is outside the vocabulary, or a document is too long.
    """
    tokens = _open(piece)
    header_bytes = file_size(piece.path) - tokens.nbytes
    first = piece.start
    for end in itertools.chain(_ends(tokens, piece.start, piece), [piece.stop]):
        length = end - first
        if length > _LONGEST:
            raise DataError(
                f"{piece.path}: has no end-of-document id ({piece.options.eod_id}) in {length:,} "
                f"tokens from token {first} on; a document may have at most {_LONGEST:,}. Give "
                "--tokenizer the tokenizer that made these ids."
            )
        if first < piece.stop:
            where = f"{piece.path}, token {first}"
            offset = header_bytes + first * tokens.itemsize
            yield from document(piece, tokens[first:end], where, offset)
        first = end + 1


NANOGPT = Format(
    name="nanogpt",
    metavar="GLOB",
    help="nanoGPT's .bin files of token ids, where the tokenizer's end-of-document id ends each "
    "document",
    example="--nanogpt 'openwebtext/train.bin' --tokenizer path/to/tokenizer.json",
    find=find_nanogpt,
    documents=documents,
    cut=cut,
)
OLMO = Format(
    name="olmo",
    metavar="GLOB",
    help="OLMo's .npy files of token ids, divided into documents as for --nanogpt",
    example="--olmo 'dolma/**/*.npy' --tokenizer path/to/tokenizer.json --holdout 0.001",
    find=find_olmo,
    documents=documents,
    cut=cut,
)
