"""Is this answer that one: exactly in this process, by mathematics in killable ones."""

import math
import time

import pytest

from data_pipeline.errors import ConfigError, UsageError
from maxtrain.rl.rewards import verify, workers
from maxtrain.rl.rewards.guards import has_words, refusal
from maxtrain.rl.rewards.verify import (
    CHECK,
    CORRECT,
    CRASH,
    OUTCOMES,
    SKIPPED,
    TIMEOUT,
    UNPARSABLE,
    WARM_UP,
    WRONG,
    Verifier,
    counts,
)
from maxtrain.rl.rewards.workers import RewardWorkers

# Without a pool: exact comparison, or nothing.
EXACT = [
    ("72", "<reasoning>48/2=24</reasoning><answer>72</answer>", CORRECT),
    ("24", "<reasoning>48/2=24</reasoning><answer>72</answer>", WRONG),
    ("two lines\n#### 1,000", r"so \boxed{1000}", CORRECT),
    (r"It is $\boxed{\frac{1}{2}}$.", "<answer>0.5</answer>", CORRECT),
    ("50%", "<answer>0.5</answer>", WRONG),
    ("0.5", "<answer>50%</answer>", WRONG),
    ("50", r"\boxed{50\%}", CORRECT),
    ("5 cm", "<answer>5 m</answer>", WRONG),
    ("Paris", "<answer> paris. </answer>", CORRECT),
    ("Paris", "<answer>London</answer>", WRONG),
    ("5", "<answer>5 and a half</answer>", WRONG),
    ("5", "<answer>__import__('os').abort()</answer>", WRONG),
    (r"x^2 + 1", r"\boxed{x^2+1}", CORRECT),
    ("72", "no number", UNPARSABLE),
    ("72", "<answer></answer>", UNPARSABLE),
    ("", "72", SKIPPED),
    (r"\sqrt{2}", r"\boxed{2^{1/2}}", SKIPPED),
    ("72", "<answer>10!!!!!!</answer>", UNPARSABLE),
    ("9!!!!!!!", r"\boxed{x}", SKIPPED),
]


@pytest.mark.parametrize(("gold", "completion", "outcome"), EXACT)
def test_what_takes_no_parser_is_judged_without_one(gold, completion, outcome):
    assert Verifier()([gold], [completion])[0].outcome == outcome


def test_outcomes_are_counted():
    golds, completions, _ = zip(*EXACT)
    found = counts(Verifier()(golds, completions))
    assert found == {CORRECT: 6, WRONG: 7, UNPARSABLE: 3, TIMEOUT: 0, CRASH: 0, SKIPPED: 3}
    assert tuple(found) == OUTCOMES


# Each would take a parser, or sympy, for ever, or all memory, or run what a model wrote.
REFUSED = [
    "10!!!!!!",
    "(10!)!",
    "9^{9^9}",
    "9^9^9",
    "9**9**9",
    "2^{10!}",
    "10^{100000}",
    "{9}^{999}",
    "1000!",
    "1" * 60,
    " + ".join(["12345"] * 40),
    "x" * 301,
    "{" * 21 + "x" + "}" * 21,
    "__class__",
    'f"x"',
    r"\input{file}",
]


@pytest.mark.parametrize("text", REFUSED)
def test_what_may_take_for_ever_is_refused(text):
    assert refusal(text)


@pytest.mark.parametrize(
    "text",
    [
        r"\frac{x^{2}}{y^{10}}",
        "10!",
        "x!",
        r"2^{100}",
        r"e^{i\pi}",
        r"\begin{pmatrix} 1 & 2 \\ 3 & 4 \end{pmatrix}",
        r"\left(-\infty, 3\right] \cup [5, \infty)",
        "x != 3",
        r"\sum_{k=1}^{n} k^2",
    ],
)
def test_what_people_ask_for_is_not(text):
    assert refusal(text) == "" and not has_words(text)


def test_names_in_a_policy_are_checked():
    with pytest.raises(ConfigError, match="Name some of answer, boxed"):
        Verifier(policy=["last"])
    with pytest.raises(ConfigError, match="Give the column of the dataset"):
        Verifier()(["1"], ["1", "2"])


def test_math_verify_is_asked_for(monkeypatch):
    def missing(name, extra, wanted_by):
        raise UsageError(f"{wanted_by}: needs {name}. Install it: pip install 'maxtrain[{extra}]'")

    monkeypatch.setattr(verify, "require_package", missing)
    with RewardWorkers(1) as pool, pytest.raises(UsageError, match=r"maxtrain\[math\]"):
        Verifier(pool)


def test_without_processes_numbers_are_judged_all_the_same(monkeypatch):
    monkeypatch.setattr(verify, "require_package", lambda *names: None)
    monkeypatch.setattr(workers.sys, "executable", "/no/such/python")
    with RewardWorkers(1) as pool:
        verdicts = Verifier(pool)(["72", "72", r"\sqrt{2}"], ["72.0", "7", r"\boxed{2^{1/2}}"])
    assert [verdict.outcome for verdict in verdicts] == [CORRECT, WRONG, SKIPPED]
    assert "no process can be started" in verdicts[2].detail


@pytest.fixture(scope="module")
def pool():
    pytest.importorskip("math_verify")
    with RewardWorkers(2, seconds=20.0, preload=[WARM_UP]) as pool:
        yield pool


