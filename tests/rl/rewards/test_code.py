"""The reward `code`: programs that a model wrote pass tests, or do not."""

import math
import os

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards import code
from maxtrain.rl.rewards.code import program_of
from maxtrain.rl.rewards.registry import RewardSet
from maxtrain.rl.rewards.sandbox import confinement
from maxtrain.rl.rewards.sandbox.probe import ConfinementSupport
from maxtrain.rl.rewards.workers import RewardWorkers
from tests.rl.rewards.test_workers import assert_gone

NOWHERE = "tests.rl.rewards.test_code:nowhere"


def nowhere():
    """Return, in a worker, the support of a machine that cannot confine programs."""
    return list(ConfinementSupport("", "there is no Landlock"))


def test_the_last_block_is_the_program():
    text = "First\n```python\na = 1\n```\nbetter:\n```py\na = 2\nb = 3\n```\n"
    assert program_of(text) == "a = 2\nb = 3"
    assert program_of("```\nx\n```") == "x"
    assert program_of("a = 1") is None


@pytest.mark.every_dose
@pytest.mark.long
def test_programs_are_rewards_where_a_config_names_them():
    columns = {"tests": ["assert f(2) == 4"] * 4 + [None, "assert eval(f(2)) == 4"]}
    completions = [
        "```python\ndef f(x):\n    return x * x\n```",
        "```python\ndef f(x):\n    return x\n```",
        "no program",
        "```python\nwhile True: pass\n```",
        "```python\n```",
        "no program",
    ]
    with RewardWorkers(2) as pool:
        rewards = RewardSet(["code"], options={"code": {"seconds": 0.5}}, pool=pool)
        scores = rewards([""] * 6, completions, [[1]] * 6, columns)
        pids = pool.pids
    assert scores.values[0, :4].tolist() == [1.0, 0.0, 0.0, 0.0]
    assert math.isnan(scores.values[0, 4]) and math.isnan(scores.values[0, 5])
    outcomes = {"ok": 2, "failed": 1, "no_program": 1, "timeout": 1, "unsupported_tests": 1}
    assert scores.outcomes["code"] == outcomes
    assert scores.right[:4].tolist() == [1, 0, 0, 0] and math.isnan(scores.right[5])
    assert_gone(pids)
    assert os.getpid() not in pids


def test_it_says_how_programs_are_confined_once_and_before_the_run(capsys):
    with RewardWorkers(1) as pool:
        rewards = RewardSet(["code"], pool=pool)
        rewards.check()
        rewards.check()
    lines = [line for line in capsys.readouterr().err.splitlines() if "reward code" in line]
    assert len(lines) == 1 and "seccomp" in lines[0]


def test_a_machine_that_cannot_confine_programs_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(code, "FIND", NOWHERE)
    with RewardWorkers(1) as pool:
        for call in (RewardSet.check, lambda each: each([""], ["x"], [[1]], {"tests": ["pass"]})):
            with pytest.raises(ConfigError, match=r"no Landlock.*unsafe=True"):
                call(RewardSet(["code"], pool=pool))
        rewards = RewardSet(["code"], options={"code": {"unsafe": True}}, pool=pool)
        rewards.check()
        columns = {"tests": ["assert f(1) == 2"] * 2}
        completions = [f"```python\ndef f(x): return {value}\n```" for value in (2, 3)]
        scores = rewards([""] * 2, completions, [[1]] * 2, columns)
    assert "WITHOUT" in capsys.readouterr().err
    assert scores.values.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    "options", [{"seconds": 0.0}, {"memory_bytes": -1}, {"seconds": float("nan")}, {"columns": "x"}]
)
def test_options_that_make_no_sense(options):
    with RewardWorkers(1) as pool, pytest.raises(ConfigError):
        RewardSet(["code"], options={"code": options}, pool=pool)


def test_the_column_entry_point_names_the_function_of_a_check():
    tests = ["def check(candidate):\n    assert candidate(2) == 4\n"] * 2
    completions = [f"```python\ndef g(x): return x\ndef f(x): return {v}\n```" for v in (4, 5)]
    with RewardWorkers(1) as pool:
        rewards = RewardSet(["code"], pool=pool)
        columns = {"tests": tests, "entry_point": ["f", "f"]}
        scores = rewards([""] * 2, completions, [[1]] * 2, columns)
    assert scores.values.tolist() == [[1.0, 0.0]]
    assert confinement.NOTHING not in rewards.rewards[0].score._kind
