"""Translation of typed formulas, such as `2*sqrt(3)/3` or `x**2 <= pi`, into LaTeX.

The grammar below is an allow-list: numbers, operators, brackets, and the names of this file.
Nothing else is a formula, and no part of a text is ever evaluated as a program. Operands that are
not a single symbol get parentheses, so that the LaTeX has one meaning.
"""

import re
from typing import NamedTuple

_MOST_TOKENS = 300
_DEEPEST = 60
# Larger powers of ten are not written in scientific notation by people.
_LARGEST_EXPONENT = 400

_TOKEN = re.compile(
    r"\s*(?:(?P<number>(?:\d{1,3}(?:,\d{3})+(?![\d,])|\d+)(?:\.\d+|\.(?!\s*[\w.]))?|\.\d+)"
    r"(?P<exponent>[eE][+-]?\d+)?"
    r"|(?P<name>[A-Za-z]+(?:_?\d+|_[A-Za-z](?![A-Za-z])|_\{[A-Za-z0-9]+\})?)"
    r"|(?P<sign>\*\*|<=|>=|==|!=|[-+*/^!<>=,;|()\[\]{}]))",
    re.ASCII,
)
_NAME = re.compile(r"([A-Za-z]+)(?:_?\{?(\w+?)\}?)?")
_GREEK = frozenset(
    "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi rho sigma tau "
    "upsilon phi chi psi omega Gamma Delta Theta Lambda Xi Sigma Phi Psi Omega".split()
)
_CONSTANTS = {"pi": r"\pi", "E": "e", "I": "i", "oo": r"\infty", "inf": r"\infty"}
_CONSTANTS["infinity"] = r"\infty"
_CONSTANTS |= {name: rf"\{name}" for name in _GREEK}
# LaTeX of functions of one argument, by the names of programs and of sympy, and of two.
_SINGLES = {
    name: rf"\{name}\left(#1\right)"
    for name in "sin cos tan cot sec csc sinh cosh tanh arcsin arccos arctan ln log exp".split()
}
_SINGLES |= {f"a{name}": rf"\arc{name}\left(#1\right)" for name in ("sin", "cos", "tan")}
_SINGLES |= {
    f"a{name}": rf"\operatorname{{arc{name}}}\left(#1\right)" for name in ("sinh", "cosh", "tanh")
}
_SINGLES |= {"sqrt": r"\sqrt{#1}", "cbrt": r"\sqrt[3]{#1}", "factorial": r"\left(#1\right)!"}
_SINGLES |= {"floor": r"\lfloor #1 \rfloor", "ceil": r"\lceil #1 \rceil"}
_SINGLES |= {"ceiling": r"\lceil #1 \rceil", "abs": r"\left|#1\right|", "Abs": r"\left|#1\right|"}
_PAIRS = {"root": r"\sqrt[#2]{#1}", "log": r"\log_{#2}\left(#1\right)"}
_PAIRS |= {"binomial": r"\binom{#1}{#2}", "Rational": r"\frac{#1}{#2}"}
# These need no parentheses.
_ENCLOSED = frozenset("sqrt cbrt root binomial floor ceil ceiling abs Abs".split())
_LISTS = {"max": r"\max", "min": r"\min", "gcd": r"\gcd", "lcm": r"\lcm"}
_LISTS |= {"Max": r"\max", "Min": r"\min"}
_RELATIONS = {"<": "<", ">": ">", "=": "=", "==": "="}
_RELATIONS |= {"<=": r"\leq", ">=": r"\geq", "!=": r"\neq"}
_CLOSING = {"(": ")]", "[": "])", "{": "}"}
_SEPARATORS = (",", ";", "and", "or")


class NoFormulaError(Exception):
    """A text is no formula of the grammar; the message names the part that is not."""


class _FormulaToken(NamedTuple):
    kind: str
    text: str


class _LatexPart(NamedTuple):
    """LaTeX of a part of a formula.

    Attributes:
        latex: the text.
        is_atom: whether it is a single symbol, number or bracket.
        is_product: whether it is a product, a quotient or a power, which needs no parentheses
            beside another factor.
    """

    latex: str
    is_atom: bool = False
    is_product: bool = False

    def bracketed(self) -> str:
        """Return the LaTeX in parentheses, unless it is a single thing."""
        if self.is_atom:
            return self.latex
        return _round(self.latex)


