"""Hugging Face's tokenizer.json, given, or trained here as byte-level BPE."""

import functools
import itertools
from collections.abc import Iterable

import numpy as np
import tokenizers

from data_pipeline.errors import UsageError
from data_pipeline.tokenizer.base import END_OF_DOCUMENT, Located, Tokenizer, cut, end_of_documents, splits_at_cuts

_PIECES_AT_ONCE = 64


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, from its bytes; `eod` ends documents (None: the first usual one). ValueError: unusable, or no `eod`."""

    def __init__(self, content: bytes, name: str, eod: str | None = None):
        self.content, self.name = content, name
        self.inner = self._load()
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        self.eod_id = end_of_documents(vocabulary, eod)
        self.special = {token.content: i for i, token in self.inner.get_added_tokens_decoder().items() if token.special}
        before, changes = self.inner.pre_tokenizer, self.inner.normalizer
        self._divisible = (
            before is not None
            and isinstance(changes, tokenizers.normalizers.NFC | None)
            and splits_at_cuts(lambda text: [part for part, _ in before.pre_tokenize_str(text)])
        )

    def _load(self) -> tokenizers.Tokenizer:
        try:
            inner = tokenizers.Tokenizer.from_str(self.content.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        inner.no_padding()
        inner.no_truncation()
        return inner

    def encode(self, text: str) -> np.ndarray:
        batches = itertools.batched(cut(text) if self._divisible else [text], _PIECES_AT_ONCE)
        encodings = (e for batch in batches for e in self.inner.encode_batch_fast(list(batch), add_special_tokens=False))
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True)

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        return self._load()

    def locate(self, text: str) -> Located:
        # by the library, which knows what surrounds a special token: prefixes, and spaces that the token takes in
        return self._located(self._with_specials, text)

    def locate_text(self, text: str, first: bool) -> Located:
        return self._located(self.inner, text)

    def _located(self, inner: tokenizers.Tokenizer, text: str) -> Located:
        encoding = inner.encode(text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        return np.array(encoding.ids, np.int32), starts, stops


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer; the same texts in the same order give the same bytes.

    `vocab_size` counts the 256 bytes and the end-of-document token (UsageError: below 257); fewer come out of little text.
    """
    if vocab_size < 257:
        raise UsageError(f"--tokenizer bpe:{vocab_size} must have at least 257 entries (256 bytes and {END_OF_DOCUMENT}).")
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_DOCUMENT], initial_alphabet=alphabet, show_progress=False
    )
    inner.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    return JsonTokenizer(inner.to_str().encode(), f"bpe:{vocab_size}")
