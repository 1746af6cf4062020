"""Hugging Face's tokenizer.json, read from a file, or trained here as byte-level BPE."""

import contextlib
import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tokenizers

from data_pipeline.base.errors import DataError, UsageError
from data_pipeline.base.strict_json import loads
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
from data_pipeline.tokenizer.beside import DeclaredToken
from data_pipeline.tokenizer.growth import MAX_NORMALIZED_BYTES, check_growth

_PIECES_AT_ONCE = 64
# How many words have their ids kept, and the most characters of such a word: some 30 MB in all.
_WORDS = 1 << 17
_LONGEST_WORD = 64
# Characters of a part, where a piece has characters outside ASCII.
_CHUNK_CHARACTERS = 512
# A piece with this many characters, which could not be cut, has too many words to look up at once.
_LARGE = 1 << 20
# How byte-level tokenizers divide text into words: the library's own, Llama 3's and Qwen's.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATTERNS = (_GPT2, _LLAMA3, _LLAMA3.replace("{1,3}", ""))
# A token that is one byte, for decoders with byte fallback.
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
# Steps of decoders that look at each token by itself, but for bytes of one character, or at whether
# it is the first.
_STEPS_OF_TOKENS = (
    "ByteFallback",
    "ByteLevel",
    "Fuse",
    "Metaspace",
    "Replace",
    "Strip",
    "WordPiece",
)