def to_latex(text: str) -> str:
    """Return the LaTeX of a formula. Raise a NoFormulaError if the text is none."""
    parser = _FormulaParser(_tokens(text))
    latex = parser.elements()
    if parser.next() is not None:
        raise NoFormulaError(f"{parser.next_text()!r} is not expected")
    return latex


def _tokens(text: str) -> list[_FormulaToken]:
    """Split a text into tokens."""
    tokens = []
    place = 0
    text = text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None:
            raise NoFormulaError(f"{text[place : place + 10]!r} is no part of a formula")
        place = match.end()
        if match["number"]:
            tokens.append(_FormulaToken("number", match["number"] + (match["exponent"] or "")))
        elif match["name"]:
            kind = "name"
            if match["name"] in _SEPARATORS:
                kind = "sign"
            tokens.append(_FormulaToken(kind, match["name"]))
        else:
            tokens.append(_FormulaToken("sign", match["sign"]))
        if len(tokens) > _MOST_TOKENS:
            raise NoFormulaError(f"it has over {_MOST_TOKENS} parts")
    return tokens


class _FormulaParser:
    """A recursive descent parser that writes LaTeX."""

    def __init__(self, tokens: list[_FormulaToken]):
        self._tokens = tokens
        self._place = 0
        self._depth = 0

    def next(self) -> _FormulaToken | None:
        """Return the next token; None at the end."""
        if self._place < len(self._tokens):
            return self._tokens[self._place]
        return None

    def next_text(self) -> str:
        """Return the text of the next token; empty at the end."""
        token = self.next()
        if token is None:
            return ""
        return token.text

    def _take(self, *signs: str) -> str:
        """Consume and return the next token if it is one of these signs; else return ""."""
        token = self.next()
        if token is None or token.kind != "sign" or token.text not in signs:
            return ""
        self._place += 1
        return token.text

    def _require(self, *signs: str) -> str:
        """Consume one of these signs, or raise a NoFormulaError."""
        found = self._take(*signs)
        if not found:
            raise NoFormulaError(f"{self.next_text()!r} stands where {' or '.join(signs)} must be")
        return found

    def elements(self) -> str:
        """Parse relations or terms, separated by commas."""
        parts = [self._relation()]
        while self._take(*_SEPARATORS):
            parts.append(self._relation())
        return ", ".join(parts)

    def _relation(self) -> str:
        latex = self._sum().latex
        while sign := self._take(*_RELATIONS):
            latex += f" {_RELATIONS[sign]} {self._sum().latex}"
        return latex

    def _sum(self) -> _LatexPart:
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NoFormulaError(f"it is over {_DEEPEST} deep")
        part = self._product()
        while sign := self._take("+", "-"):
            part = _LatexPart(f"{part.latex} {sign} {self._product(is_first=False).latex}")
        self._depth -= 1
        return part

    def _product(self, is_first: bool = True) -> _LatexPart:
        part = self._signed()
        if not is_first and part.latex.startswith("-"):
            part = _LatexPart(_round(part.latex), True)
        while True:
            sign = self._take("*", "/")
            if not sign and not self._is_juxtaposed():
                return part
            factor = self._signed()
            if sign == "/":
                part = _LatexPart(rf"\frac{{{part.latex}}}{{{factor.latex}}}", is_product=True)
            elif part.latex.startswith("-"):
                # The sign of a product stays in front of it.
                part = _LatexPart(rf"{part.latex} \cdot {_factor(factor)}", is_product=True)
            else:
                part = _LatexPart(rf"{_factor(part)} \cdot {_factor(factor)}", is_product=True)

    def _is_juxtaposed(self) -> bool:
        """Return whether a factor follows without a sign, as in 2x, 2(x+1) and (x+1)(x-1)."""
        token = self.next()
        before = self._tokens[self._place - 1]
        if token is None or not (before.kind == "number" or before.text == ")"):
            return False
        # Two letters that are no known name are a unit: sqrt(2) cm.
        return token.text == "(" or (token.kind == "name" and _is_known(token.text))

    def _signed(self) -> _LatexPart:
        """Parse a power with signs in front of it."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise NoFormulaError(f"it is over {_DEEPEST} deep")
        sign = self._take("+", "-")
        if not sign:
            part = self._power()
        else:
            part = self._signed()
            if sign == "-":
                part = _LatexPart(f"-{_minus(part)}")
        self._depth -= 1
        return part

    def _power(self) -> _LatexPart:
        base = self._factorial()
        if not self._take("**", "^"):
            return base
        exponent = self._signed()
        return _LatexPart(f"{base.bracketed()}^{{{exponent.latex}}}", is_product=True)

    def _factorial(self) -> _LatexPart:
        part = self._atom()
        if self._take("!"):
            part = _LatexPart(f"{part.bracketed()}!")
        return part

    def _atom(self) -> _LatexPart:
        token = self.next()
        if token is None:
            raise NoFormulaError("it ends where a number or a name must be")
        self._place += 1
        if token.kind == "number":
            return _number(token.text)
        if token.kind == "name":
            if self._take("("):
                return self._call(token.text)
            return _symbol(token.text)
        if token.text == "|":
            inner = self._sum()
            self._require("|")
            return _LatexPart(rf"\left|{inner.latex}\right|", True)
        if token.text in _CLOSING:
            return self._bracket(token.text)
        raise NoFormulaError(f"{token.text!r} is not expected")

    def _bracket(self, opening: str) -> _LatexPart:
        before = self._tokens[self._place - 2].text if self._place > 1 else ""
        latex = self.elements()
        closing = self._require(*_CLOSING[opening])
        if opening == "{":
            if before in ("^", "**"):
                return _LatexPart(latex)
            return _LatexPart(rf"\left\{{{latex}\right\}}", True)
        return _LatexPart(rf"\left{opening}{latex}\right{closing}", True)

    def _call(self, name: str) -> _LatexPart:
        """Parse the arguments of a function, after its opening bracket."""
        arguments = [self._sum().latex]
        while self._take(","):
            arguments.append(self._sum().latex)
        self._require(")")
        if len(name) == 1:
            # A function of any name, or a product: x(x+1).
            return _LatexPart(rf"{name}{_round(', '.join(arguments))}")
        return _called(name, arguments)


def _is_known(name: str) -> bool:
    """Return whether a name is a constant, a variable of one letter, or a known function."""
    letters = name.rstrip("_{}0123456789")
    return len(letters) == 1 or letters in _CONSTANTS or name in _SINGLES or name in _LISTS


def _called(name: str, arguments: list[str]) -> _LatexPart:
    if name in _LISTS:
        return _LatexPart(rf"{_LISTS[name]}{_round(', '.join(arguments))}")
    formats = _PAIRS if len(arguments) == 2 else _SINGLES
    if name not in formats or len(arguments) > 2:
        raise NoFormulaError(f"{name} is no function of {len(arguments)} arguments that is known")
    latex = formats[name]
    for place, argument in enumerate(arguments):
        latex = latex.replace(f"#{place + 1}", argument)
    return _LatexPart(latex, is_atom=name in _ENCLOSED)


def _symbol(name: str) -> _LatexPart:
    if name in _CONSTANTS:
        return _LatexPart(_CONSTANTS[name], True)
    match = _NAME.fullmatch(name)
    assert match is not None
    letters, index = match.groups()
    latex = _CONSTANTS.get(letters, letters)
    if not latex.startswith("\\") and len(letters) > 2:
        raise NoFormulaError(f"{name} is no name that is known")
    if index:
        return _LatexPart(f"{latex}_{{{index}}}", True)
    # Two letters are a product.
    return _LatexPart(latex, latex.startswith("\\") or len(letters) == 1)


def _number(text: str) -> _LatexPart:
    mantissa, exponent_sign, exponent = text.replace(",", "").lower().partition("e")
    mantissa = mantissa.rstrip(".")
    if mantissa.startswith("."):
        mantissa = f"0{mantissa}"
    if not exponent_sign:
        return _LatexPart(mantissa, True)
    if len(exponent) > 5 or abs(int(exponent)) > _LARGEST_EXPONENT:
        raise NoFormulaError(f"{text} has an exponent above {_LARGEST_EXPONENT}")
    return _LatexPart(rf"{mantissa} \cdot 10^{{{int(exponent)}}}")


def _round(latex: str) -> str:
    return rf"\left({latex}\right)"


def _factor(part: _LatexPart) -> str:
    """Return the LaTeX of a part as a factor of a product."""
    if part.is_product and not part.latex.startswith("-"):
        return part.latex
    return part.bracketed()


def _minus(part: _LatexPart) -> str:
    if part.latex.startswith("-"):
        return _round(part.latex)
    return part.latex
