"""Common parts of all tokenizers: the interface, where a long text may be cut, and special tokens
in the output of a template.
"""

import abc
import functools
import hashlib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from data_pipeline.base.remote import RemotePath
from data_pipeline.shards import TOKENIZER, write_atomic

END_OF_DOCUMENT = "<|endoftext|>"
_KNOWN_ENDS = (
    END_OF_DOCUMENT,
    "<|end_of_text|>",
    "</s>",
    "<eos>",
    "<|im_end|>",
    "<|eot_id|>",
    "<｜end▁of▁sentence｜>",
)
LINE_CUT = r"\S\n(?=\S)"
SPACE_CUT = r"[A-Za-z](?= [A-Za-z])"
# Where byte-level pre-tokenizers always split, so that a long text may be encoded in pieces, in
# bounded memory.
BYTE_LEVEL_CUT = re.compile(f"{LINE_CUT}|{SPACE_CUT}")
_PIECE_CHARACTERS = 1 << 14
# Entries: many times those of any tokenizer there is, and tables of them fit into memory.
MAX_VOCABULARY = 1 << 24

# Ids int32 [T]; the characters that each stands for: starts and stops, int64 [T].
Located = tuple[np.ndarray, np.ndarray, np.ndarray]


def describe_tokenizer(name: str, vocab_size: int, sha256: str) -> str:
    """Return the name, the size and the identity of a tokenizer, for messages."""
    return f"{name} ({vocab_size:,} entries, sha256 {sha256[:12]})"


