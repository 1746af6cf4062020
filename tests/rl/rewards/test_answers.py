"""Extraction of answers, and reading of numbers."""

from fractions import Fraction

import hypothesis
import hypothesis.strategies as st
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.answers import extract
from maxtrain.rl.rewards.letters import plain
from maxtrain.rl.rewards.numerals import Numeral, read_number, same_number


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<reasoning>48/2=24</reasoning><answer>72</answer>", "72"),
        ("<answer>1</answer> no: <answer>\n 2 \n</answer> and 3", "2"),
        (r"<answer>so $\boxed{\frac{1}{2}}$</answer>", r"\frac{1}{2}"),
        ("<answer>1</answer><answer>2", "1"),
        ("<answer>7", "7"),
        (r"first \boxed{1}, then \boxed{\frac{3}{4}}.", r"\frac{3}{4}"),
        (r"\boxed{1} and \boxed{2", "1"),
        (r"\boxed{\{1, 2\}}", r"\{1, 2\}"),
        (r"\fbox{9}", "9"),
        ("48/2 = 24\n#### 1,000\nindeed", "1,000"),
        ("The answer is 72.", "72"),
        ("It costs $1,234.50, not 3-5", "5"),
        ("from 3 to -5", "-5"),
        ("a half, 1/2", "1/2"),
        ("at 50%", "50%"),
        ("nothing", None),
        ("", None),
    ],
)
def test_the_answer_is_found(text, answer):
    assert extract(text) == answer


def test_the_policy_says_where():
    text = r"<answer>1</answer> \boxed{2} 3"
    assert [extract(text, [name]) for name in ("answer", "boxed", "hash", "number")] == [
        "1",
        "2",
        None,
        "3",
    ]
    assert extract(text, ["hash", "boxed"]) == "2"
    assert extract(" all of it ", ["all"]) == "all of it"
    with pytest.raises(ConfigError, match="Name some of answer, boxed, hash, number, all"):
        extract(text, ["last"])


def test_many_boxes_that_do_not_close_take_no_time():
    assert extract(r"\boxed{" * 100_000, ["boxed"]) is None


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("72", 72),
        ("72.0", 72),
        ("72.", 72),
        ("+72", 72),
        (".5", Fraction(1, 2)),
        ("1,000", 1000),
        ("1,234,567.5", Fraction(2469135, 2)),
        ("-5", -5),
        ("\u22125", -5),
        ("$ -5", -5),
        ("-$5", -5),
        (r"\$5", 5),
        ("$5$", 5),
        (r"\(5\)", 5),
        ("50%", 50),
        (r"50\%", 50),
        ("3/4", Fraction(3, 4)),
        (r"\frac{3}{4}", Fraction(3, 4)),
        (r"-\dfrac{3}{4}", Fraction(-3, 4)),
        ("1 1/2", Fraction(3, 2)),
        (r"-1\frac{1}{2}", Fraction(-3, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
        ("\uff11\uff12", 12),
        ("\u0663", 3),
        ("\u00bd", Fraction(1, 2)),
        ("1\u00bd", Fraction(3, 2)),
        ("3\u20444", Fraction(3, 4)),
        ("12 cm\u00b2", 12),
        ("12 km", 12),
        ("12km", 12),
        ("12 km/h", 12),
        (r"12\text{ cm}^2", 12),
        (r"90^\circ", 90),
        ("72 clips.", 72),
        ("5 million dollars", 5_000_000),
    ],
)
def test_a_number_is_read_exactly(text, value):
    found = read_number(text)
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x",
        "5x",
        "5m",
        "2pi",
        "5 and a half",
        "3 or 4",
        "3, 4",
        "1,00",
        "1/0",
        "1..2",
        "x=5",
        "1e999999999",
        "5 times",
        "5 x",
        "5\u00b2",
        "2\u00b9\u2070",
        "9" * 400,
        r"\frac{1}{0}",
        r"\frac{x}{2}",
        "--5",
    ],
)
def test_what_is_not_surely_a_number_is_none(text):
    assert read_number(text) is None


def test_powers_and_fractions_of_unicode_keep_their_meaning():
    assert plain("x\u00b2 + 2\u00b9\u2070 \u2212 1\u00bd") == "x^{2} + 2^{10} - 1 1/2"
    assert plain("\uff15\uff0e") == "5."
    assert plain(r"\frac{1}{2}^{3}") == r"\frac{1}{2}^{3}"


@hypothesis.given(st.text("0123456789.,$%/\\{}()[] -+eE<>answerboxd#frac\n", max_size=40))
def test_any_text_can_be_read(text):
    found = read_number(text)
    assert found is None or isinstance(found, Numeral)
    assert extract(text) is None or isinstance(extract(text), str)


@hypothesis.given(st.fractions(max_denominator=1000))
def test_a_fraction_is_itself(value):
    found = read_number(f"{value.numerator}/{value.denominator}")
    assert found is not None and found.value == value


@pytest.mark.parametrize(
    ("gold", "answer", "same"),
    [
        ("50%", "0.5", False),
        ("50", "0.5", False),
        ("0.5", "50%", False),
        ("50", "50%", True),
        ("5 cm", "5 m", False),
        ("5 cents", "$5", False),
        ("5 meters", "5 m", True),
        ("$5", "5 dollars", True),
        ("5", "5 m", True),
        ("5 apples", "5 pears", True),
    ],
)
def test_a_factor_of_a_hundred_is_not_accepted(gold, answer, same):
    numbers = [read_number(text) for text in (gold, answer)]
    assert None not in numbers
    assert same_number(*numbers) is same
