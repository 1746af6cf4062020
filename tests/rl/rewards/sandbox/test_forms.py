"""The forms in which datasets write tests."""

import json

import pytest

from maxtrain.rl.rewards.sandbox.forms import (
    AssertionTests,
    FunctionCases,
    NoTestsError,
    ProgramCases,
    is_same_output,
    read_tests,
)

CASES = {"input": ["1\n", "2\n"], "output": ["a", "b"]}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("assert f()", AssertionTests("assert f()", "f")),
        (["assert f()", "assert g()"], AssertionTests("assert f()\nassert g()", "f")),
        ("[1, 2] == f()", AssertionTests("[1, 2] == f()", "f")),
        (CASES, ProgramCases([("1\n", "a"), ("2\n", "b")])),
        (json.dumps(CASES), ProgramCases([("1\n", "a"), ("2\n", "b")])),
        ({"inputs": [["1", "2"]], "outputs": [["3"]]}, ProgramCases([("1\n2", "3")])),
        (
            [{"input": "1\n", "output": "a", "type": "stdin_stdout"}],
            ProgramCases([("1\n", "a")]),
        ),
        ({"fn_name": "g", "inputs": [[1, 2]], "outputs": [3]}, FunctionCases("g", [([1, 2], 3)])),
        (
            {"fn_name": "g", "inputs": [[1, 2]], "outputs": [[3]]},
            FunctionCases("g", [([1, 2], [3])], True),
        ),
        (
            [{"input": "[1]\n2", "output": "3", "testtype": "functional"}],
            FunctionCases("f", [([[1], 2], 3)]),
        ),
    ],
)
def test_forms(value, expected):
    assert read_tests(value, "f") == expected


@pytest.mark.parametrize(
    "value",
    [
        5,
        [],
        {},
        [5],
        {"inputs": ["1"]},
        {"inputs": ["1"], "outputs": []},
        {"inputs": [], "outputs": []},
        {"fn_name": 5, "inputs": [[1]], "outputs": [1]},
        [{"input": "x", "output": "3", "testtype": "functional"}],
    ],
)
def test_what_is_in_no_form(value):
    with pytest.raises(NoTestsError):
        read_tests(value, None)


def test_outputs_differ_in_white_space_at_ends_of_lines_alone():
    assert is_same_output("1 2 \r\n3\n\n\n", "1 2\n3")
    assert not is_same_output("1  2", "1 2")
    assert not is_same_output(" 1", "1")
    assert not is_same_output("1\n\n2", "1\n2")
    assert not is_same_output("", "0")
