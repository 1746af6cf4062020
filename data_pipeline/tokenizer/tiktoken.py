"""tiktoken's files of ranks, by the tiktoken package.

Each line of such a file has a token in base64 and its rank, which is its id. The file does not say
how text is split into words, or which special tokens there are. For public encodings both are
known here; for others they are read from a settings file beside it.
"""

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.base.extras import load_package
from data_pipeline.base.limited_files import read_limited
from data_pipeline.base.remote import RemotePath
from data_pipeline.base.strict_json import MAX_FILE_BYTES, loads
from data_pipeline.tokenizer.base import (
    END_OF_DOCUMENT,
    MAX_VOCABULARY,
    Located,
    Tokenizer,
    character_of_bytes,
    check_ids,
    cut,
    end_of_documents,
    splits_at_cuts,
)

PATTERNS = {
    "r50k": r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s",
    "cl100k": r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]"
    r"|\s+(?!\S)|\s",
    "o200k": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
_FIM = {
    "<|fim_prefix|>": 100258,
    "<|fim_middle|>": 100259,
    "<|fim_suffix|>": 100260,
    "<|endofprompt|>": 100276,
}
ENCODINGS: dict[str, tuple[str, dict[str, int]]] = {
    "r50k_base": ("r50k", {END_OF_DOCUMENT: 50256}),
    "p50k_base": ("r50k", {END_OF_DOCUMENT: 50256}),
    "cl100k_base": ("cl100k", {END_OF_DOCUMENT: 100257} | _FIM),
    "o200k_base": ("o200k", {END_OF_DOCUMENT: 199999, "<|endofprompt|>": 200018}),
}
# A text of all kinds of characters, on which a pattern is tried.
_LATIN = "".join(map(chr, range(0x250)))
_EVERYTHING = _LATIN + " don't 1234\r\n\n\t東京 🙂 e\u0301 \u3000x  "


def is_ranks(content: bytes) -> bool:
    """Return whether a file begins with a token and its rank."""
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?(\n|$)", content) is not None


def ranks_settings(path: Path | RemotePath) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens of a file of ranks.

    Raises:
        ValueError: its settings file does not have these two fields.
        DataError: it has no settings file, and is no public encoding.
    """
    beside = path.with_name(f"{path.name}.json")
    if beside.exists():
        settings = loads(read_limited(beside, MAX_FILE_BYTES))
        if not isinstance(settings, dict) or settings.keys() != {"pattern", "special_tokens"}:
            raise ValueError(f'{beside.name} must be {{"pattern": ..., "special_tokens": {{...}}}}')
        return settings["pattern"], settings["special_tokens"]
    if path.stem in ENCODINGS:
        return ENCODINGS[path.stem]
    example = json.dumps({"pattern": "cl100k", "special_tokens": {END_OF_DOCUMENT: 100257}})
    raise DataError(
        f"tokenizer={path}: is a file of ranks, which does not say how text is split or which "
        f"special tokens there are. Write {beside.name} beside it, such as {example}; pattern is "
        f"{', '.join(PATTERNS)} or a regular expression."
    )


class TiktokenTokenizer(Tokenizer):
    """A tokenizer made from a file of ranks.

    Args:
        content: the bytes of the file.
        name: short, for people.
        pattern: splits text into words; a name in PATTERNS, or a regular expression.
        special: the ids of special tokens, by spelling.
        eod: the special token that ends documents; None: the first usual one that there is.

    Raises:
        ValueError: the file, the pattern or the special tokens can't be used, or there is no `eod`.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        pattern: str,
        special: dict[str, int],
        eod: str | None = None,
    ):
        package = load_package("tiktoken", "tiktoken", f"tokenizer {name}")
        regex = load_package("regex", "tiktoken", f"tokenizer {name}")
        ranks = _parse(content)
        if not isinstance(pattern, str) or not isinstance(special, dict) or "" in special:
            raise ValueError("the pattern must be text, and special tokens must be text with an id")
        check_ids(special or {END_OF_DOCUMENT: 0})
        different_ids = {*ranks.values(), *special.values()}
        if len(different_ids) < len(ranks) + len(special):
            raise ValueError("two tokens have the same id")
        pattern = PATTERNS.get(pattern, pattern)
        try:
            self._pattern: Any = regex.compile(pattern)
            self.inner: Any = package.Encoding(
                name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special
            )
        except (regex.error, ValueError) as error:
            raise ValueError(f"its pattern is not a regular expression: {error}") from error
        if "".join(self._split(_EVERYTHING)) != _EVERYTHING:
            raise ValueError("its pattern leaves out characters of a text")
        self.name = name
        self.special = special
        self.vocab_size = self.inner.max_token_value + 1
        self.eod_id = end_of_documents(special, eod)
        end = None
        for token, i in special.items():
            if i == self.eod_id:
                end = token
        record = {
            "type": "tiktoken",
            "pattern": pattern,
            "special": special,
            "eod": end,
            "ranks": base64.b64encode(content).decode(),
        }
        self.content = (json.dumps(record, sort_keys=True) + "\n").encode()
        # The number of bytes of each token by id; 0: it is a special token, or there is none.
        self._sizes = np.zeros(self.vocab_size, np.int64)
        self._sizes[list(ranks.values())] = [len(token) for token in ranks]
        self._divisible = splits_at_cuts(self._split)

    def _split(self, text: str) -> list[str]:
        return [found.group() for found in self._pattern.finditer(text)]

    def encode(self, text: str) -> np.ndarray:
        if not self._divisible:
            return self._encode(text)
        return np.concatenate([self._encode(piece) for piece in cut(text)])

    def _encode(self, text: str) -> np.ndarray:
        try:
            return self.inner.encode_to_numpy(text, disallowed_special=()).astype(np.int32)
        except ValueError:
            # The package's own matcher fails on several hundred thousand spaces in a row.
            ids = []
            for part in self._split(text):
                ids += self.inner._encode_single_piece(part)
            return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        of_text = []
        for i in map(int, ids):
            if 0 <= i < self.vocab_size and self._sizes[i] > 0:
                of_text.append(i)
        return self.inner.decode(of_text)

    def token_bytes(self, i: int) -> bytes:
        if not 0 <= i < self.vocab_size or self._sizes[i] == 0:
            return b""
        return self.inner.decode_single_token_bytes(i)

    def locate_text(self, text: str, first: bool) -> Located:
        ids = self.encode(text)
        character = character_of_bytes(text)
        sizes = self._sizes[ids]
        stops = np.cumsum(sizes)
        starts = stops - sizes
        return ids, character[starts], character[stops - 1] + 1


def _parse(content: bytes) -> dict[bytes, int]:
    """The rank of each token in a file of ranks.

    Raises:
        ValueError: a line is not a token and its rank, or a byte has no token.
    """
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
        if not 0 <= int(rank) < MAX_VOCABULARY:
            raise ValueError(f"line {number} has a rank outside [0, {MAX_VOCABULARY:,})")
    for byte in range(256):
        if bytes([byte]) not in ranks:
            raise ValueError(f"it has no token for the byte 0x{byte:02X}")
    return ranks
