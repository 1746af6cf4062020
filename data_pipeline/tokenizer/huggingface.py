"""Hugging Face's tokenizer.json, given, or trained here as byte-level BPE."""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator

import numpy as np
import tokenizers

from data_pipeline.errors import DataError, UsageError
from data_pipeline.strict_json import loads
from data_pipeline.tokenizer.base import (
    END_OF_DOCUMENT,
    MAX_VOCABULARY,
    Located,
    Tokenizer,
    check_ids,
    cut,
    end_of_documents,
    splits_at_cuts,
)

_PIECES_AT_ONCE = 64
# Words whose ids are kept, and the most characters of one: some 30 MB.
_WORDS = 1 << 17
_LONGEST_WORD = 64
# Characters of a part of a piece that is not all ASCII.
_CHUNK_CHARACTERS = 512
# Characters of a piece that could not be cut: too many words at a time.
_LARGE = 1 << 20
# How byte-level tokenizers divide text: the library's own, Llama 3's and Qwen's
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (_GPT2, _LLAMA3, _LLAMA3.replace("{1,3}", ""))


class _Words(dict[str, bytes]):
    """Ids, int32, of words that came before: they are the same wherever a word stands, and the
    library is slow to say so."""

    def __init__(self, inner: tokenizers.Tokenizer, pattern: re.Pattern[str]):
        super().__init__()
        self.inner = inner
        self.pattern = pattern

    def __missing__(self, word: str) -> bytes:
        ids = np.array(self.inner.encode(word, add_special_tokens=False).ids, np.int32).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], of ASCII text."""
        return np.frombuffer(b"".join(map(self.__getitem__, self.pattern.findall(text))), np.int32)


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, from its bytes; `eod` ends documents (None: the first usual one).
    ValueError: unusable, or no `eod`."""

    def __init__(self, content: bytes, name: str, eod: str | None = None):
        self.content = content
        self.name = name
        self.inner = self._load()
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        check_ids(vocabulary)
        # Ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = end_of_documents(vocabulary, eod)
        self.special = {
            token.content: i
            for i, token in self.inner.get_added_tokens_decoder().items()
            if token.special
        }
        before = self.inner.pre_tokenizer
        changes = self.inner.normalizer
        self._divisible = (
            before is not None
            and isinstance(changes, tokenizers.normalizers.NFC | None)
            and splits_at_cuts(lambda text: [part for part, _ in before.pre_tokenize_str(text)])
        )
        self._words = None
        if self._divisible:
            pattern = _ascii_pattern(self.inner)
            if pattern:
                self._words = _Words(self.inner, pattern)

    def _load(self) -> tokenizers.Tokenizer:
        with _library_errors(ValueError, ""):
            inner = tokenizers.Tokenizer.from_str(self.content.decode())
        dropout = getattr(inner.model, "dropout", None)
        if dropout:
            rule = "draws the ids of a text anew each time"
            raise ValueError(f"its dropout={dropout:g} {rule}; set it to null in the file")
        inner.no_padding()
        inner.no_truncation()
        return inner

    def encode(self, text: str) -> np.ndarray:
        with _library_errors(DataError, f"tokenizer {self.name}: can't encode a text: "):
            return self._encode(text)

    def _encode(self, text: str) -> np.ndarray:
        words = self._words
        ids = []
        pieces: Iterable[str] = [text]
        if self._divisible:
            pieces = cut(text)
        for batch in itertools.batched(pieces, _PIECES_AT_ONCE):
            parts = [part for piece in batch for part in self._parts(piece)]
            quick = [words is not None and len(part) < _LARGE and part.isascii() for part in parts]
            others = [part for part, easy in zip(parts, quick) if not easy]
            encodings = iter(self.inner.encode_batch_fast(others, add_special_tokens=False))
            for part, easy in zip(parts, quick):
                if words is not None and easy:
                    ids.append(words.encode(part))
                else:
                    ids.append(np.array(next(encodings).ids, np.int32))
        return np.concatenate(ids)

    def _parts(self, piece: str) -> Iterable[str]:
        """Parts of a piece, so that few are not all ASCII."""
        if self._words is None or piece.isascii():
            return [piece]
        return cut(piece, size=_CHUNK_CHARACTERS)

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode(
            [i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True
        )

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        return self._load()

    def locate(self, text: str) -> Located:
        # by the library, which knows what surrounds a special token: prefixes, and spaces that the
        # token takes in
        return self._located(self._with_specials, text)

    def locate_text(self, text: str, first: bool) -> Located:
        return self._located(self.inner, text)

    def _located(self, inner: tokenizers.Tokenizer, text: str) -> Located:
        with _library_errors(DataError, f"tokenizer {self.name}: can't encode a text: "):
            encoding = inner.encode(text, add_special_tokens=False)
        starts, stops = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        return np.array(encoding.ids, np.int32), starts, stops


@contextlib.contextmanager
def _library_errors(kind: type[ValueError], prefix: str) -> Iterator[None]:
    """What the library raises, as an error of this kind: bare Exceptions, and panics of Rust, which
    are no Exceptions."""
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        raise kind(
            f"{prefix}{str(error)[:300]}. Mend its tokenizer.json, or take another."
        ) from error


def _ascii_pattern(inner: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """How a tokenizer divides ASCII text into words that are encoded each for itself; None: in a
    way that is not known here."""
    if any(not token.special for token in inner.get_added_tokens_decoder().values()):
        return None  # these are found in text, whatever the words
    before = loads(inner.pre_tokenizer.__getstate__())
    *splits, level = before["pretokenizers"] if before["type"] == "Sequence" else [before]
    found = [
        split["pattern"].get("Regex")
        for split in splits
        if split["type"] == "Split" and split["behavior"] == "Isolated"
    ]
    (given,) = (
        found
        if len(found) == len(splits) == 1 and not splits[0]["invert"]
        else [None if splits else _GPT2]
    )
    byte_level = (
        level["type"] == "ByteLevel"
        and not level["add_prefix_space"]
        and level["use_regex"] != bool(splits)
    )
    if not byte_level or given not in _PATTERNS:
        return None
    ascii = (
        given.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
        .replace(r"\p{L}", "[A-Za-z]")
        .replace(r"\p{N}", "[0-9]")
    )
    return re.compile(ascii, re.ASCII)


def bpe_entries(spec: str) -> int:
    """The number of entries in "bpe:4096". UsageError: there is none, or no tokenizer can have so
    many or few."""
    entries = spec.removeprefix("bpe:")
    if not re.fullmatch("[0-9]+", entries):
        raise UsageError(
            f"--tokenizer {spec[:80]}: bpe takes its number of entries, such as bpe:4096."
        )
    # The first 18 digits of a longer number are too many, too.
    _check_entries(int(entries[:18]))
    return int(entries)


def _check_entries(count: int) -> None:
    """UsageError: the library would allocate for all of them at once, and abort where it can't; or
    there is no room for 256 bytes and the end of documents."""
    least = 257
    if least <= count <= MAX_VOCABULARY:
        return
    rule = f"must have at least {least} entries (256 bytes and {END_OF_DOCUMENT})"
    rule += f" and at most {MAX_VOCABULARY:,}"
    raise UsageError(f"--tokenizer bpe:{count} {rule}. Give bpe:4096 or bpe:32000, for example.")


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer; the same texts in the same order give the same bytes.

    `vocab_size` counts the 256 bytes and the end-of-document token; fewer come out of little text.
    UsageError: it is below 257 or above MAX_VOCABULARY.
    """
    _check_entries(vocab_size)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    inner.train_from_iterator((piece for text in texts for piece in cut(text)), trainer)
    return JsonTokenizer(inner.to_str().encode(), f"bpe:{vocab_size}")
