"""Functions of users: what they are given, what is refused before a run, and what their failures
become."""

from pathlib import Path

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.rl.rewards.registry import RewardSet, failures, require_rewards
from maxtrain.rl.rewards.workers import RewardWorkers
from tests.rl.rewards import functions

HERE = "tests.rl.rewards.functions"
CONVERSATION = [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.fixture(scope="module")
def pool():
    with RewardWorkers(2, seconds=1.0, memory_bytes=2 << 30) as pool:
        yield pool


def scores_of(pool, name, prompts=("p", "p"), texts=("ab", "abc"), columns=None, **options):
    rewards = RewardSet([f"{HERE}:{name}"], options={f"{HERE}:{name}": options}, pool=pool)
    ids = [[1]] * len(texts)
    return rewards(list(prompts), list(texts), ids, columns or {})


def test_a_function_for_trl_works_as_it_is(pool):
    columns = {"answer": ["2", "2"]}
    found = scores_of(pool, "as_trl_has_it", [CONVERSATION] * 2, ["2", "3"], columns)
    assert found.values.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize(
    ("name", "expected"),
    [("without_others", [2, 3]), ("keyword_only", [1, 2]), ("asynchronous", [2, 3])],
)
def test_a_function_gets_what_it_has_parameters_for(pool, name, expected):
    columns = {"answer": ["2", "2"]}
    assert scores_of(pool, name, columns=columns).values.tolist() == [expected]


def test_what_a_function_requires_is_checked_before_a_run(pool):
    def check(name, columns):
        RewardSet([f"{HERE}:{name}"], pool=pool).check(columns)

    check("requires", ["answer", "nowhere"])
    check("requires", None)
    check("as_trl_has_it", ["answer"])
    with pytest.raises(ConfigError, match=r"'nowhere'.*which has answer, source"):
        check("requires", ["source", "answer"])
    with pytest.raises(ConfigError, match=r"'nowhere'.*which has none"):
        check("requires", [])
    with pytest.raises(ConfigError, match="'trainer_state'"):
        check("requires_a_trainer", ["answer"])
    with pytest.raises(ConfigError, match="Remove the `/`"):
        check("positional", ["answer"])


@pytest.mark.parametrize(
    ("name", "outcome"),
    [
        ("always_raises", "error"),
        ("always_nan", "invalid"),
        ("always_none", "ok"),
        ("always_dies", "crash"),
        ("always_takes_all_memory", "crash"),
        pytest.param("always_hangs", "timeout", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("on_failure", [None, 0.0])
def test_a_reward_that_never_applies_is_an_error(pool, name, outcome, on_failure):
    found = scores_of(pool, name, on_failure=on_failure)
    assert found.outcomes == {f"{HERE}:{name}": {outcome: 2}}
    with pytest.raises(DataError, match=f"{name} .2 {outcome}."):
        require_rewards(found, "completions")
    assert failures(found) == ({} if outcome == "ok" else {f"{HERE}:{name}": 2})


def test_the_cause_names_the_line_of_the_users_file(pool):
    lines = Path(functions.__file__).read_text().splitlines()
    found = scores_of(pool, "always_raises")
    (cause,) = found.details.values()
    line = 1 + next(i for i, each in enumerate(lines) if "no such judge" in each)
    assert "RuntimeError: no such judge" in cause
    assert f"functions.py, line {line})" in cause


def test_some_failures_are_counted_and_are_no_error(pool):
    found = scores_of(pool, "fails_for_some")
    assert failures(found) == {f"{HERE}:fails_for_some": 1}
    assert np.isnan(found.values).tolist() == [[False, True]]
    require_rewards(found, "completions")
    # Another reward applies.
    both = RewardSet(
        [f"{HERE}:always_raises", "length"], options={"length": {"max_tokens": 4}}, pool=pool
    )
    found = both(["p"], ["a"], [[1]], {})
    require_rewards(found, "completions")
    assert failures(found) == {f"{HERE}:always_raises": 1}


def test_nothing_to_reward_is_no_error(pool):
    found = scores_of(pool, "always_raises", [], [])
    require_rewards(found, "completions")
    assert failures(found) == {}