class Tokenizer(abc.ABC):
    """Base class of all tokenizers.

    Attributes:
        name: short, for people.
        vocab_size: ids are in [0, vocab_size).
        eod_id: ends a document; None: there is none.
        content: of its tokenizer.json.
        special: tokens that no text produces, by how a template spells them.
        beside: files that go with it, such as a chat template, by their names.
        decodes_in_parts: what ids add to the text of those before them depends on a few of these.
            It does once they have text that does not end with U+FFFD, but for `may_change`.
    """

    name: str
    vocab_size: int
    eod_id: int | None
    content: bytes
    special: dict[str, int]
    beside: Mapping[str, bytes] = types.MappingProxyType({})
    decodes_in_parts = True

    @property
    def sha256(self) -> str:
        """Digest of the tokenizer."""
        return hashlib.sha256(self.content).hexdigest()

    def describe(self) -> str:
        """The name, the size and the identity, for messages."""
        return describe_tokenizer(self.name, self.vocab_size, self.sha256)

    def fits(self, entries: int) -> bool:
        """Return whether a model with `entries` vocabulary entries knows all ids, except special
        tokens that no text produces; it must know the end-of-document id.
        """
        spared = set(self.special.values()) - {self.eod_id}
        return all(i in spared for i in range(entries, self.vocab_size))

    @abc.abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Ids, int32 [tokens], without special tokens. DataError: a character without an id
        (characters only)."""

    @abc.abstractmethod
    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special tokens and ids outside the vocabulary give nothing, bytes that are
        not UTF-8 give U+FFFD."""

    def may_change(self, last: int) -> bool:
        """Return whether a longer list of ids may change the text whose ids end with `last`, even
        where the text does not end with U+FFFD.
        """
        return False

    def token_bytes(self, i: int) -> bytes | None:
        """Return the bytes of one id within a text: none for a special token and an id outside the
        vocabulary; None if they are not known, because the id is a part of a character.
        """
        text = self.decode([i])
        if "\ufffd" in text:
            return None
        return text.encode()

    def unknown(self, text: str) -> str:
        """The characters that have no id, each once."""
        return ""

    def encode_spans(self, spans: list[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
        """Ids, int32 [T], and loss mask, bool [T], of spans of text, each with whether it is a
        training target.

        They are encoded as one text, in which special tokens become their ids: the caller sees to
        it that only a template wrote such. A token is a target if any of its characters is.
        """
        text = "".join(part for part, _ in spans)
        ids, starts, stops = self.locate(text)
        # How many characters before each are of a target.
        is_target = np.repeat([target for _, target in spans], [len(part) for part, _ in spans])
        before = np.concatenate([[0], np.cumsum(is_target, dtype=np.int64)])
        starts = np.minimum(starts, max(len(text) - 1, 0))
        # Of bytes that make one character, all but one may count as empty.
        stops = np.maximum(stops, starts + 1)
        return ids, before[stops] > before[starts]

    def plain(self, spans: list[tuple[str, bool]]) -> str:
        """The text of spans without special tokens."""
        return self._specials.sub("", "".join(part for part, _ in spans))

    def locate(self, text: str) -> Located:
        """Ids of a template's text, special tokens among them, and the characters that each stands
        for."""
        at = 0
        found = [(np.empty(0, np.int32), np.empty(0, np.int64), np.empty(0, np.int64))]
        for part in self._specials.split(text):
            if part in self.special:
                ids = np.array([self.special[part]], np.int32)
                found.append((ids, np.array([at]), np.array([at + len(part)])))
            elif part:
                ids, starts, stops = self.locate_text(part, at == 0)
                found.append((ids, starts + at, stops + at))
            at += len(part)
        ids, starts, stops = (np.concatenate(parts) for parts in zip(*found))
        return ids, starts, stops

    @functools.cached_property
    def _specials(self) -> re.Pattern[str]:
        """Finds special tokens, longer ones first."""
        longest_first = sorted(self.special, key=len, reverse=True)
        pattern = "|".join(map(re.escape, longest_first)) or "(?!)"
        return re.compile(f"({pattern})")

    @abc.abstractmethod
    def locate_text(self, text: str, first: bool) -> Located:
        """Locate tokens as `locate` does, in text without special tokens; `first`: nothing comes
        before it.
        """

    def save(self, directory: Path | RemotePath) -> None:
        """Write directory/tokenizer.json, and the files that go with it."""
        for name, content in self.beside.items():
            (directory / name).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(directory / name, content)
        write_atomic(directory / TOKENIZER, self.content)


def check_ids(vocabulary: dict[str, int]) -> None:
    """ValueError: a token has no id that there can be."""
    if not vocabulary:
        raise ValueError("it has no tokens")
    for token, i in vocabulary.items():
        if type(i) is not int or not 0 <= i < MAX_VOCABULARY:
            rule = f"not an integer in [0, {MAX_VOCABULARY:,})"
            raise ValueError(f"the token {token[:80]!r} has the id {i!r}, {rule}")


def end_of_documents(vocabulary: dict[str, int], eod: str | None) -> int | None:
    """Id of the token `eod` or, for None, of the first usual one. ValueError: no such token."""
    if eod is not None and eod not in vocabulary:
        raise ValueError(f"it has no token {eod!r}")
    if eod:
        return vocabulary[eod]
    for end in _KNOWN_ENDS:
        if end in vocabulary:
            return vocabulary[end]
    return None


def cut(
    text: str, where: re.Pattern[str] = BYTE_LEVEL_CUT, size: int | None = None
) -> Iterator[str]:
    """Pieces of about `size` characters (None: 16 Ki) whose ids, joined, are those of the text, if
    it is split at `where`."""
    size = size or _PIECE_CHARACTERS
    start = 0
    while len(text) - start > size and (found := where.search(text, start + size)):
        yield text[start : found.end()]
        start = found.end()
    yield text[start:]


def splits_at_cuts(split: Callable[[str], list[str]]) -> bool:
    """Return whether `split`, a tokenizer's first division of text, divides at every
    `BYTE_LEVEL_CUT`: found by trial.
    """
    probes = [
        (left + "\n", right)
        for left in ("x", ";", "1", "é)", "_", "東")
        for right in ("b", "(", "1", "_", "'s", "東")
    ]
    probes += [
        (left, right)
        for left in ("x", "don't", "1a", "\n\tis")
        for right in (" b", " the cat", " a1", " d's")
    ]
    return all(split(a + b) == [*split(a), *split(b)] for a, b in probes)


def character_of_bytes(text: str) -> np.ndarray:
    """Number of the character that each byte of the text in UTF-8 belongs to, int64 [bytes]."""
    return np.cumsum((np.frombuffer(text.encode(), np.uint8) & 0xC0) != 0x80) - 1
