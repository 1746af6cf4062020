"""Incremental decoding of tokens into text."""

import bisect
import codecs
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from data_pipeline.tokenizer import Tokenizer
from data_pipeline.tokenizer.base import Located

# A decoder writes this character for bytes that are no complete character yet.
_REPLACEMENT = "\ufffd"
# Shortest context at the end of a prompt that is tried for decoding new ids.
_LEAST_CONTEXT = 8
# Number of ends of a context that are tried. For a character of more tokens, the whole prompt is
# the context.
_ENDS_TRIED = 5


class OutputToken(NamedTuple):
    """A token that was chosen.

    Args:
        id: the token's id.
        logprob: the token's log-probability.
        offset: number of characters of the new text before the token.
        top: the likeliest tokens at its position, if they were requested.
    """

    id: int
    logprob: float
    offset: int
    top: Sequence[tuple[int, float]] = ()


class VisibleTokens(Tokenizer):
    """A tokenizer that also decodes some special tokens, which other tokenizers leave out.

    Args:
        tokenizer: the tokenizer.
        visible: the texts of these special tokens, by id.
    """

    def __init__(self, tokenizer: Tokenizer, visible: Mapping[int, str]):
        self._inner = tokenizer
        self._visible = visible
        self.name = tokenizer.name
        self.vocab_size = tokenizer.vocab_size
        self.eod_id = tokenizer.eod_id
        self.content = tokenizer.content
        self.special = tokenizer.special
        self.decodes_in_parts = tokenizer.decodes_in_parts

    def encode(self, text: str) -> np.ndarray:
        return self._inner.encode(text)

    def locate_text(self, text: str, first: bool) -> Located:
        return self._inner.locate_text(text, first)

    def decode(self, ids: Iterable[int]) -> str:
        parts = []
        plain: list[int] = []
        for i in ids:
            if int(i) in self._visible:
                parts += [self._inner.decode(plain), self._visible[int(i)]]
                plain = []
            else:
                plain.append(i)
        return "".join([*parts, self._inner.decode(plain)])

    def may_change(self, last: int) -> bool:
        return last not in self._visible and self._inner.may_change(last)

    def token_bytes(self, i: int) -> bytes | None:
        if i in self._visible:
            return self._visible[i].encode()
        return self._inner.token_bytes(i)


def decode_new(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """Return the text of new ids after a prompt."""
    return _decode_after(tokenizer, prompt, tokenizer.decode(prompt), new)


def _decode_after(
    tokenizer: Tokenizer, prompt: Sequence[int], head: str, new: Sequence[int]
) -> str:
    """Return the text of new ids after a prompt whose text is `head`."""
    # Decoded without the prompt, some tokens would lose their leading space.
    whole = tokenizer.decode([*prompt, *new])
    if whole.startswith(head):
        return whole[len(head) :]
    return tokenizer.decode(new)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """Return a text up to the first occurrence of a stop text."""
    end = len(text)
    for stop_text in stop:
        at = text.find(stop_text)
        if at >= 0:
            end = min(end, at)
    return text[:end]


def _is_settled(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Return whether the text of these ids cannot change when more ids follow, whatever precedes
    them."""
    if not tokenizer.decodes_in_parts or not text or text.endswith(_REPLACEMENT):
        return False
    return not tokenizer.may_change(ids[-1])


def _context(tokenizer: Tokenizer, prompt: Sequence[int]) -> list[int]:
    """Return the shortest end of a prompt that is sufficient context for `decode_new`."""
    length = _LEAST_CONTEXT
    while tokenizer.decodes_in_parts and length < len(prompt):
        context = list(prompt[-length:])
        for end in range(length, length - _ENDS_TRIED, -1):
            before = context[:end]
            if _is_settled(tokenizer, before, tokenizer.decode(before)):
                return context
        length *= 2
    return list(prompt)


def _starts(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> list[int]:
    """Return the number of characters of a text before each of its ids. Ids that are parts of one
    character have the same number.

    If the bytes of ids are unknown or do not give the text, all ids are assumed to start at its
    beginning.
    """
    if len(ids) == 1:
        return [0]
    found = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    written = ""
    for i in ids:
        part = tokenizer.token_bytes(i)
        if part is None:
            return [0] * len(ids)
        if not part:
            found.append(len(written) + bool(decoder.getstate()[0]))
            continue
        # The first byte tells whether the bytes before it are a part of the same character.
        written += decoder.decode(part[:1])
        is_open = bool(decoder.getstate()[0])
        found.append(len(written) - (not is_open))
        written += decoder.decode(part[1:])
    written += decoder.decode(b"", final=True)
    # The first token may lose its leading space.
    lost = len(written) - len(text)
    if lost not in (0, 1) or written[lost:] != text:
        return [0] * len(ids)
    return [max(0, start - lost) for start in found]


class _IncrementalText:
    """The text of `decode_new`, updated incrementally: only its end is decoded when ids are added.

    Attributes:
        start: number of characters that are forgotten.
        settled: the final text after them.
        open: the text after that, which may change when more ids come.
        certain: number of final characters, including those of `open`.
        starts: for each id with settled text, the number of characters before it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]):
        self._tokenizer = tokenizer
        self._context = _context(tokenizer, prompt)
        self._head = tokenizer.decode(self._context)
        self._ids: list[int] = []
        self.start = 0
        self.settled = ""
        self.open = ""
        self.certain = 0
        self.starts: list[int] = []

    def add(self, new: int) -> None:
        """Add one more id."""
        self._ids.append(new)
        self.open = _decode_after(self._tokenizer, self._context, self._head, self._ids)
        if _is_settled(self._tokenizer, self._ids, self.open):
            self._settle()
        certain = self.start + len(self.settled)
        if not self._tokenizer.may_change(new):
            certain += len(self.open.rstrip(_REPLACEMENT))
        self.certain = max(self.certain, certain)

    def _settle(self) -> None:
        """Make the open text final, and use it as context for the following ids."""
        self.starts += self.open_starts()
        self.settled += self.open
        self.open = ""
        head = self._tokenizer.decode(self._ids)
        if head:
            self._context = self._ids
        else:
            # A single space would be lost at the beginning of a text.
            self._context = [*self._context, *self._ids]
            head = self._tokenizer.decode(self._context)
        self._head = head
        self._ids = []

    def open_starts(self) -> list[int]:
        """Return the number of characters before each id whose text is open."""
        before = self.start + len(self.settled)
        return [before + start for start in _starts(self._tokenizer, self._ids, self.open)]

    def text_from(self, at: int) -> str:
        """Return the text from a character on that is not forgotten."""
        return (self.settled + self.open)[at - self.start :]

    def forget(self, before: int) -> None:
        """Forget settled text before a character."""
        count = min(before - self.start, len(self.settled))
        self.settled = self.settled[count:]
        self.start += count


