"""Files of nothing but token ids, nanoGPT's .bin and OLMo's .npy: documents are what lies between
end-of-document ids.

The ids are little-endian uint16, or wider where the tokenizer's vocabulary needs it or the upper
halves of all that a file begins with are 0. The name .npy notwithstanding, OLMo's files have no
header; numpy's own, which have one, are read by it.
"""

import io
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from data_pipeline.errors import DataError, UsageError, UserError
from data_pipeline.remote import is_url
from data_pipeline.sources.document import Document, Format, Options, Piece, find_files, open_piece
from data_pipeline.sources.token_ids import document, file_size, ids, need_tokenizer, numbers

_NUMPY = b"\x93NUMPY"
_LLM_C = np.array([20240520], "<i4").tobytes()
_HEAD_BYTES = 1 << 16
# Tokens that are searched for an end of document at a time.
_WINDOW = 1 << 20
# Tokens of a document, so that memory stays bounded.
_LONGEST = 1 << 25


def find_nanogpt(pattern: str, options: Options) -> list[Piece]:
    """The files of a glob, in tokens."""
    return _find("nanogpt", ".bin", pattern, options)


def find_olmo(pattern: str, options: Options) -> list[Piece]:
    """The files of a glob, in tokens."""
    return _find("olmo", ".npy", pattern, options)


def _find(name: str, ending: str, pattern: str, options: Options) -> list[Piece]:
    """DataError: a file is not what it should be. UsageError: no tokenizer, or one that ends no
    documents."""
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


def _open(piece: Piece) -> Any:
    """The ids of a file [T], mapped into memory or read where they are looked at."""
    with open_piece(piece) as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(_LLM_C):
        mend = "Take it off: tail -c +1025 FILE > NEW"
        raise DataError(f"{piece.path}: begins with llm.c's header of 1024 bytes. {mend}")
    if head.startswith(_NUMPY):
        return _open_numpy(piece, head)
    return ids(piece, np.dtype(f"<u{_width(head, piece.options.vocab_size or 0)}"))


def _width(head: bytes, vocab_size: int) -> int:
    """Bytes of an id in a file that begins with `head`: 2, or more where the vocabulary needs them,
    or the upper halves of all ids are 0."""
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


def _open_numpy(piece: Piece, head: bytes) -> Any:
    """The ids of a file with numpy's header."""
    try:
        tokens = _load(piece, head)
    except (UserError, OSError):
        raise
    except Exception as error:
        # A damaged header is parsed as Python, which ends in errors of many kinds.
        mend = "Restore it from a copy, or make it again"
        raise DataError(f"{piece.path}: has numpy's header, but {error}. {mend}.") from error
    if getattr(tokens, "ndim", 1) != 1 or tokens.dtype.kind not in "iu":
        mend = "Save ids as one row of integers: ids.ravel()"
        raise DataError(f"{piece.path}: holds {tokens.dtype} {tokens.shape}. {mend}.")
    return tokens


def _load(piece: Piece, head: bytes) -> Any:
    """The array of a file with numpy's header, of any shape. ValueError, EOFError: it is
    damaged."""
    if not is_url(piece.path):
        return np.load(piece.path, mmap_mode="r", allow_pickle=False)
    file = io.BytesIO(head)
    version, _ = np.lib.format.read_magic(file)
    if version == 1:
        shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    else:
        shape, _, dtype = np.lib.format.read_array_header_2_0(file)
    count = int(np.prod(shape))
    if len(shape) != 1 or dtype.kind not in "iu":
        return np.empty(shape and (0,) * len(shape), dtype)
    if file.tell() + count * dtype.itemsize > file_size(piece.path):
        raise EOFError("it is cut short")
    return numbers(piece, piece.path, dtype, file.tell(), count)


def _ends(tokens: np.ndarray, start: int, piece: Piece) -> Iterator[int]:
    """Where end-of-document ids are, from `start` to the piece's stop; nothing is held but a
    window."""
    for at in range(start, piece.stop, _WINDOW):
        window = tokens[at : min(at + _WINDOW, piece.stop)]
        ends = at + np.flatnonzero(window == piece.options.eod_id)
        yield from ends.tolist()


def cut(piece: Piece, at: int) -> int:
    """Behind the first end of a document from token `at` - 1 on."""
    for end in _ends(_open(piece), max(at - 1, piece.start), piece):
        return end + 1
    return piece.stop


def documents(piece: Piece) -> Iterator[Document]:
    """Documents of the piece that belong to its part. DataError: an id too large, or a document too
    long."""
    tokens = _open(piece)
    header_bytes = file_size(piece.path) - tokens.nbytes
    first = piece.start
    for end in itertools.chain(_ends(tokens, piece.start, piece), [piece.stop]):
        if end - first > _LONGEST:
            what = f"{end - first:,} tokens from token {first} on hold no {piece.options.eod_id}"
            raise DataError(
                f"{piece.path}: {what}, the tokenizer's end of a document; at most {_LONGEST:,} "
                "may. Give --tokenizer the one that these ids belong to."
            )
        if first < piece.stop:
            where = f"{piece.path}, token {first}"
            offset = header_bytes + first * tokens.itemsize
            yield from document(piece, tokens[first:end], where, offset)
        first = end + 1


NANOGPT = Format(
    "nanogpt", "GLOB", "flat .bin files of token ids, documents ended by the tokenizer's own id for it",
    "--nanogpt 'openwebtext/train.bin' --tokenizer path/to/tokenizer.json", find_nanogpt, documents, cut,
)  # fmt: skip
OLMO = Format(
    "olmo", "GLOB", "OLMo's .npy files of token ids, as for --nanogpt",
    "--olmo 'dolma/**/*.npy' --tokenizer path/to/tokenizer.json --holdout 0.001", find_olmo, documents, cut,
)  # fmt: skip
