"""The formats of program tests in datasets, and their conversion.

`AssertionTests` are Python, as in MBPP and HumanEval. `FunctionCases` are arguments and results of
a function, and `ProgramCases` are inputs and outputs of a program, as in APPS, CodeContests and
LiveCodeBench.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_INPUTS = ("inputs", "input")
_OUTPUTS = ("outputs", "output")
_NAMES = ("fn_name", "func_name", "entry_point")


class AssertionTests(NamedTuple):
    """Tests in Python, and the function for `check(candidate)`."""

    tests: str
    entry_point: str | None


class FunctionCases(NamedTuple):
    """Cases of a function: its arguments, and the result.

    Attributes:
        may_be_wrapped: whether every result is a list of one element, which may stand for the
            element.
    """

    name: str
    cases: list[tuple[list, Any]]
    may_be_wrapped: bool = False


class ProgramCases(NamedTuple):
    """Cases of a program: its input, and its output."""

    cases: list[tuple[str, str]]


class NoTestsError(ValueError):
    """The value has none of the formats."""


def read_tests(
    value: Any, entry_point: str | None
) -> AssertionTests | FunctionCases | ProgramCases:
    """Return the tests of a row. Raise a NoTestsError if the value has none of the formats."""
    if isinstance(value, str):
        text = value.lstrip()
        if not text.startswith(("{", "[")):
            return AssertionTests(value, entry_point)
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return AssertionTests(text, entry_point)
    if isinstance(value, Mapping):
        return _cases(value, entry_point)
    if isinstance(value, Sequence) and value:
        if all(isinstance(each, str) for each in value):
            return AssertionTests("\n".join(value), entry_point)
        if all(isinstance(each, Mapping) for each in value):
            return _joined(value, entry_point)
    raise NoTestsError(f"the tests are neither Python nor cases ({type(value).__name__})")


def _joined(
    cases: Sequence[Mapping[str, Any]], entry_point: str | None
) -> FunctionCases | ProgramCases:
    """Convert a list of cases, each with an input and an output."""
    merged: dict[str, Any] = {"inputs": [], "outputs": []}
    kinds = set()
    for case in cases:
        kinds.add(str(case.get("testtype", case.get("type", ""))))
        merged["inputs"].append(_one_of(case, _INPUTS))
        merged["outputs"].append(_one_of(case, _OUTPUTS))
        merged |= {name: case[name] for name in _NAMES if case.get(name)}
    is_functional = kinds & {"functional", "function_call"}
    if is_functional and entry_point and not any(name in merged for name in _NAMES):
        merged["fn_name"] = entry_point
    if is_functional and not any(name in merged for name in _NAMES):
        raise NoTestsError("the cases call a function and do not name it. Set `fn_name`")
    return _cases(merged, entry_point)


def _cases(value: Mapping[str, Any], entry_point: str | None) -> FunctionCases | ProgramCases:
    inputs, outputs = _one_of(value, _INPUTS), _one_of(value, _OUTPUTS)
    if not isinstance(inputs, list | tuple) or not isinstance(outputs, list | tuple):
        inputs, outputs = [inputs], [outputs]
    if len(inputs) != len(outputs) or not inputs:
        raise NoTestsError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    name = next((value[each] for each in _NAMES if value.get(each)), None)
    if name is None:
        return ProgramCases([(_text(a), _text(b)) for a, b in zip(inputs, outputs)])
    if not isinstance(name, str):
        raise NoTestsError("`fn_name` is no text")
    cases = [_call(a, b) for a, b in zip(inputs, outputs)]
    if all(isinstance(each, list) and len(each) == 1 for _, each in cases):
        # APPS writes each result as a list of one.
        return FunctionCases(name, cases, True)
    return FunctionCases(name, cases)


def _one_of(value: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in value:
            return value[name]
    raise NoTestsError(f"a case has no `{names[0]}`")


def _text(value: Any) -> str:
    """Return the input or output of a program: a text, or joined lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(map(_text, value))
    return str(value)


def _call(arguments: Any, result: Any) -> tuple[list, Any]:
    """Return a case of a function. In texts, each line is an argument in JSON, as in
    LiveCodeBench."""
    try:
        if isinstance(arguments, str):
            arguments = [json.loads(line) for line in arguments.splitlines() if line.strip()]
            if isinstance(result, str):
                result = json.loads(result)
    except (ValueError, RecursionError) as error:
        raise NoTestsError(f"a case is not JSON ({error})") from None
    if not isinstance(arguments, list | tuple):
        arguments = [arguments]
    return list(arguments), result


def is_same_output(printed: str, expected: str) -> bool:
    """Return whether two outputs are equal, except for white space at line ends and empty lines at
    the end."""
    return _lines(printed) == _lines(expected)


def _lines(text: str) -> list[str]:
    # Not `splitlines`, which also splits at characters that are no ends of lines to a reader.
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and not lines[-1]:
        lines.pop()
    return lines