class TextStream:
    """The text of one row, in parts. A part has complete characters, and nothing that may yet
    become part of a stop text. All parts together are the text of `decode_new` and `before_stop`.

    If the tokenizer decodes in parts, the cost of an id does not depend on the length of the text.

    Args:
        tokenizer: the tokenizer of the ids.
        prompt: ids before the new ones.
        stop: texts that end the text; they are not part of it.
        find_end: called with each part; returns how many of its characters belong to the text if
            the text ends in it, else None. None: only `stop` ends the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        find_end: Callable[[str], int | None] | None = None,
    ):
        self._find_end = find_end
        self._growing = _IncrementalText(tokenizer, prompt)
        self._stop = tuple(stop)
        # For each id, the number of characters that were certain with it.
        self._ends: list[int] = []
        self._parts: list[str] = []
        self._given = 0
        self._is_finished = False
        self.has_stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """Add ids, and return the text that is certain now."""
        if self.has_stopped:
            return ""
        for i in ids:
            self._growing.add(i)
            self._ends.append(self._growing.certain)
        # No stop text begins in the text that was returned before.
        waiting = self._growing.text_from(self._given)
        cut = before_stop(waiting, self._stop)
        if len(cut) < len(waiting):
            self.has_stopped = True
            return self._give(cut)
        return self._give(self._before_possible_stop(waiting))

    def finish(self) -> str:
        """Return the rest of the text when no more ids come."""
        if self.has_stopped:
            return ""
        self._is_finished = True
        return self._give(self._growing.text_from(self._given))

    @property
    def text(self) -> str:
        """Return the whole text up to now, without a stop text."""
        given = "".join(self._parts)
        if self.has_stopped:
            return given
        return given + self._growing.text_from(self._given)

    @property
    def num_read(self) -> int:
        """Return the number of ids that were added."""
        return len(self._ends)

    @property
    def num_given(self) -> int:
        """Return how many ids make up the text that was returned; all of them at the end, unless a
        stop text ended it."""
        if self._is_finished and not self.has_stopped:
            return len(self._ends)
        if self._given == 0:
            return 0
        before = bisect.bisect_left(self._ends, self._given)
        return min(before + 1, len(self._ends))

    def offset(self, number: int) -> int:
        """Return the number of characters before an id, by its index."""
        starts = self._growing.starts
        if number < len(starts):
            return starts[number]
        return self._growing.open_starts()[number - len(starts)]

    def _give(self, part: str) -> str:
        """Return a part of the text, and record it."""
        end = self._find_end(part) if self._find_end is not None and part else None
        if end is not None:
            part = part[:end]
            self.has_stopped = True
        self._parts.append(part)
        self._given += len(part)
        self._growing.forget(self._given)
        return part

    def _before_possible_stop(self, waiting: str) -> str:
        """Return the certain beginning of a text that contains no part of a possible stop text."""
        text = waiting[: self._growing.certain - self._given]
        for stop in self._stop:
            for length in range(min(len(stop) - 1, len(text)), 0, -1):
                if text.endswith(stop[:length]):
                    text = text[:-length]
                    break
        return text
