"""Rewards by name and by dotted path, and what they may return."""

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError, DataError
from maxtrain.rl.rewards import registry
from maxtrain.rl.rewards.exact import exact
from maxtrain.rl.rewards.length import length, overlong
from maxtrain.rl.rewards.registry import RewardSet, names_of_ours
from maxtrain.rl.rewards.workers import RewardWorkers

HERE = "tests.rl.rewards.functions"
MOST = {"length": {"max_tokens": 4}}


@pytest.fixture(scope="module")
def pool():
    with RewardWorkers(2, seconds=0.3, memory_bytes=1 << 30) as pool:
        yield pool


def score(names, completions, pool=None, **given):
    """The values of rewards, as lists, and the scores."""
    columns = given.pop("columns", {})
    rewards = RewardSet(names, pool=pool, **given)
    ids = [[1] * len(text) for text in completions]
    scores = rewards([""] * len(completions), completions, ids, columns)
    values = [[None if np.isnan(v) else v for v in row] for row in scores.values.tolist()]
    return values, scores


def test_exact_compares_normalised_texts():
    golds = ["new  york", "A", "\uff21", None, "5", "52"]
    texts = ["new york\n", "a", "A", "x", "5.0", "5\u00b2"]
    found = exact("gold")([""] * 6, texts, [[]] * 6, gold=golds)
    assert found == [1.0, 0.0, 1.0, None, 0.0, 0.0]
    found = exact("gold", reward=2.0, ignore_case=True)([""] * 6, texts, [[]] * 6, gold=golds)
    assert found == [2.0, 2.0, 2.0, None, 0.0, 0.0]
    tagged = exact("gold", policy=["answer"])
    assert tagged([""] * 2, ["<answer>A</answer>", "A"], [[]] * 2, gold=["A", "A"]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (500, -1)]
)
def test_overlong_grows_within_its_cache(tokens, penalty):
    assert overlong(100, 20)([""], [""], [[1] * tokens]) == [penalty]


def test_length_is_a_part_of_the_most():
    assert length(10)([""] * 3, [""] * 3, [[], [1] * 5, [1] * 20]) == [0.0, -0.5, -1.0]


def test_a_pattern_matches_the_whole_the_beginning_or_anywhere(pool):
    texts = ["<a>1\n2</a>", "<a>1</a> more", "first <a>1</a>", "none"]
    for where, expected in (
        ("whole", [1, 0, 0, 0]),
        ("begin", [1, 1, 0, 0]),
        ("anywhere", [1, 1, 1, 0]),
    ):
        options = {"pattern": {"regex": r"<a>[^<]*</a>", "where": where}}
        values, _ = score(["pattern"], texts, pool, options=options)
        assert values == [expected]


def test_a_pattern_that_takes_for_ever_costs_its_own_rows(pool):
    texts = ["aaa", "a" * 60 + "b", "aa"]
    values, scores = score(["pattern"], texts, pool, options={"pattern": {"regex": "(a+)+"}})
    assert values == [[1.0, 0.0, 1.0]]
    assert scores.outcomes == {"pattern": {"ok": 2, "timeout": 1}}


@pytest.mark.parametrize("path", [f"{HERE}:brevity", f"{HERE}.brevity"])
def test_a_reward_of_a_user_has_either_form_of_path(pool, path):
    values, scores = score([path], ["ab", "abcd"], pool)
    assert values == [[-0.02, -0.04]]
    assert scores.names == (path,)


def test_an_array_may_be_returned(pool):
    assert score([f"{HERE}:as_array"], ["ab", "abcd"], pool)[0] == [[2.0, 4.0]]


def test_a_row_that_fails_costs_itself_alone_and_is_counted(pool):
    texts = ["fine", "hang", "none", "die", "raise", "nan", "infinite", "memory", "fine"]
    values, scores = score([f"{HERE}:as_told"], texts, pool)
    assert values == [[1.0, None, None, None, None, None, None, None, 1.0]]
    (counted,) = scores.outcomes.values()
    assert counted == {"ok": 3, "timeout": 1, "crash": 2, "error": 1, "invalid": 2}
    assert "took over" in scores.details[f"{HERE}:as_told"]
    options = {f"{HERE}:as_told": {"on_failure": -1.0}}
    values, _ = score([f"{HERE}:as_told"], ["hang", "none", "nan"], pool, options=options)
    assert values == [[-1.0, None, None]]


def test_a_reward_may_see_the_rows_of_its_group(pool):
    path = f"{HERE}:best_of_group"
    texts = ["a", "abc", "ab", "a"]
    given = {"columns": {"answer": ["x"] * 4}, "num_generations": 2}
    assert score([path], texts, pool, **given)[0] == [[1, 1, 1, 1]]
    given["options"] = {path: {"by": "group"}}
    assert score([path], texts, pool, **given)[0] == [[0, 1, 1, 0]]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("too_few", r"returned 0 values for 1 completions.*a number or None for each"),
        ("a_word", r"returned 'good' \(str\) as a value.*a number or None for each"),
        ("no_list", r"returned 1.0 \(float\), which is no list.*a number or None for each"),
    ],
)
def test_a_reward_that_returns_something_else_is_told_so(pool, function, said):
    with pytest.raises(DataError, match=said):
        score([f"{HERE}:{function}"], ["a", "b"], pool)


