"""Checks before a parser of mathematics sees a text: texts that are no mathematics, and texts that
would take forever, are refused. A time limit ends whatever still passes."""

import re

_LONGEST = 300
_MOST_DIGITS = 150
_LONGEST_NUMBER = 50
_LARGEST_EXPONENT = 500
_LARGEST_FACTORIAL = 170
_DEEPEST = 20

_POWER = r"(?:\^|\*\*)"
# A power in an exponent, or a power of a power without brackets: 9^{9^9}, 9^9^9, 9**9**9.
_TOWER = re.compile(
    rf"{_POWER}\s*[{{(][^{{}}()]*(?:{_POWER}|!)|{_POWER}\s*[{{(]?\s*[\w.]+\s*[}})]?\s*{_POWER}"
)
_EXPONENT = re.compile(rf"{_POWER}\s*[{{(]?\s*[+-]?\s*(\d+)")
_FACTORIAL_OF_NUMBER = re.compile(r"(\d+)\s*!")
_FACTORIAL_OF_MORE = re.compile(r"[)}\]!]\s*!")
# Words of a formula; a text with any other word of three letters or more is no formula.
_KNOWN_WORDS = frozenset(
    "sqrt cbrt sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan asin acos atan log exp "
    "abs max min det gcd lcm mod inf oo alpha beta gamma delta theta lambda mu phi psi omega sigma "
    "rho tau and cup cap frac".split()
)
_WORD = re.compile(r"(?<![\\A-Za-z])[A-Za-z]{3,}")
_PLACE_OF_COMMAND = re.compile(r"\\(?:begin|end)\s*\{[a-z*]*\}(?:\{[clr|]*\})?")
_LATEX = r"A-Za-z0-9\s+\-*/^_=<>!|.,:'&%~(){}\[\]\\"
# Beside ASCII: letters of Greek, degrees, and signs of mathematics.
_FOREIGN = re.compile(rf"[^{_LATEX}\u0370-\u03ff\u00b0\u00b1\u00b7\u00d7\u00f7\u2100-\u22ff]")
# A name of Python, a quote that is no prime of a function, and commands that define or include.
_NO_FORMULA = re.compile(
    r"__|(?<![A-Za-z0-9)\]}'|])'|'\s*\w"
    r"|\\(?:input|include|write|[exg]?def|let|catcode|csname|newcommand|renewcommand|variable)"
)


def has_words(text: str) -> bool:
    """Return whether a text has words that no formula has, so that it is prose or a name."""
    bare = _PLACE_OF_COMMAND.sub(" ", text)
    return any(word.lower() not in _KNOWN_WORDS for word in _WORD.findall(bare))


def foreign_part(text: str) -> str:
    """Return the first part of a text that no formula has; "" if there is none."""
    found = _FOREIGN.search(text) or _NO_FORMULA.search(text)
    if found is None:
        return ""
    return found[0]


def refusal(text: str) -> str:
    """Return why a text must not reach a parser; "" if it may."""
    if len(text) > _LONGEST:
        return f"{len(text)} characters"
    numbers = re.findall(r"\d+", text)
    if sum(map(len, numbers)) > _MOST_DIGITS:
        return f"over {_MOST_DIGITS} digits"
    if any(len(number) > _LONGEST_NUMBER for number in numbers):
        return f"a number of over {_LONGEST_NUMBER} digits"
    if found := foreign_part(text):
        return f"{found!r}, which no formula has"
    if _depth(text) > _DEEPEST:
        return f"brackets over {_DEEPEST} deep"
    return _too_large(text)


def _too_large(text: str) -> str:
    """Return why the value of a formula may be too large to compute; "" if it seems computable."""
    if _TOWER.search(text):
        return "a power in an exponent"
    if any(int(exponent) > _LARGEST_EXPONENT for exponent in _EXPONENT.findall(text)):
        return f"an exponent above {_LARGEST_EXPONENT}"
    factorials = text.replace("!=", "")
    if any(int(n) > _LARGEST_FACTORIAL for n in _FACTORIAL_OF_NUMBER.findall(factorials)):
        return f"the factorial of a number above {_LARGEST_FACTORIAL}"
    if _FACTORIAL_OF_MORE.search(factorials) and re.search(r"\d", text):
        return "the factorial of an expression"
    return ""


def _depth(text: str) -> int:
    """Return the deepest nesting of brackets of any kind."""
    deepest = 0
    depth = 0
    for character in text:
        if character in "({[":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")}]":
            depth -= 1
    return deepest
