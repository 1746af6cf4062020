"""Extraction of the answer from a completion. A parser never gets a whole completion, in which it
would find 24 in `<reasoning>48/2=24</reasoning><answer>72</answer>`."""

import re
from collections.abc import Sequence

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.letters import plain

# The places to search, in this order; the first one found has the answer.
POLICY = ("answer", "boxed", "hash", "number")
# Most boxes that are tried from the end, if their braces do not close.
_BOXES = 16
_NUMBER = re.compile(
    # A minus after a word, a number or a bracket is an operator.
    r"(?:(?<![\w)\]}])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][+-]?\d+)?(?:/\d+)?%?"
)


def extract(text: str, policy: Sequence[str] = POLICY) -> str | None:
    """Return the answer of a completion, or of a solution; None if there is none.

    Args:
        text: a completion, or the solution of a dataset.
        policy: where to look, in order: "answer" (the last `<answer>...</answer>`, and in it the
            last box if it has one), "boxed" (the last `\\boxed{...}` whose braces close), "hash"
            (the line after the last `####`), "number" (the last number), "all" (the text itself).

    Raises:
        ConfigError: a name in the policy is not known.
    """
    for name in policy:
        if name not in _FINDERS:
            raise ConfigError(
                f"{name!r} is no place where an answer can be. Name some of "
                f"{', '.join(_FINDERS)}, in the order in which to look."
            )
        found = _FINDERS[name](text)
        if found is not None:
            return found.strip()
    return None


def tagged(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`."""
    end = text.rfind("</answer>")
    if end < 0:
        return None
    start = text.rfind("<answer>", 0, end)
    if start < 0:
        return None
    return text[start + len("<answer>") : end]


def boxed(text: str) -> str | None:
    """Return the content of the last `\\boxed{...}` or `\\fbox{...}` whose braces close."""
    end = len(text)
    for _ in range(_BOXES):
        start = max(text.rfind(r"\boxed{", 0, end), text.rfind(r"\fbox{", 0, end))
        if start < 0:
            return None
        found = _braced(text, text.index("{", start))
        if found is not None:
            return found
        end = start
    return None


def after_hashes(text: str) -> str | None:
    """Return the rest of the line after the last `####`."""
    _, hashes, rest = text.rpartition("####")
    if not hashes:
        return None
    return rest.strip().partition("\n")[0]


def last_number(text: str) -> str | None:
    """Return the last number, with its sign, dollar sign, denominator or percent sign."""
    found = None
    for match in _NUMBER.finditer(plain(text)):
        found = match[0]
    if found is None:
        return None
    return found.rstrip(",")


def _answer(text: str) -> str | None:
    """Return the answer in tags, or in the box inside them."""
    found = tagged(text)
    if found is None:
        return None
    inner = boxed(found)
    if inner is None:
        return found
    return inner


def _braced(text: str, start: int) -> str | None:
    """Return the text between the brace at `start` and its closing brace; None if it does not
    close."""
    depth = 0
    escaped = False
    for place in range(start, len(text)):
        character = text[place]
        if escaped:
            escaped = False
        elif character == "\\":
            escaped = True
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : place]
    return None


def _all(text: str) -> str | None:
    """Return the text itself."""
    return text


_FINDERS = {
    "answer": _answer,
    "boxed": boxed,
    "hash": after_hashes,
    "number": last_number,
    "all": _all,
}
