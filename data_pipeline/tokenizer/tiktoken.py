"""tiktoken's files of ranks, by the tiktoken package.

Such a file has one token a line, in base64, and its rank, which is its id. How text is split
before, and the special tokens, it does not say: for public encodings they are known here, for
others a settings file beside it gives them.
"""

import base64
import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.errors import DataError
from data_pipeline.extras import load_package
from data_pipeline.remote import RemotePath
from data_pipeline.strict_json import loads
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
_EVERYTHING = (
    "".join(map(chr, range(0x250))) + " don't 1234\r\n\n\t東京 🙂 e\u0301 \u3000x  "
)  # to try a pattern on


def is_ranks(content: bytes) -> bool:
    """Whether a file has tokens and ranks."""
    return re.match(rb"[A-Za-z0-9+/]+=* \d+\r?(\n|$)", content) is not None


def ranks_settings(path: Path | RemotePath) -> tuple[str, dict[str, int]]:
    """Pattern and special tokens of a file of ranks. ValueError: its settings are no such.
    DataError: there are none."""
    beside = path.with_name(f"{path.name}.json")
    if beside.exists():
        settings = loads(beside.read_bytes())
        if not isinstance(settings, dict) or settings.keys() != {"pattern", "special_tokens"}:
            raise ValueError(f'{beside.name} must be {{"pattern": ..., "special_tokens": {{...}}}}')
        return settings["pattern"], settings["special_tokens"]
    if path.stem in ENCODINGS:
        return ENCODINGS[path.stem]
    example = json.dumps({"pattern": "cl100k", "special_tokens": {END_OF_DOCUMENT: 100257}})
    raise DataError(
        f"tokenizer={path}: is a file of ranks, which does not say how text is split nor which "
        f"special tokens there are. Write {beside.name} beside it, such as {example}; pattern is "
        f"{', '.join(PATTERNS)} or a regular expression."
    )


class TiktokenTokenizer(Tokenizer):
    """A file of ranks, from its bytes; `pattern` is a name in PATTERNS or a regular expression;
    `special` are ids by spelling.

    `eod` ends documents (None: the first usual one). ValueError: unusable, or no `eod`.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        pattern: str,
        special: dict[str, int],
        eod: str | None = None,
    ):
        package, regex = (
            load_package(p, "tiktoken", f"tokenizer {name}") for p in ("tiktoken", "regex")
        )
        ranks = _parse(content)
        if not isinstance(pattern, str) or not isinstance(special, dict) or "" in special:
            raise ValueError("the pattern must be text, and special tokens must be text with an id")
        check_ids(special or {END_OF_DOCUMENT: 0})
        if len({*ranks.values(), *special.values()}) < len(ranks) + len(special):
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
        end = next((token for token, i in special.items() if i == self.eod_id), None)
        encoded = base64.b64encode(content).decode()
        record = {
            "type": "tiktoken",
            "pattern": pattern,
            "special": special,
            "eod": end,
            "ranks": encoded,
        }
        self.content = (json.dumps(record, sort_keys=True) + "\n").encode()
        # Bytes of each id; 0: there is no such token.
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
            # Its own matcher gives up on some hundred thousand spaces in a row.
            ids = []
            for part in self._split(text):
                ids += self.inner._encode_single_piece(part)
            return np.array(ids, np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocab_size and self._sizes[i]]
        )

    def locate_text(self, text: str, first: bool) -> Located:
        ids = self.encode(text)
        character = character_of_bytes(text)
        stops = np.cumsum(self._sizes[ids])
        return ids, character[stops - self._sizes[ids]], character[stops - 1] + 1


def _parse(content: bytes) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError as error:
            raise ValueError(f"line {number} is not a token in base64 and its rank") from error
        if not 0 <= int(rank) < MAX_VOCABULARY:
            raise ValueError(f"line {number} has a rank outside [0, {MAX_VOCABULARY:,})")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise ValueError(f"it has no token for the byte 0x{missing[0]:02X}")
    return ranks
