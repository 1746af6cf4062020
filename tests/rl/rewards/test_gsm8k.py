"""Thirty completions and what both profiles give for them, written out: correctness, integer,
strict format, soft format, tags."""

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from data_pipeline.sources.chat_map import map_messages, read_map
from maxtrain.rl.rewards.gsm8k import correctness, gold_of
from maxtrain.rl.rewards.registry import RewardSet


def wrap(reasoning: str, answer: str) -> str:
    return f"<reasoning>\n{reasoning}\n</reasoning>\n<answer>\n{answer}\n</answer>\n"


PLAIN = wrap("48/2=24", "72")
# A name, the completion, the gold, and the rewards of unsloth_compat and of gsm8k.
TABLE = [
    ("as the notebook wants it", PLAIN, "72", (2, 0.5, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    (
        "reasoning of two lines",
        wrap("48/2=24\n48+24=72", "72"),
        "72",
        (2, 0.5, 0, 0, 0.5),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    (
        "no newline at the end",
        PLAIN[:-1],
        "72",
        (2, 0.5, 0, 0, 0.447),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    (
        "two newlines at the end",
        PLAIN + "\n",
        "72",
        (2, 0.5, 0.5, 0, 0.498),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    (
        "all in one line",
        "<reasoning>48/2=24</reasoning><answer>72</answer>",
        "72",
        (2, 0.5, 0, 0.5, 0),
        (2, 0.5, 0, 0.5, 0.5),
    ),
    (
        "one line, a space between",
        "<reasoning>48/2=24</reasoning> <answer>72</answer>",
        "72",
        (2, 0.5, 0, 0.5, 0),
        (2, 0.5, 0, 0.5, 0.5),
    ),
    ("wrong", wrap("x", "71"), "72", (0, 0.5, 0.5, 0, 0.5), (0, 0.5, 0.5, 0.5, 0.5)),
    ("decimal", wrap("x", "72.0"), "72", (0, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    ("fraction", wrap("x", "72.5"), "72", (0, 0, 0.5, 0, 0.5), (0, 0, 0.5, 0.5, 0.5)),
    ("unit", wrap("x", "72 clips"), "72", (0, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    ("dollars", wrap("x", "$72"), "72", (0, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    (
        "comma in the answer",
        wrap("x", "1,000"),
        "1000",
        (0, 0, 0.5, 0, 0.5),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    (
        "comma in the gold",
        wrap("x", "1000"),
        "1,000",
        (0, 0.5, 0.5, 0, 0.5),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    (
        "comma in both",
        wrap("x", "1,000"),
        "1,000",
        (2, 0, 0.5, 0, 0.5),
        (2, 0.5, 0.5, 0.5, 0.5),
    ),
    ("negative", wrap("x", "-5"), "-5", (2, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    ("another minus", wrap("x", "\u22125"), "-5", (0, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    ("a hundredth", wrap("x", "0.5"), "50", (0, 0, 0.5, 0, 0.5), (0, 0, 0.5, 0.5, 0.5)),
    ("percent", wrap("x", "50%"), "50", (0, 0, 0.5, 0, 0.5), (2, 0.5, 0.5, 0.5, 0.5)),
    ("the number alone", "72", "72", (2, 0.5, 0, 0, 0), (0, 0, 0, 0, 0)),
    ("a sentence", "The answer is 72.", "72", (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    ("nothing", "", "72", (0, 0, 0, 0, 0), (0, 0, 0, 0, 0)),
    (
        "text after the answer",
        PLAIN + "I hope this helps.",
        "72",
        (2, 0.5, 0, 0, 0.464),
        (2, 0.5, 0, 0.5, 0.482),
    ),
    (
        "text after the answer, in its line",
        PLAIN[:-1] + " I hope this helps.",
        "72",
        (2, 0.5, 0, 0, 0.409),
        (2, 0.5, 0, 0.5, 0.482),
    ),
    ("text before", "Sure!\n" + PLAIN, "72", (2, 0.5, 0, 0, 0.5), (2, 0.5, 0, 0, 0.5)),
    (
        "two answers",
        wrap("48/2=24", "24") + "<answer>\n72\n</answer>\n",
        "72",
        (2, 0.5, 0, 0, 0.25),
        (2, 0.5, 0, 0.5, 0.25),
    ),
    (
        "the answer first",
        "<answer>\n72\n</answer>\n<reasoning>\n48/2=24\n</reasoning>\n",
        "72",
        (2, 0.5, 0, 0, 0.342),
        (2, 0.5, 0, 0, 0.218),
    ),
    (
        "not closed",
        "<reasoning>\n48/2=24\n</reasoning>\n<answer>\n72",
        "72",
        (2, 0.5, 0, 0, 0.331),
        (0, 0, 0, 0, 0.375),
    ),
    (
        "no reasoning",
        "<answer>\n72\n</answer>\n",
        "72",
        (2, 0.5, 0, 0, 0.125),
        (2, 0.5, 0, 0, 0.25),
    ),
    ("an empty answer", wrap("x", ""), "72", (0, 0, 0.5, 0, 0.5), (0, 0, 0.5, 0.5, 0.5)),
    ("words", wrap("x", "seventy-two"), "72", (0, 0, 0.5, 0, 0.5), (0, 0, 0.5, 0.5, 0.5)),
]
NAMES, COMPLETIONS, GOLDS, COMPAT, MENDED = zip(*TABLE)


@pytest.mark.parametrize(("profile", "expected"), [("unsloth_compat", COMPAT), ("gsm8k", MENDED)])
def test_every_reward_of_every_completion(profile, expected):
    assert len(TABLE) == 30
    rows = len(TABLE)
    columns = {"answer": [f"Half of 48 is <<48/2=24>>24.\n#### {gold}" for gold in GOLDS]}
    scores = RewardSet([profile])([""] * rows, list(COMPLETIONS), [[1]] * rows, columns)
    assert len(scores.names) == 5 and all(name.startswith(profile + ".") for name in scores.names)
    for name, got, wanted in zip(NAMES, scores.values.T, expected):
        np.testing.assert_allclose(got, wanted, atol=1e-12, err_msg=name)


def test_the_gold_follows_the_hashes():
    assert gold_of("two lines\n#### 1,000") == "1,000"
    assert gold_of(" 72 ") == "72"


def test_a_row_without_a_number_as_gold_does_not_apply():
    found = correctness([""] * 2, [PLAIN, PLAIN], [[1]] * 2, answer=["#### 72", "none"])
    assert found == [2.0, None]


def test_the_column_is_asked_for():
    with pytest.raises(ConfigError, match=r"needs the column 'answer'.*Add it to the dataset"):
        RewardSet(["gsm8k.correctness"])([""], [PLAIN], [[1]], {"gold": ["72"]})


def test_answers_that_the_map_of_the_dataset_makes_have_all_rewards():
    record = {
        "question": "How many?",
        "answer": "He has 48/2 = <<48/2=24>>24.\nThey cost 1,000.\n#### 1,000",
    }
    *_, answer = map_messages(read_map(["gsm8k"]), record)
    columns = {"answer": [record["answer"]]}
    scores = RewardSet(["gsm8k"])(["How many?"], [answer["content"]], [[1]], columns)
    assert scores.values[:, 0].tolist() == [2.0, 0.5, 0.5, 0.5, 0.5]
