"""Exact reading of numbers as people and models write them: "1,000", "$ -5", "72.0", "3/4",
"\\frac{3}{4}", "1 1/2", "12 km".

These need no parser of mathematics, and no such parser is as exact.
"""

import re
from decimal import Decimal
from fractions import Fraction
from typing import NamedTuple

from maxtrain.rl.rewards.letters import plain

# Longer texts are no numbers that people write.
_LONGEST = 300
# 1e400 has 400 digits; a power of ten above that only takes time.
_LARGEST_EXPONENT = 400

_UNSIGNED = r"(?:\d{1,3}(?:,\d{3})+(?:\.\d*)?|\d+(?:\.\d*)?|\.\d+)"
_DECIMAL = re.compile(rf"({_UNSIGNED})(?:[eE]([+-]?\d{{1,9}}))?")
_SLASH = re.compile(rf"({_UNSIGNED})\s*/\s*({_UNSIGNED})")
_FRACTION = re.compile(rf"\\[dt]?frac\s*\{{\s*(-?{_UNSIGNED})\s*\}}\s*\{{\s*(-?{_UNSIGNED})\s*\}}")
_MIXED = re.compile(r"(\d+)(?:\s+|(?=\\))(\d+\s*/\s*\d+|\\[dt]?frac.*)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf|mathbf)\s*\{([^{}]*)\}")
# Two backslashes end a row of a matrix.
_SPACES = re.compile(r"(?<!\\)\\[,;:! ]|~|\\qquad|\\quad")
_UNIT = re.compile(r"(?P<number>.*?[\d.}])\s*(?P<unit>[^\W\d_][^\d\\{}$]*(?:\^?\{?[23]\}?)?)\.?")

# Words that scale the number before them.
_SCALES = {
    "dozen": 12,
    "hundred": 100,
    "thousand": 1000,
    "million": 10**6,
    "billion": 10**9,
    "trillion": 10**12,
}
# Words that continue the number, or are no unit.
_NO_UNITS = frozenset(
    "and or to of half halves third thirds quarter quarters fourth fourths fifth fifths sixth "
    "tenth tenths hundredth hundredths thousandth thousandths times plus minus over squared cubed "
    "mod modulo if when where with not is are equals approximately about percentage pi sqrt log ln "
    "sin cos tan exp inf infinity nan dozens hundreds thousands millions billions trillions".split()
)
# Single letters that are units and hardly ever variables.
_LETTERS = frozenset("mgshLl")
# Units of one kind that differ by a factor, so that the same number is another quantity.
_SAME = {
    "millimeter": "mm",
    "centimeter": "cm",
    "meter": "m",
    "metre": "m",
    "centimetre": "cm",
    "kilometer": "km",
    "kilometre": "km",
    "inches": "inch",
    "feet": "foot",
    "ft": "foot",
    "yd": "yard",
    "milligram": "mg",
    "gram": "g",
    "kilogram": "kg",
    "second": "s",
    "sec": "s",
    "minute": "min",
    "hour": "h",
    "hr": "h",
    "liter": "l",
    "litre": "l",
    "milliliter": "ml",
    "cents": "cent",
    "dollars": "dollar",
    "usd": "dollar",
    "$": "dollar",
    "percent": "%",
}
_KINDS = (
    ("mm", "cm", "m", "km", "inch", "foot", "yard", "mile"),
    ("mg", "g", "kg", "ton", "ounce", "pound"),
    ("s", "min", "h", "day", "week", "month", "year"),
    ("ml", "l", "gallon"),
    ("cent", "dollar"),
)


class Numeral(NamedTuple):
    """A number with the unit that it was written with; "" if it has none."""

    value: Fraction
    unit: str