@pytest.mark.long
@pytest.mark.parametrize(
    ("gold", "answer", "outcome"),
    [
        (r"\sqrt{2}", r"2^{1/2}", CORRECT),
        (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}", CORRECT),
        (r"\sqrt{2}", "sqrt(2)", CORRECT),
        ("x^2 + 2*x + 1", r"(x+1)^2", CORRECT),
        ("x^2 + 2*x + 1", "(x+1)**2", CORRECT),
        ("10!", "3628800", CORRECT),
        ("1,2", "2,1", CORRECT),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 4/2 \end{pmatrix}",
            CORRECT,
        ),
        (
            r"\begin{pmatrix}1\\2\end{pmatrix}",
            r"\begin{pmatrix} 1 \\ 3 \end{pmatrix}",
            WRONG,
        ),
        (r"3\sqrt{2}\text{ cm}", r"\sqrt{18}", CORRECT),
        # An equation may be asked for by its solution, and the reverse.
        ("5", "x=5", CORRECT),
        ("25", "5\u00b2", CORRECT),
        ("52", "5\u00b2", WRONG),
        # Not symmetric: the gold says in what form an interval is wanted.
        ("1 < x < 2", "(1, 2)", CORRECT),
        ("(1, 2)", "1 < x < 2", WRONG),
        # A factor of 100, with a percent sign or without.
        (r"100\sqrt{2}", r"\sqrt{2}", WRONG),
        (r"100\sqrt{2}", r"\sqrt{2}\%", WRONG),
        (r"\sqrt{2}\%", r"\sqrt{2}", CORRECT),
        (r"\frac{\sqrt{2}}{100}", r"\sqrt{2}\%", WRONG),
        ("3", r"\frac{1}{2", UNPARSABLE),
        (r"\frac{1}{2", "3", SKIPPED),
    ],
)
def test_what_takes_mathematics(pool, gold, answer, outcome):
    verifier = Verifier(pool, policy=["all"], gold_policy=["all"])
    assert verifier([gold], [answer])[0].outcome == outcome


@pytest.mark.long
def test_equal_answers_to_a_question_are_judged_once(pool, monkeypatch):
    asked = []
    monkeypatch.setattr(
        pool, "run", lambda function, items, **limits: asked.append(items) or run(function, items)
    )
    run = type(pool).run.__get__(pool)
    completions = [r"\boxed{2^{1/2}}", r"\boxed{2^{1/2} }"] * 8 + [r"\boxed{\sqrt{3}}"]
    verdicts = Verifier(pool)([r"\sqrt{2}"] * 17, completions)
    assert [verdict.outcome for verdict in verdicts] == [CORRECT] * 16 + [WRONG]
    assert [len(items) for items in asked] == [2]


# Forty answers that hang, crash or confuse what reads them.
ADVERSARIAL = [
    *("10" + "!" * n for n in range(2, 10)),
    *(f"{n}^{{{n}^{{{n}}}}}" for n in range(5, 10)),
    *(f"{n}**{n}**{n}**{n}" for n in range(5, 10)),
    *(f"({n}^{{400}})^{{400}}^{{400}}" for n in range(5, 9)),
    *(r"\sqrt{" * n + "2" + "}" * n for n in (15, 60, 500)),
    *("(" * n + "x" for n in (10, 5000)),
    *(r"\frac{1}{" * n + "x" + "}" * n for n in (18, 90)),
    r"\sum_{k=1}^{10^{9}} \sin(k^2)",
    r"\prod_{k=1}^{99999999} (1 + x^k)",
    r"\int_0^1 x^{x^x} \sin(x)^{x} dx",
    r"(x+y+z+w)^{450} - (w+z+y+x)^{450}",
    r"\binom{99999999}{44444444}",
    "(99999999!)!/(9999999!)",
    "1e999999999",
    "9" * 5000,
    "+".join(["1"] * 149),
    "__import__('os').kill(0, 9)",
    r"\begin{pmatrix}" * 50,
]


@pytest.mark.long
def test_adversarial_answers_take_no_more_than_their_limits(pool):
    """With the guards, and handed to the parsers without them."""
    assert len(ADVERSARIAL) == 40
    limit = 0.5
    verifier = Verifier(pool, policy=["all"], seconds=limit)
    began = time.monotonic()
    verdicts = verifier([r"\sqrt{2} x"] * 40, ADVERSARIAL)
    seconds = time.monotonic() - began
    bad = sum(verdict.outcome in (TIMEOUT, CRASH) for verdict in verdicts)
    assert not any(verdict.outcome == CORRECT for verdict in verdicts)
    assert bad <= 8 and seconds <= limit * math.ceil(bad / pool.size) + 2

    items = [(r"\sqrt{2}", answer) for answer in ADVERSARIAL]
    began = time.monotonic()
    results = pool.run(CHECK, items, seconds=limit)
    seconds = time.monotonic() - began
    bad = sum(result.outcome != "ok" for result in results)
    assert bad >= 5 and seconds <= limit * math.ceil(bad / pool.size) + 2
    assert Verifier(pool)([r"\sqrt{2}"], [r"\boxed{2^{1/2}}"])[0].outcome == CORRECT
