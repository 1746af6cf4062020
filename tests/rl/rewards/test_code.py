"""Programs that a model wrote are run with limits."""

import math
import os
import time

import pytest

from maxtrain.rl.rewards.code import program_of
from maxtrain.rl.rewards.registry import RewardSet
from maxtrain.rl.rewards.sandbox import FAILED, PASSED, TIMEOUT, run_program
from maxtrain.rl.rewards.workers import RewardWorkers
from tests.rl.rewards.test_workers import assert_gone

MEMORY = 1 << 29


def outcome(code, tests="pass", seconds=20.0):
    return run_program(code, tests, seconds, MEMORY).outcome


def test_the_last_block_is_the_program():
    text = "First\n```python\na = 1\n```\nbetter:\n```py\na = 2\nb = 3\n```\n"
    assert program_of(text) == "a = 2\nb = 3"
    assert program_of("```\nx\n```") == "x"
    assert program_of("a = 1") is None


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("def add(a, b):\n    return a + b", "assert add(1, 2) == 3", PASSED),
        ("def add(a, b):\n    return a - b", "assert add(1, 2) == 3", FAILED),
        ("def add(:", "assert add(1, 2) == 3", FAILED),
        # Ends before the tests with a status that says that all is well.
        ("raise SystemExit(0)", "assert False", FAILED),
        ("import os; os._exit(0)", "assert False", FAILED),
        ("bytearray(1 << 33)", "pass", FAILED),
        ("open('large', 'wb').write(bytes(1 << 25))", "pass", FAILED),
        ("import os; assert os.listdir('.') == [] and 'PYTHONPATH' not in os.environ", "", PASSED),
    ],
)
def test_how_a_program_ends(code, tests, expected):
    assert outcome(code, tests) == expected


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(600)", "9**9**9"])
def test_a_program_that_does_not_end_is_ended(code):
    began = time.monotonic()
    assert outcome(code, seconds=0.5) == TIMEOUT
    assert time.monotonic() - began < 2.5


def test_what_is_printed_is_kept_and_no_more_than_its_end():
    ran = run_program("print('x' * 100_000)\nprint('end')", "pass", 20.0, MEMORY)
    assert ran.outcome == PASSED
    assert ran.output.endswith("x\nend\n") and len(ran.output) < 5000


def test_it_has_no_network_where_users_may_have_namespaces():
    code = "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n"
    code += "socket.create_connection(s.getsockname())"
    ran = run_program(code, "pass", 20.0, MEMORY)
    assert ran.outcome == (FAILED if ran.isolated else PASSED)


def test_processes_that_it_starts_end_with_it(tmp_path):
    """Those in sessions of their own, too, where users may have namespaces."""
    file = tmp_path / "mark"
    code = f"""
import os, time
if os.fork() == 0:
    os.setsid()
    time.sleep(0.6)
    open({str(file)!r}, "w")
    os._exit(0)
"""
    ran = run_program(code, "pass", 20.0, MEMORY)
    time.sleep(1.2)
    assert ran.outcome == PASSED
    assert file.exists() is not ran.isolated


def test_programs_are_rewards_where_a_config_names_them():
    columns = {"tests": ["assert f(2) == 4"] * 4 + [None]}
    completions = [
        "```python\ndef f(x):\n    return x * x\n```",
        "```python\ndef f(x):\n    return x\n```",
        "no program",
        "```python\nwhile True: pass\n```",
        "```python\n```",
    ]
    with RewardWorkers(2) as pool:
        rewards = RewardSet(["code"], options={"code": {"seconds": 0.5}}, pool=pool)
        scores = rewards([""] * 5, completions, [[1]] * 5, columns)
        pids = pool.pids
    assert scores.values[0, :4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert math.isnan(scores.values[0, 4])
    assert scores.outcomes["code"] == {"ok": 2, "failed": 1, "no_program": 1, "timeout": 1}
    assert_gone(pids)
    assert os.getpid() not in pids