def test_a_path_is_checked_before_a_run(pool):
    RewardSet([f"{HERE}:brevity"], pool=pool).check()
    for path, said in (
        (f"{HERE}:no_such", "has no function no_such. Check its name"),
        ("no_such_module:f", "there is no module no_such_module.*PYTHONPATH"),
    ):
        with pytest.raises(ConfigError, match=said):
            RewardSet([path], pool=pool).check()


def test_weights_of_a_profile_are_those_of_its_rewards():
    rewards = RewardSet(
        ["gsm8k", "length"], weights=[2, 0.5], options={"length": {"max_tokens": 4}}
    )
    assert [reward.weight for reward in rewards.rewards] == [2.0] * 5 + [0.5]
    assert [reward.name for reward in rewards.rewards][-1] == "length"


def test_numbers_are_judged_without_a_pool():
    columns = {"answer": ["#### 72", "#### 72", r"\sqrt{2}", None]}
    texts = [r"\boxed{72.0}", "<answer>7</answer>", r"\boxed{2^{1/2}}", "1"]
    values, scores = score(["math"], texts, columns=columns)
    assert values == [[1.0, 0.0, None, None]]
    assert scores.outcomes["math"] == {"correct": 1, "wrong": 1, "skipped": 1, "ok": 1}
    options = {"math": {"rewards": {"wrong": -1.0, "skipped": 0.5}}}
    assert score(["math"], texts, columns=columns, options=options)[0] == [[1.0, -1.0, 0.5, None]]


def test_right_is_what_every_reward_that_verifies_and_applies_says(pool):
    columns = {"answer": ["#### 72", "#### 72", r"\sqrt{2}", None, "72"]}
    texts = [r"\boxed{72.0}", "<answer>7</answer>", r"\boxed{2^{1/2}}", "1", "72"]
    # `math` says so by its outcome, whatever that is worth; it can't judge the third.
    options = {"math": {"rewards": {"wrong": 0.5}}}
    _, scores = score(["math", "length"], texts, columns=columns, options=options | MOST)
    np.testing.assert_array_equal(scores.right, [1.0, 0.0, np.nan, np.nan, 1.0])
    _, scores = score(["math", "exact"], texts, columns=columns)
    np.testing.assert_array_equal(scores.right, [0.0, 0.0, 0.0, np.nan, 1.0])
    assert np.isnan(score(["length"], texts, options=MOST)[1].right).all()
    path = f"{HERE}:as_told"
    told = ["none", "1", "raise"]
    _, scores = score([path], told, pool=pool, options={path: {"verifies": True}})
    np.testing.assert_array_equal(scores.right, [np.nan, 1.0, np.nan])
    # Whatever a call that failed is worth, it says nothing of the answer.
    options = {path: {"verifies": True, "on_failure": -1.0}}
    _, scores = score([path], told, pool=pool, options=options)
    assert scores.values[0, 2] == -1.0
    np.testing.assert_array_equal(scores.right, [np.nan, 1.0, np.nan])


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"names": []}, "Name one, such as gsm8k"),
        ({"names": ["gsm9k"]}, "Name one of gsm8k, .*, or a function of yours"),
        ({"names": ["gsm8k.correct"]}, "Name one of gsm8k"),
        ({"names": ["gsm8k", "gsm8k.tags"]}, "gsm8k.tags is named twice. Name it once"),
        ({"names": ["gsm8k"], "weights": [1.0, 2.0]}, "Set as many, or none"),
        ({"names": ["gsm8k"], "options": {"exact": {}}}, "Name it there, or remove its options"),
        ({"names": ["gsm8k"], "options": {"gsm8k": {"a": 1}}}, "has no options. Remove a"),
        (
            {"names": ["exact"], "options": {"exact": {"col": "a"}}},
            "Its options are column, reward",
        ),
        ({"names": ["length"]}, "missing a required argument.*Its options are max_tokens"),
        (
            {"names": ["length"], "options": {"length": {"max_tokens": 0}}},
            "Set it to max_completion",
        ),
        (
            {"names": ["overlong"], "options": {"overlong": {"max_tokens": 9, "cache_tokens": 9}}},
            "Set it to a fifth",
        ),
        ({"names": ["code"]}, r"Give RewardSet\(..., pool=RewardWorkers\(\)\)"),
        ({"names": ["my.reward"]}, r"Give RewardSet\(..., pool=RewardWorkers\(\)\)"),
        (
            {"names": ["math"], "options": {"math": {"rewards": {"right": 1}}}},
            "Name some of correct",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(given, advice):
    with pytest.raises(ConfigError, match=advice):
        RewardSet(**given)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"pattern": {"regex": "("}}, "Correct it; `re` of Python"),
        ({"pattern": {"regex": "a", "where": "end"}}, "Set it to whole, begin, anywhere"),
        ({f"{HERE}:brevity": {"by": "batch"}}, "Set it to item or group"),
    ],
)
def test_options_of_what_runs_in_the_pool_are_checked(pool, options, advice):
    with pytest.raises(ConfigError, match=advice):
        RewardSet(list(options), options=options, pool=pool)


@pytest.mark.parametrize(
    ("columns", "advice"),
    [
        ({"answer": ["1"]}, "Repeat those of a prompt"),
        ({"prompts": ["1", "2"]}, "Rename the column"),
    ],
)
def test_columns_have_an_entry_for_each_row(columns, advice):
    with pytest.raises(ConfigError, match=advice):
        RewardSet(["gsm8k.tags"])([""] * 2, ["a", "b"], [[1], [1]], columns)


def test_code_runs_only_where_it_is_named():
    assert "code" in names_of_ours()
    assert all("code" not in parts for parts in registry.PROFILES.values())
