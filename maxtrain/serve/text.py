"""Text of tokens as they come."""

from collections.abc import Sequence

from data_pipeline.tokenizer import Tokenizer

# What a decoder writes for bytes that are not whole characters yet.
_REPLACEMENT = "\ufffd"


def decode_new(tokenizer: Tokenizer, prompt: Sequence[int], new: Sequence[int]) -> str:
    """The text of new ids after a prompt."""
    # Decoded without the prompt, some tokens lose their first space.
    head = tokenizer.decode(prompt)
    whole = tokenizer.decode([*prompt, *new])
    if whole.startswith(head):
        return whole[len(head) :]
    return tokenizer.decode(new)


def before_stop(text: str, stop: Sequence[str]) -> str:
    """A text up to the first place where one of the texts of `stop` begins."""
    end = len(text)
    for stop_text in stop:
        at = text.find(stop_text)
        if at >= 0:
            end = min(end, at)
    return text[:end]


class TextStream:
    """The text of one row, in parts. A part has whole characters, and nothing that may yet turn out
    to be the beginning of a stop text; all parts together are the text that `decode_new` and
    `before_stop` give.

    Args:
        tokenizer: of the ids.
        prompt: ids before the new ones.
        stop: texts that it ends before.
    """

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._prompt = list(prompt)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._text = ""
        self._given = 0
        self.has_stopped = False

    def add(self, ids: Sequence[int]) -> str:
        """What can be said with these new ids."""
        if self.has_stopped:
            return ""
        self._ids += ids
        self._text = decode_new(self._tokenizer, self._prompt, self._ids)
        cut = before_stop(self._text, self._stop)
        if len(cut) < len(self._text):
            self.has_stopped = True
            self._text = cut
            return self._give(len(cut))
        return self._give(self._certain())

    def finish(self) -> str:
        """What is left when no more ids come."""
        return self._give(len(self._text))

    @property
    def text(self) -> str:
        """All of it up to now, without a stop text."""
        return self._text

    def _give(self, end: int) -> str:
        part = self._text[self._given : end]
        self._given = max(self._given, end)
        return part

    def _certain(self) -> int:
        """Up to where the text stays, whatever follows."""
        end = len(self._text.rstrip(_REPLACEMENT))
        for stop in self._stop:
            for length in range(min(len(stop) - 1, end), 0, -1):
                if self._text[:end].endswith(stop[:length]):
                    end -= length
                    break
        return end