def normalized(text: str) -> str:
    """Return a text with unified signs, spaces and formula delimiters."""
    text = plain(text).replace(r"\left", "").replace(r"\right", "").replace(r"\$", "$")
    text = text.replace(r"\%", "%").replace("{,}", ",")
    text = re.sub(r"\^\s*\{?\s*\\circ\s*\}?|\u00b0", " degrees ", text)
    text = _SPACES.sub(" ", text)
    text = text.strip()
    for begin, end in ((r"\(", r"\)"), (r"\[", r"\]"), ("$$", "$$"), ("$", "$")):
        if len(text) > len(begin + end) and text.startswith(begin) and text.endswith(end):
            text = text[len(begin) : -len(end)].strip()
    return " ".join(text.split())


def read_number(text: str) -> Numeral | None:
    """Return the number that a text is as a whole; None if it is none, or uncertain.

    A percent sign is a unit, so that 50% is 50, and never 0.5.
    """
    if len(text) > _LONGEST:
        return None
    text = _TEXT.sub(r" \1 ", normalized(text)).strip()
    if not text.endswith(".."):
        text = text.removesuffix(".").strip()
    unit = ""
    bare = re.fullmatch(r"([+-]?)\s*\$\s*([+-]?)\s*(.*)", text)
    if bare:
        sign, other, text = bare.groups()
        text = sign + other + text
        unit = "dollar"
    if text.endswith("%"):
        text = text[:-1].strip()
        unit = "%"
    value = _signed(text)
    if value is not None:
        return Numeral(value, unit)
    return _with_unit(text)


def same_number(gold: Numeral, answer: Numeral) -> bool:
    """Return whether both are the same number, in compatible units: 5 m is not 5 cm."""
    if gold.value != answer.value:
        return False
    if gold.unit == answer.unit:
        return True
    return not any(gold.unit in kind and answer.unit in kind for kind in _KINDS)


def _with_unit(text: str) -> Numeral | None:
    """Read a number followed by words."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return None
    value = _signed(match["number"].strip())
    if value is None:
        return None
    attached = text[match.end("number")] != " "
    unit = match["unit"].strip(" .").removesuffix("}")
    words = re.sub(r"\^?\{?[23]$", "", unit).replace("/", " ").replace("-", " ").split()
    if not words or len(words) > 4:
        return None
    factor = _SCALES.get(words[0].lower())
    if factor is not None:
        value *= factor
        words = words[1:]
    for word in words:
        if word.lower() in _NO_UNITS or word.lower() in _SCALES:
            return None
        if not re.fullmatch(r"[^\W\d_]+\.?", word):
            return None
        if len(word) == 1 and word not in _LETTERS:
            return None
    # 5x, 5m and 2pi are products; 5km is not.
    if attached and _canonical(unit) not in _ATTACHED:
        return None
    return Numeral(value, _canonical(" ".join(words)))


def _canonical(unit: str) -> str:
    unit = unit.lower().rstrip(".")
    if unit in _SAME:
        return _SAME[unit]
    singular = unit.removesuffix("s")
    if len(singular) > 1:
        unit = singular
    return _SAME.get(unit, unit)


_ATTACHED = frozenset(["mm", "cm", "km", "mg", "kg", "ml", "min", "%", "foot", "dollar", "cent"])


def _signed(text: str) -> Fraction | None:
    sign = re.match(r"[+-]?\s*", text)
    assert sign is not None
    value = _unsigned(text[sign.end() :])
    if value is not None and sign[0].startswith("-"):
        return -value
    return value


def _unsigned(text: str) -> Fraction | None:
    """Read a number without a sign: a decimal, a fraction, or a whole number and a fraction."""
    if match := _DECIMAL.fullmatch(text):
        exponent = int(match[2] or 0)
        if abs(exponent) > _LARGEST_EXPONENT:
            return None
        return Fraction(Decimal(match[1].replace(",", ""))) * Fraction(10) ** exponent
    if match := _MIXED.fullmatch(text):
        part = _unsigned(match[2])
        if part is None or not 0 < part < 1:
            return None
        return int(match[1]) + part
    match = _SLASH.fullmatch(text) or _FRACTION.fullmatch(text)
    if match is None:
        return None
    upper, lower = (Fraction(Decimal(part.replace(",", ""))) for part in match.groups())
    if lower == 0:
        return None
    return upper / lower
