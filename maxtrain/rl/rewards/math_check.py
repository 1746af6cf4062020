"""Whether two expressions are the same, by math-verify and sympy. It runs in a worker, which is
killed if it takes too long: nothing here has a limit of its own, since math-verify's need the main
thread and signals, which a call of C does not heed."""

import logging
from typing import Any

from data_pipeline.extras import load_package

WANTED_BY = "the reward math"
EXTRA = "math"
CORRECT = "correct"
WRONG = "wrong"
UNPARSABLE = "unparsable"
# The fault is the dataset's, not the model's.
BAD_GOLD = "bad_gold"
# Texts without a backslash that are programs rather than LaTeX.
_PLAIN = ("*", "sqrt", "pi", "exp", "log", "sin", "cos", "tan")


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
    expected = _parsed(gold)
    if not expected:
        return BAD_GOLD
    found = _parsed(answer)
    if not found:
        return UNPARSABLE
    package = load_package("math_verify", EXTRA, WANTED_BY)
    if package.verify(expected, found, timeout_seconds=None):
        return CORRECT
    return WRONG


def _parsed(text: str) -> list[Any]:
    """The expression that a text is, or nothing. The text as such is not kept: that texts are equal
    was found before."""
    package = load_package("math_verify", EXTRA, WANTED_BY)
    if "\\" not in text and any(word in text for word in _PLAIN):
        sympy = load_package("sympy.parsing.sympy_parser", EXTRA, WANTED_BY)
        try:
            expression = sympy.parse_expr(text.replace("^", "**"), evaluate=False)
        except (SyntaxError, TypeError, ValueError, AttributeError):
            return []
        # By way of LaTeX, so that its variables are those of the other expression: real ones.
        text = load_package("sympy", EXTRA, WANTED_BY).latex(expression)
    return package.parse(
        f"${text}$",
        extraction_config=[package.LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=None,
    )