class _Words(dict[str, bytes]):
    """The ids of words, int32 as bytes. A word has the same ids wherever it stands, so those of
    words that came before are kept: looking them up is faster than asking the library."""

    def __init__(self, inner: tokenizers.Tokenizer, pattern: re.Pattern[str]):
        super().__init__()
        self.inner = inner
        self.pattern = pattern

    def __missing__(self, word: str) -> bytes:
        encoding = self.inner.encode(word, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int32).tobytes()
        if len(word) <= _LONGEST_WORD:
            if len(self) >= _WORDS:
                self.clear()
            self[word] = ids
        return ids

    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], of ASCII text."""
        words = self.pattern.findall(text)
        ids = b"".join(map(self.__getitem__, words))
        return np.frombuffer(ids, np.int32)


class JsonTokenizer(Tokenizer):
    """A tokenizer made from a tokenizer.json.

    Args:
        content: the bytes of the file.
        name: short, for people.
        eod: the token that ends documents; None: the first usual one that there is.
        declared: tokens that files beside it declare. They become a part of `content`.

    Raises:
        ValueError: the file can't be used, there is no `eod`, or a declared token can't have its
            id.
    """

    def __init__(
        self,
        content: bytes,
        name: str,
        eod: str | None = None,
        declared: Sequence[DeclaredToken] = (),
    ):
        self.content = content
        self.name = name
        self.inner = self._load()
        added = _tokens_to_add(self.inner, declared)
        if added:
            self.content = _with_added(content, added)
            self.inner = self._load()
        _check_declared(self.inner, declared)
        self.inner.encode_special_tokens = True
        vocabulary = self.inner.get_vocab(with_added_tokens=True)
        check_ids(vocabulary)
        # Ids may have gaps.
        self.vocab_size = max(vocabulary.values()) + 1
        self.eod_id = end_of_documents(vocabulary, eod)
        self.special = {}
        for i, token in self.inner.get_added_tokens_decoder().items():
            if token.special:
                self.special[token.content] = i
        steps = _decoder_steps(self.inner)
        self.decodes_in_parts = _decodes_in_parts(steps)
        kinds = {step["type"] for step in steps}
        self._has_byte_alphabet = "ByteLevel" in kinds
        self._settling = None
        if "ByteFallback" in kinds:
            self._settling = self._whole_ids(vocabulary)
        self._divisible = self._is_divisible()
        self._words = None
        if self._divisible:
            pattern = _ascii_pattern(self.inner)
            if pattern:
                self._words = _Words(self.inner, pattern)

    def _whole_ids(self, vocabulary: dict[str, int]) -> frozenset[int]:
        """Return the ids that end a run of bytes: neither bytes, nor special, which decoders do not
        see.
        """
        ids = {i for token, i in vocabulary.items() if not _BYTE.fullmatch(token)}
        return frozenset(ids.difference(self.special.values()))

    def _is_divisible(self) -> bool:
        """Return whether the pieces of a long text may be encoded one by one."""
        pre_tokenizer = self.inner.pre_tokenizer
        if pre_tokenizer is None:
            return False
        if not isinstance(self.inner.normalizer, tokenizers.normalizers.NFC | None):
            return False

        def split(text: str) -> list[str]:
            return [word for word, _ in pre_tokenizer.pre_tokenize_str(text)]

        return splits_at_cuts(split)

    def _load(self) -> tokenizers.Tokenizer:
        record = loads(self.content)
        if not isinstance(record, dict):
            raise ValueError("it is not a JSON object")
        self._growth = check_growth(record.get("normalizer"))
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
        # The library aborts the process if there is no memory for what its normalizer writes.
        if len(text) * self._growth > MAX_NORMALIZED_BYTES:
            rule = f"its normalizer can make it more than {MAX_NORMALIZED_BYTES:,} bytes"
            raise DataError(
                f"tokenizer {self.name}: can't encode a text of {len(text):,} characters: {rule}. "
                "Divide the text, or take another tokenizer."
            )
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
            # The library encodes its parts in one call, on all threads.
            of_library = [part for part in parts if not self._can_look_up(part)]
            encodings = iter(self.inner.encode_batch_fast(of_library, add_special_tokens=False))
            for part in parts:
                if words is not None and self._can_look_up(part):
                    ids.append(words.encode(part))
                else:
                    ids.append(np.array(next(encodings).ids, np.int32))
        return np.concatenate(ids)

    def _can_look_up(self, part: str) -> bool:
        """Return whether a part can be encoded word by word from the cached ids."""
        return self._words is not None and len(part) < _LARGE and part.isascii()

    def _parts(self, piece: str) -> Iterable[str]:
        """Parts of a piece: short ones if it is not ASCII, so that most of them are."""
        if self._words is None or piece.isascii():
            return [piece]
        return cut(piece, size=_CHUNK_CHARACTERS)

    def decode(self, ids: Iterable[int]) -> str:
        known = [i for i in map(int, ids) if 0 <= i < self.vocab_size]
        return self.inner.decode(known, skip_special_tokens=True)

    def may_change(self, last: int) -> bool:
        # A run of bytes that is not UTF-8 as a whole has no character at all.
        return self._settling is not None and last not in self._settling

    def token_bytes(self, i: int) -> bytes | None:
        if not 0 <= i < self.vocab_size or i in self.special.values():
            return b""
        token = self.inner.id_to_token(i)
        if token is None:
            return b""
        if self._settling is not None and _BYTE.fullmatch(token):
            return bytes.fromhex(token[3:5])
        before = []
        if self._plain_id is not None:
            # Where it comes first, a token may lose its space.
            before = [self._plain_id]
        text = self.decode([*before, i]).removeprefix(self.decode(before))
        if "\ufffd" in text and self._has_byte_alphabet:
            return _bytes_of_alphabet(token)
        return text.encode()

    @functools.cached_property
    def _plain_id(self) -> int | None:
        """A token that is a letter or a word; None: there is none."""
        for i in range(self.vocab_size):
            if self.decode([i]).strip().isalnum() and not self.may_change(i):
                return i
        return None

    @functools.cached_property
    def _with_specials(self) -> tokenizers.Tokenizer:
        return self._load()

    def locate(self, text: str) -> Located:
        # Special tokens are left to the library: some take in the spaces around them, and what
        # comes after one may get a prefix.
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
    """Turns what the library raises into an error of this kind.

    It raises bare Exceptions; and panics of Rust, which are BaseExceptions.
    """
    try:
        yield
    except BaseException as error:
        if type(error) is not Exception and type(error).__name__ != "PanicException":
            raise
        reason = str(error)[:300]
        raise kind(
            f"{prefix}{reason}. Correct its tokenizer.json, or use another tokenizer."
        ) from error


def _tokens_to_add(
    inner: tokenizers.Tokenizer, declared: Sequence[DeclaredToken]
) -> list[tokenizers.AddedToken]:
    """The declared tokens that the tokenizer does not have as they are declared.

    As in transformers, flags of a declaration with an id replace those of the tokenizer.json, and a
    token that only has a name keeps the flags that it has but becomes special.
    """
    there = {token.content: token for token in inner.get_added_tokens_decoder().values()}
    has_flags = there.keys() | {token.content for token in declared if token.id is not None}
    wanted = dict(there)
    for token in declared:
        if token.id is not None or token.content not in has_flags:
            wanted[token.content] = tokenizers.AddedToken(token.content, **token.flags)
    for token in declared:
        known = wanted[token.content]
        if token.is_named and not known.special:
            flags = {**known.__getstate__(), "special": True}
            wanted[token.content] = tokenizers.AddedToken(**flags)
    return [
        token
        for content, token in wanted.items()
        if content not in there or token.__getstate__() != there[content].__getstate__()
    ]


def _with_added(content: bytes, added: list[tokenizers.AddedToken]) -> bytes:
    """A tokenizer.json with more added tokens. ValueError: one would get an id that is taken."""
    inner = tokenizers.Tokenizer.from_str(content.decode())
    before = inner.get_vocab(with_added_tokens=True)
    token_of = {i: token for token, i in before.items()}
    inner.add_tokens(added)
    for token in added:
        i = inner.token_to_id(token.content)
        if i is not None and token_of.get(i, token.content) != token.content:
            raise ValueError(
                f"the added token {token.content!r} would get the id {i} of {token_of[i]!r}, since "
                "ids of the vocabulary have gaps. Write it into tokenizer.json with a free id"
            )
    return inner.to_str().encode()


def _check_declared(inner: tokenizers.Tokenizer, declared: Sequence[DeclaredToken]) -> None:
    """ValueError: a token has another id than the one that a file beside declares."""
    for token in declared:
        found = inner.token_to_id(token.content)
        if token.id is not None and found != token.id:
            holder = inner.id_to_token(token.id)
            rule = "and ids of added tokens follow on each other"
            if holder is not None:
                rule = f"and {token.id} is the id of {holder!r}"
            raise ValueError(
                f"a file beside it declares {token.content!r} with the id {token.id}, {rule}: it "
                f"would get {found}. Declare the ids that the model was trained with in the "
                "tokenizer.json"
            )


def _decoder_steps(inner: tokenizers.Tokenizer) -> list[dict[str, Any]]:
    """Return the steps of the decoder, in order; empty if tokens are joined by spaces."""
    if inner.decoder is None:
        return []
    decoder = loads(inner.decoder.__getstate__())
    if decoder["type"] == "Sequence":
        return decoder["decoders"]
    return [decoder]


def _decodes_in_parts(steps: list[dict[str, Any]]) -> bool:
    """Return `Tokenizer.decodes_in_parts`: whether no step looks further than at a token and those
    just before.
    """
    is_one_text = False
    for step in steps:
        kind = step["type"]
        if kind not in _STEPS_OF_TOKENS:
            return False
        if kind == "Strip" and step["stop"] > 0:
            return False
        if is_one_text and kind == "Replace":
            # Longer ones may reach across tokens.
            if len(step["pattern"].get("String", "")) != 1:
                return False
        elif is_one_text and kind != "Strip":
            return False
        if kind in ("Fuse", "ByteLevel"):
            is_one_text = True
    return True


@functools.cache
def _alphabet() -> dict[str, int]:
    """The byte that each character of byte-level tokens stands for: those that can be printed for
    themselves, the others, in their order, for characters from U+0100 on.

    Source: https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode.
    """
    printed = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    found = {chr(byte): byte for byte in printed}
    others = [byte for byte in range(256) if byte not in printed]
    for number, byte in enumerate(others):
        found[chr(0x100 + number)] = byte
    return found


def _bytes_of_alphabet(token: str) -> bytes:
    """Return the bytes of a byte-level token."""
    alphabet = _alphabet()
    if not all(character in alphabet for character in token):
        # A token that was added as text.
        return token.encode()
    return bytes(alphabet[character] for character in token)


def _ascii_pattern(inner: tokenizers.Tokenizer) -> re.Pattern[str] | None:
    """A pattern that divides ASCII text into the words that a tokenizer encodes one by one; None:
    it divides text in a way that is not known here."""
    for token in inner.get_added_tokens_decoder().values():
        if not token.special:
            # The library looks for these tokens in the whole text, before it divides it.
            return None
    pre_tokenizer = loads(inner.pre_tokenizer.__getstate__())
    steps = [pre_tokenizer]
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
    *splits, last = steps
    if last["type"] != "ByteLevel" or last["add_prefix_space"]:
        return None
    # Text is divided once: by the last step's own pattern, or by a step before it.
    if last["use_regex"] == bool(splits):
        return None
    pattern = _GPT2
    if splits:
        pattern = _split_pattern(splits)
    if pattern not in _PATTERNS:
        return None
    pattern = pattern.replace(r"\p{L}\p{N}]", "A-Za-z0-9]")
    pattern = pattern.replace(r"\p{L}", "[A-Za-z]")
    pattern = pattern.replace(r"\p{N}", "[0-9]")
    return re.compile(pattern, re.ASCII)


def _split_pattern(splits: list[dict[str, Any]]) -> str | None:
    """The regular expression whose matches are the words; None if that is not all that these
    steps of a pre-tokenizer do."""
    if len(splits) != 1:
        return None
    split = splits[0]
    if split["type"] != "Split" or split["behavior"] != "Isolated" or split["invert"]:
        return None
    return split["pattern"].get("Regex")


def bpe_entries(spec: str) -> int:
    """The number of entries in "bpe:4096".

    Raises:
        UsageError: there is no number, or it is too small or too large for a tokenizer.
    """
    entries = spec.removeprefix("bpe:")
    if not re.fullmatch("[0-9]+", entries):
        raise UsageError(
            f"--tokenizer {spec[:80]}: bpe needs a number of entries. Give bpe:4096, for example."
        )
    # A longer number is refused like its first 18 digits, without an int of unbounded size.
    _check_entries(int(entries[:18]))
    return int(entries)


def _check_entries(count: int) -> None:
    """Refuses a number of entries that no tokenizer can be trained with.

    With too many, the library aborts the process: it allocates memory for all of them at once.

    Raises:
        UsageError: there are too many, or too few for 256 bytes and the end of documents.
    """
    least = 257
    if least <= count <= MAX_VOCABULARY:
        return
    rule = f"must have at least {least} entries (256 bytes and {END_OF_DOCUMENT})"
    rule += f" and at most {MAX_VOCABULARY:,}"
    raise UsageError(f"--tokenizer bpe:{count} {rule}. Give bpe:4096 or bpe:32000, for example.")


def train_bpe(texts: Iterable[str], vocab_size: int) -> JsonTokenizer:
    """Train a byte-level BPE tokenizer; the same texts in the same order give the same bytes.

    Args:
        texts: what it is trained on.
        vocab_size: entries, with the 256 bytes and the end-of-document token; a short text gives
            fewer.

    Raises:
        UsageError: vocab_size is below 257 or above MAX_VOCABULARY.
    """
    _check_entries(vocab_size)
    inner = tokenizers.Tokenizer(tokenizers.models.BPE())
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    pieces = (piece for text in texts for piece in cut(text))
    inner.train_from_iterator(pieces, trainer)
    return JsonTokenizer(inner.to_str().encode(), f"bpe:{vocab_size}")
