"""Formulas as programs write them, in LaTeX; and whatever is none."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from maxtrain.rl.rewards.formula import NoFormulaError, to_latex


@pytest.mark.parametrize(
    ("text", "latex"),
    [
        ("2*x", r"2 \cdot x"),
        ("2x", r"2 \cdot x"),
        ("2sqrt(3)", r"2 \cdot \sqrt{3}"),
        ("sqrt(2)/2", r"\frac{\sqrt{2}}{2}"),
        ("-x**2", r"-x^{2}"),
        ("(-x)**2", r"\left(-x\right)^{2}"),
        ("x**-2", r"x^{-2}"),
        ("2^3^2", r"2^{3^{2}}"),
        ("(x+1)(x-1)", r"\left(x + 1\right) \cdot \left(x - 1\right)"),
        ("a - (b - c)", r"a - \left(b - c\right)"),
        ("sin(x)**2", r"\left(\sin\left(x\right)\right)^{2}"),
        ("log(8, 2)", r"\log_{2}\left(8\right)"),
        ("pi*r^2", r"\pi \cdot r^{2}"),
        ("x_1 + x2", r"x_{1} + x_{2}"),
        ("x^{2}", r"x^{2}"),
        ("{1, 2}", r"\left\{1, 2\right\}"),
        ("(0, pi]", r"\left(0, \pi\right]"),
        ("1 < x <= 2*3", r"1 < x \leq 2 \cdot 3"),
        ("x = 1 or x = 2*3", r"x = 1, x = 2 \cdot 3"),
        ("|x - 1|", r"\left|x - 1\right|"),
        ("(2*n)!", r"\left(2 \cdot n\right)!"),
        ("1,000*x", r"1000 \cdot x"),
        ("1.5e3", r"1.5 \cdot 10^{3}"),
        ("lambda*2", r"\lambda \cdot 2"),
    ],
)
def test_formulas_have_one_meaning_in_latex(text, latex):
    assert to_latex(text) == latex


@pytest.mark.parametrize(
    "text",
    [
        "",
        "()",
        "2*",
        "*2",
        "2**",
        "sqrt 2",
        "sqrt()",
        "sqrt(2, 3)",
        "sqrt(2)cm",
        "n!!",
        "x.y*2",
        "1.real*2",
        "x[0]*2",
        "(x*2).a",
        "'a'*2",
        '"a"*2',
        "f'{x}'*2",
        "f'a'*2",
        "b'a'*2",
        "(lambda: 1)()*2",
        "lambda x: x*2",
        "[x for x in y]*2",
        "f(*a)",
        "f(**a)",
        "sqrt(x=2)",
        "(x := 2)*2",
        "x if y else 2*z",
        "not x*2",
        "await x*2",
        "x @ y*2",
        "x & y*2",
        "x # 2*y",
        "x; import os*2",
        "x\\\n*2",
        "eval(2*x)",
        "ev(2*x)",
        "exec(2)*1",
        "open(x)*1",
        "__import__(os)*2",
        "S(a)(b)*2.x",
        "Symbol(x)*2",
        "１**２.x",
        "\uff45\uff56\uff41\uff4c(2)*1",
        "$2*x$",
        "2*x\x00",
        "1e999999999",
        "1e9999",
        "(" * 5000 + "x*2",
        "-" * 5000 + "x",
        "(" * 100 + "x*2" + ")" * 100,
        "sqrt(" * 100 + "2" + ")" * 100,
        "+".join(["2*x"] * 1000),
    ],
)
def test_what_is_no_formula_is_refused(text):
    with pytest.raises(NoFormulaError):
        to_latex(text)


SOUP = (
    *"0 1 2.5 x y S E I ( ) [ ] { } * ** / + - ^ ! , . ' \" _ __ = : ; @ # \\ | < \n".split(" "),
    *("sqrt", "pi", "lambda", "eval", "exec", "open", "os", "import", "getattr", "f'", "and"),
)


@given(st.lists(st.sampled_from(SOUP), max_size=30).map("".join))
def test_latex_of_a_formula_has_no_part_that_is_not_of_the_grammar(text):
    try:
        latex = to_latex(text)
    except NoFormulaError:
        return
    commands = set(re.findall(r"\\[a-z]+", latex))
    known = {"sqrt", "pi", "lambda", "cdot", "frac", "left", "right", "leq"}
    assert commands <= {rf"\{name}" for name in known}
    rest = re.sub(r"\\[a-z]+|\\[{}]", " ", latex)
    # Names that are left are variables, or products of two.
    assert all(len(word) <= 2 for word in re.findall(r"[A-Za-z]+", rest))
    assert re.fullmatch(r"[A-Za-z0-9 ()\[\]{}+\-^!,.=|<_]*", rest)
