"""Comparison of two expressions by math-verify and sympy.

It runs in a worker, which is killed if it takes too long. There is no limit in this module:
math-verify's limits need the main thread and signals, which a call of C ignores.

Texts come from a model or a dataset, and sympy evaluates text as a program in many places. So a
text reaches a parser only if it has only characters of formulas (guards.py). Formulas in program
notation are translated into LaTeX by our own parser (formula.py). While the packages work on an
expression, the interpreter refuses to evaluate text at all (no_programs.py).
"""

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator
from typing import Any

from data_pipeline.base.extras import load_package
from maxtrain.rl.rewards.formula import NoFormulaError, to_latex
from maxtrain.rl.rewards.guards import foreign_part
from maxtrain.rl.rewards.no_programs import no_programs

WANTED_BY = "the reward math"
EXTRA = "math"
CORRECT = "correct"
WRONG = "wrong"
UNPARSABLE = "unparsable"
# The fault is the dataset's, not the model's.
BAD_GOLD = "bad_gold"
# Texts without a backslash that contain one of these are in program notation, not LaTeX.
_PLAIN = ("*", "sqrt", "cbrt", "pi", "exp", "log", "ln", "sin", "cos", "tan", "cot", "csc", "sec")
_PLAIN += ("abs", "max", "min", "gcd", "lcm", "floor", "ceil")

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def warm_up() -> None:
    """Import everything that `check` needs and fill its tables, before workers are forked."""
    check(r"\frac{1}{2} + \sqrt{2}", "sqrt(2) + 1/2")


def check(gold: str, answer: str) -> str:
    """Return whether an answer equals the gold answer: CORRECT, WRONG, UNPARSABLE or BAD_GOLD.

    The comparison is not symmetric: an interval may answer an inequality in the gold, but not the
    reverse.

    Args:
        gold, answer: single expressions, in LaTeX without delimiters or as sympy prints them.
    """
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    package = load_package("math_verify", EXTRA, WANTED_BY)
    # sympy imports this module during simplification, and creates its names from texts.
    load_package("sympy.physics.units", EXTRA, WANTED_BY)
    with no_programs(), _numbers_read_as_numbers():
        expected = _parsed(package, gold)
        if not expected:
            return BAD_GOLD
        found = _parsed(package, answer)
        if not found:
            return UNPARSABLE
        if package.verify(expected, found, timeout_seconds=None):
            return CORRECT
        return WRONG


@contextlib.contextmanager
def _numbers_read_as_numbers() -> Iterator[None]:
    """Let sympy parse digits only. Otherwise it evaluates a text to get a number, even when
    math-verify passes a few digits."""
    parser = load_package("sympy.parsing.sympy_parser", EXTRA, WANTED_BY)
    numbers = load_package("sympy.core.numbers", EXTRA, WANTED_BY)

    def read(text: str, *_: Any, **__: Any) -> Any:
        if not _NUMBER.fullmatch(text):
            raise SyntaxError(f"{text[:20]!r} is no number")
        if text.isdigit():
            return numbers.Integer(int(text))
        return numbers.Float(text)

    before = parser.parse_expr
    parser.parse_expr = read
    try:
        yield
    finally:
        parser.parse_expr = before


def _parsed(package: Any, text: str) -> list[Any]:
    """Parse a text with math-verify; return the expression, or nothing. The text itself is dropped,
    because equal texts were found before."""
    if foreign_part(text):
        return []
    config = package.LatexExtractionConfig()
    if "\\" not in text and any(word in text for word in _PLAIN):
        try:
            text = to_latex(text)
        except NoFormulaError:
            return []
        # Such texts have no units, and a product may end with a variable that looks like a unit.
        without_units = dataclasses.replace(config.normalization_config, units=False)
        config = dataclasses.replace(config, normalization_config=without_units)
    return package.parse(
        f"${text}$",
        extraction_config=[config],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
