"""Tokenizers: text to ids and back. Bytes, characters, or any Hugging Face `tokenizer.json`, given or trained here.

Each is saved as one `tokenizer.json`, whose sha256 is its identity; `load_tokenizer` reads any of them back. Text is only ever
text: a document that spells out a special token does not produce its id, so no document can forge the end of a document.
"""

import abc
import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import tokenizers

from data_pipeline.errors import DataError, UsageError
from data_pipeline.shards import MANIFEST, TOKENIZER, Manifest, write_atomic

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>")
# Where byte-level pre-tokenizers always split, so that a long text may be encoded in pieces, in bounded memory.
_CUT = re.compile(r"\S\n(?=\S)|[A-Za-z](?= [A-Za-z])")
_PIECE_CHARACTERS = 1 << 14
_PIECES_AT_ONCE = 64


class Tokenizer(abc.ABC):
    """What all tokenizers share."""

    name: str  # short, for people
    vocab_size: int  # ids are in [0, vocab_size)
    eod_id: int | None  # ends a document
    content: bytes  # of its tokenizer.json

    @property
    def sha256(self) -> str:
        """Its identity."""
        return hashlib.sha256(self.content).hexdigest()

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], without special tokens. DataError: a character without an id (characters only)."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens and ids outside the vocabulary give nothing, bytes that are not UTF-8 give U+FFFD."""

    def unknown(self, text: str) -> str:
        """The characters that have no id, each once."""
        return ""

    def save(self, directory: Path) -> None:
        """Write directory/tokenizer.json."""
        write_atomic(directory / TOKENIZER, self.content)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes; id 256 ends a document."""

    name, vocab_size, eod_id, content = "bytes", 257, 256, b'{"type": "bytes"}\n'

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32)

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(i for i in map(int, ids) if 0 <= i < 256).decode(errors="replace")


class CharTokenizer(Tokenizer):
    """One id per character, in sorted order; with `eod` one more id, the last, that ends a document."""

    def __init__(self, characters: Iterable[str], eod: bool = False):
        self.characters = "".join(sorted(set(characters)))
        self.name, self.eod_id = "chars", len(self.characters) if eod else None
        self.vocab_size = len(self.characters) + eod
        record = {"type": "chars", "characters": self.characters, "eod": eod}
        self.content = (json.dumps(record, ensure_ascii=False) + "\n").encode()
        self._table = np.full(0x110000, -1, np.int32)
        self._table[[ord(character) for character in self.characters]] = np.arange(len(self.characters))

    def encode(self, text: str) -> np.ndarray:
        if unknown := self.unknown(text):
            raise DataError(f"character {unknown[0]!r} (U+{ord(unknown[0]):04X}) is not in the tokenizer's vocabulary")
        return self._table[np.frombuffer(text.encode("utf-32-le"), "<u4")]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.characters[i] for i in map(int, ids) if 0 <= i < len(self.characters))

    def unknown(self, text: str) -> str:
        return "".join(sorted(set(text).difference(self.characters)))


class JsonTokenizer(Tokenizer):
    """A tokenizer.json, from its bytes; `eod` ends documents (None: the first usual one). ValueError: unusable, or no `eod`."""

    def __init__(self, content: bytes, name: str, eod: str | None = None):
        try:
            self.inner = tokenizers.Tokenizer.from_str(content.decode())
        except Exception as error:  # the library raises bare Exception
            raise ValueError(str(error)) from error
        self.content, self.name = content, name
        self.inner.no_padding()
        self.inner.no_truncation()
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocabulary.values()) + 1  # ids may have gaps
        if eod is not None and eod not in vocabulary:
            raise ValueError(f"it has no token {eod!r}")
        self.eod_id = next((vocabulary[end] for end in ([eod] if eod else _KNOWN_ENDS) if end in vocabulary), None)
        self._divisible = _splits_at_cuts(self.inner)

    def encode(self, text: str) -> np.ndarray:
        batches = itertools.batched(cut(text) if self._divisible else [text], _PIECES_AT_ONCE)
        encodings = (e for batch in batches for e in self.inner.encode_batch_fast(list(batch), add_special_tokens=False))
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])

    def decode(self, ids: Iterable[int]) -> str:
        return self.inner.decode([i for i in map(int, ids) if 0 <= i < self.vocab_size], skip_special_tokens=True)


def cut(text: str) -> Iterator[str]:
    """Pieces of about 16 Ki characters whose ids, joined, are those of the whole text under a byte-level tokenizer."""
    start = 0
    while len(text) - start > _PIECE_CHARACTERS and (found := _CUT.search(text, start + _PIECE_CHARACTERS)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def _splits_at_cuts(inner: tokenizers.Tokenizer) -> bool:
    """Whether a pre-tokenizer always splits at a `_CUT`: asked by trying it, since its parts may be combined in any way."""
    if inner.pre_tokenizer is None or not isinstance(inner.normalizer, tokenizers.normalizers.NFC | None):
        return False
    probes = [(left + "\n", right) for left in ("x", ";", "1", "é)", "_", "東") for right in ("b", "(", "1", "_", "'s", "東")]
    probes += [(left, right) for left in ("x", "don't", "1a", "\n\tis") for right in (" b", " the cat", " a1", " d's")]
    split = inner.pre_tokenizer.pre_tokenize_str
    return all([p for p, _ in split(a + b)] == [p for text in (a, b) for p, _ in split(text)] for a, b in probes)


def load_tokenizer(spec: str | Path) -> Tokenizer:
    """A tokenizer: "bytes", a tokenizer.json, or a directory that has one, prepared data or a Hugging Face model.

    A tokenizer_config.json beside it names the token that ends documents. DataError: missing, unusable, or not the manifest's.
    """
    if spec == "bytes":
        return ByteTokenizer()
    path = Path(spec)
    path = path / TOKENIZER if path.is_dir() else path
    mend = "Name a tokenizer.json, a directory that has one, or `bytes`."
    try:
        content = path.read_bytes()
        record = json.loads(content)
        kind = record.get("type") if isinstance(record, dict) else None
        if kind == "bytes":
            tokenizer: Tokenizer = ByteTokenizer()
        elif kind == "chars":
            tokenizer = CharTokenizer(record["characters"], record["eod"])
        else:
            settings = path.with_name("tokenizer_config.json")
            end = json.loads(settings.read_bytes()).get("eos_token") if settings.exists() else None
            end = end["content"] if isinstance(end, dict) else end
            tokenizer = JsonTokenizer(content, path.parent.name or path.stem, end)
    except OSError as error:
        raise DataError(f"tokenizer={spec}: can't be read ({error.strerror}). {mend}") from error
    except (ValueError, KeyError) as error:
        raise DataError(f"tokenizer={spec}: is not usable ({error}). {mend}") from error
    if path.name == TOKENIZER and path.with_name(MANIFEST).exists():
        entry = Manifest.load(path.parent).tokenizer
        if entry["sha256"] != tokenizer.sha256:
            raise DataError(
                f"{path}: expected sha256 {entry['sha256']}, found {tokenizer.sha256}: not the tokenizer that this data was "
                "built with. Restore the file, or build the data again with `prepare --overwrite`."
            )
        tokenizer.name, tokenizer.eod_id = entry["name"], entry["special_ids"]["eod"]
    return tokenizer


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
