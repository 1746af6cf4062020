"""Normalisation of texts to keyboard characters."""

import re
import unicodedata

_MINUS = str.maketrans(dict.fromkeys("\u2010\u2011\u2012\u2013\u2212", "-"))
_SLASH = "\u2044"
_POWER = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")


def plain(text: str) -> str:
    """Return a text in the compatibility forms of Unicode (NFKC), with all minus signs unified.

    Differs from NFKC: powers and fractions keep their meaning. 5\u00b2 is `5^{2}`, not 52, and
    1\u00bd is `1 1/2`, not 11/2.
    """
    if text.isascii():
        return text
    text = _POWER.sub(lambda power: "^{" + unicodedata.normalize("NFKC", power[0]) + "}", text)
    text = "".join(map(_spaced, text))
    return unicodedata.normalize("NFKC", text).replace(_SLASH, "/").translate(_MINUS)


def _spaced(character: str) -> str:
    """Return a character, with a space before it if it is a fraction."""
    if unicodedata.decomposition(character).startswith("<fraction>"):
        return f" {character}"
    return character
