"""Whether two expressions are the same, by math-verify and sympy. It runs in a worker, which is
killed if it takes too long: nothing here has a limit of its own, since math-verify's need the main
thread and signals, which a call of C does not heed.

Texts come from a model or from a dataset, and sympy evaluates text as a program in many places.
So a text reaches a parser only if it consists of what formulas consist of (guards.py), formulas as
programs write them are translated into LaTeX by our own parser (formula.py), and while packages
work on an expression the interpreter refuses to evaluate text at all (no_programs.py).
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
# In texts without a backslash that are written as programs are, rather than in LaTeX.
_PLAIN = ("*", "sqrt", "cbrt", "pi", "exp", "log", "ln", "sin", "cos", "tan", "cot", "csc", "sec")
_PLAIN += ("abs", "max", "min", "gcd", "lcm", "floor", "ceil")

_NUMBER = re.compile(r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?")


def warm_up() -> None:
    """Imports what `check` needs and fills its tables, before workers are forked."""
    check(r"\frac{1}{2} + \sqrt{2}", "sqrt(2) + 1/2")


def check(gold: str, answer: str) -> str:
    """Whether an answer is the one that was asked for: CORRECT, WRONG, UNPARSABLE or BAD_GOLD.

    It is not symmetric: an inequality in the gold may be answered by an interval, but not the
    reverse.

    Args:
        gold, answer: single expressions, in LaTeX without delimiters or as sympy prints them.
    """
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    package = load_package("math_verify", EXTRA, WANTED_BY)
    # sympy imports it when it simplifies something, and its names are made from texts.
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
    """sympy makes a number of a text by evaluating that text, also where math-verify asks it for
    the number of a few digits. Meanwhile it takes digits only, and evaluates nothing."""
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
    """The expression of a text by math-verify, or nothing. The text as such is not kept: that texts
    are equal was found before."""
    if foreign_part(text):
        return []
    config = package.LatexExtractionConfig()
    if "\\" not in text and any(word in text for word in _PLAIN):
        try:
            text = to_latex(text)
        except NoFormulaError:
            return []
        # It has no units, and a product may end with a variable that looks like one.
        without_units = dataclasses.replace(config.normalization_config, units=False)
        config = dataclasses.replace(config, normalization_config=without_units)
    return package.parse(
        f"${text}$",
        extraction_config=[config],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
