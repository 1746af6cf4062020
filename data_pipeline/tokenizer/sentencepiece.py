"""SentencePiece models, by the sentencepiece package."""

import base64
import functools
import json
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from data_pipeline.base.extras import load_package
from data_pipeline.tokenizer.base import (
    LINE_CUT,
    SPACE_CUT,
    Located,
    Tokenizer,
    check_ids,
    cut,
    end_of_documents,
)

# Protobuf, to append to a model: normalizer_spec { add_dummy_prefix: false }.
_NO_PREFIX = b"\x1a\x02\x18\x00"


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, from its bytes. ValueError: unusable, or without a token `eod` or one
    of `special`.

    Special are its control symbols, those of `special` (ids by spelling; tokens behind the model's
    own are added to it), and the end of documents: `eod`, or else the model's own. Its other
    user-defined symbols are found in any text, as they are for. A character that it gives no id,
    not even as bytes, is `unknown`.
    """

    def __init__(self, model: bytes, name: str, special: dict[str, int], eod: str | None = None):
        package = load_package("sentencepiece", "sentencepiece", f"tokenizer {name}")
        try:
            # Of b"" the library would make a model.
            self.inner: Any = package.SentencePieceProcessor(model_proto=model or b"none")
            # For what follows other text.
            self._after = package.SentencePieceProcessor(model_proto=model + _NO_PREFIX)
        except RuntimeError as error:
            raise ValueError(
                "neither JSON, nor ranks of tiktoken, nor a SentencePiece model"
            ) from error
        pieces = self.inner.id_to_piece(list(range(self.inner.piece_size())))
        vocabulary = {piece: i for i, piece in enumerate(pieces)}
        for token, i in special.items():
            if vocabulary.get(token, i) != i or (i < len(pieces) and token not in vocabulary):
                raise ValueError(f"the model gives {token!r} another id than {i}")
        vocabulary |= special
        check_ids(vocabulary)
        if not eod and self.inner.eos_id() >= 0:
            eod = pieces[self.inner.eos_id()]
        self.name = name
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = end_of_documents(vocabulary, eod or None)
        end = next((piece for piece, i in vocabulary.items() if i == self.eod_id), None)
        if end is not None:
            special = special | {end: vocabulary[end]}
        record = {
            "type": "sentencepiece",
            "special": special,
            "eod": end,
            "model": base64.b64encode(model).decode(),
        }
        self.content = (json.dumps(record, sort_keys=True) + "\n").encode()
        control = {piece: i for i, piece in enumerate(pieces) if self.inner.is_control(i)}
        self.special = special | control
        self._size = len(pieces)
        self._hidden = set(special.values())
        # What the library would find in text: taken apart behind its first character.
        found = [t for t, i in special.items() if t not in control and i < len(pieces)]
        for token in found:
            if len(token) < 2:
                rule = "is one character, which text can't be kept from spelling"
                raise ValueError(f"the special token {token!r} {rule}")
        borders = [f"(?<={re.escape(token[0])})(?={re.escape(token[1:])})" for token in found]
        self._apart = re.compile("|".join(borders) or "(?!)")
        self._resumed, self._cuts = _how_to_cut(self.inner, self._after, pieces)
        self._has_bytes = any(map(self.inner.is_byte, range(len(pieces))))
        self._has_id = functools.cache(
            lambda character: self.inner.unk_id() not in self.inner.encode(character)
        )

    def encode(self, text: str) -> np.ndarray:
        found = [np.empty(0, np.int32)]
        inner = self.inner
        for part in self._apart.split(text):
            for piece in cut(part, self._cuts):
                found.append(inner.encode(piece, return_type="numpy"))
                inner = self._resumed
            inner = self._after
        return np.concatenate(found)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(
            [i for i in map(int, ids) if 0 <= i < self._size and i not in self._hidden]
        )

    def token_bytes(self, i: int) -> bytes:
        if not 0 <= i < self._size or i in self._hidden or self.inner.is_control(i):
            return b""
        piece = self.inner.id_to_piece(i)
        if self.inner.is_byte(i):
            # Such as <0xC3>.
            return bytes.fromhex(piece[3:5])
        if self.inner.is_unknown(i):
            return self.decode([i]).encode()
        return piece.replace("▁", " ").encode()

    def unknown(self, text: str) -> str:
        if self._has_bytes:
            return ""
        return "".join(sorted(c for c in set(text) if not self._has_id(c)))

    def locate_text(self, text: str, first: bool) -> Located:
        processor = self._after
        if first:
            processor = self.inner
        found = processor.encode(text, return_type="offset_mapping")
        starts, stops = np.array(found["offsets"], np.int64).reshape(-1, 2).T
        return np.array(found["ids"], np.int32), starts, stops


def _how_to_cut(inner: Any, after: Any, pieces: list[str]) -> tuple[Any, re.Pattern[str]]:
    """Return the encoder of text behind a cut, and the pattern of places where the model lets a
    text be cut: none, if it does not.

    It can be where the normalized parts are those of the whole, and no piece of the vocabulary
    reaches across.
    """
    spaces = [
        (left, right)
        for left in ("x", "don't", "\n\tis", "é  x")
        for right in (" b", " the  cat", " a1")
    ]
    lines = [
        (left + "\n", right)
        for left in ("x", ";", "1 ", "東")
        for right in ("b", "(", "東  x", "'s")
    ]
    for processor in (inner, after):

        def joins(a: str, b: str, processor: Any = processor) -> bool:
            return inner.normalize(a + b) == inner.normalize(a) + processor.normalize(b)

        at_spaces = all(joins(a, b) and processor.normalize(b).startswith("▁") for a, b in spaces)
        if at_spaces:
            cuts = []
            if not any(re.search("[^▁ ][▁ ]", piece) for piece in pieces):
                cuts.append(SPACE_CUT)
            at_lines = all(joins(a, b) and inner.normalize(a).endswith("\n") for a, b in lines)
            if at_lines and not any(re.search(r"\n[^\n]", piece) for piece in pieces):
                cuts.append(LINE_CUT)
            return processor, re.compile("|".join(cuts) or "(?!)")
    return after, re.compile("(?!)")
