"""Text from outside on a terminal: what would command the terminal, or hide, is shown escaped.

A document, a name in a checkpoint or what a model writes may hold escape sequences. A terminal
would obey them: they clear the screen, overwrite earlier lines, change the window's title, or
reorder the text that a person reads.
"""

import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO

# Control characters (C0 but for tab and line feed, DEL, C1), soft hyphens, marks and overrides of
# direction, characters without width, separators of lines, tags, and surrogates. The joiners U+200C
# and U+200D stay: Persian, the scripts of India, and emoji are written with them.
_UNSAFE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    r"""The text with such characters as Python would write them in a string: \x1b, \u202e."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code <= 0xFF:
        return f"\\x{code:02x}"
    if code <= 0xFFFF:
        return f"\\u{code:04x}"
    return f"\\U{code:08x}"


class EscapedStream:
    """A terminal on which all that is written as text is `visible`.

    rich writes to `rich_proxied_file` instead, since its own styles are escape sequences. What its
    consoles render is escaped by `data_pipeline.base.console`.
    """

    def __init__(self, stream: TextIO):
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(visible(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


def escape_terminals() -> None:
    """Escape control characters on standard output and standard error if they are terminals. Text
    for a file or a pipe stays byte for byte.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, EscapedStream):
            continue
        if stream.isatty():
            setattr(sys, name, EscapedStream(stream))


def unescaped(stream: Any) -> Any:
    """The stream itself, for text of ours that commands the terminal."""
    return getattr(stream, "rich_proxied_file", stream)
