"""Tokenizers without a vocabulary to learn: bytes and characters."""

import json
from collections.abc import Iterable

import numpy as np

from data_pipeline.base.errors import DataError
from data_pipeline.tokenizer.base import Located, Tokenizer, character_of_bytes


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; id 256 ends a document."""

    name = "bytes"
    vocab_size = 257
    eod_id = 256
    content = b'{"type": "bytes"}\n'

    def __init__(self) -> None:
        self.special = {}

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")

    def token_bytes(self, i: int) -> bytes:
        if not 0 <= i < 256:
            return b""
        return bytes([i])

    def locate_text(self, text: str, first: bool) -> Located:
        character = character_of_bytes(text)
        return self.encode(text), character, character + 1


class CharTokenizer(Tokenizer):
    """One id per character, in sorted order; with `eod` one more id, the last, that ends a
    document."""

    def __init__(self, characters: Iterable[str], eod: bool = False):
        if not isinstance(eod, bool):
            raise ValueError(f"eod is {eod!r}, neither true nor false")
        self.special = {}
        self.characters = "".join(sorted(set(characters)))
        self.name = "chars"
        self.vocab_size = len(self.characters)
        self.eod_id = None
        if eod:
            self.eod_id = self.vocab_size
            self.vocab_size += 1
        record = {"type": "chars", "characters": self.characters, "eod": eod}
        self.content = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        self._table = np.full(0x110000, -1, np.int32)
        self._table[[ord(character) for character in self.characters]] = np.arange(
            len(self.characters)
        )

    def encode(self, text: str) -> np.ndarray:
        if unknown := self.unknown(text):
            character = f"{unknown[0]!r} (U+{ord(unknown[0]):04X})"
            raise DataError(f"character {character} is not in the tokenizer's vocabulary")
        return self._table[np.frombuffer(text.encode("utf-32-le"), "<u4")]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in map(int, ids) if 0 <= i < len(self.characters))

    def token_bytes(self, i: int) -> bytes:
        return self.decode([i]).encode()

    def unknown(self, text: str) -> str:
        return "".join(sorted(set(text).difference(self.characters)))

    def locate_text(self, text: str, first: bool) -> Located:
        starts = np.arange(len(text))
        return self.encode(text), starts, starts + 1
