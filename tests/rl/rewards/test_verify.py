"""Is this answer that one: exactly in this process, by mathematics in killable ones."""

import json
import math
import random
import subprocess
import sys
import time

import pytest

from data_pipeline.base.errors import ConfigError, UsageError
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
    r"\newcommand{\x}{2}",
    r"\variable{x}",
    "S('_' 'x')*1",
    "x*'a'",
    "\u0430*2",
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
        # The expected answer of an equation may be its solution, and the reverse.
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
    """They are tested with the guards, and directly on the parsers without them."""
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


# Each would write the file CANARY if any part of it were run as a program.
_PROGRAM = "open('CANARY', 'w')"
_IMPORT = "S('_' '_im' 'po' 'rt_' '_(\"os\").sys' 'tem(\"touch CANARY\")')"
ATTACKS = [
    f"{_IMPORT}*1",
    f"{_IMPORT}",
    f"sqrt({_IMPORT})",
    f"2*{_IMPORT}!",
    f"{_PROGRAM}*1",
    f"sqrt({_PROGRAM})",
    f"[{_PROGRAM}, 2*x]",
    f"({_PROGRAM}, 2*x)[0]",
    f"(lambda: {_PROGRAM})()*1",
    f"(x := {_PROGRAM})*1",
    f"max(*[{_PROGRAM}], 2*x)",
    f"max(**{{'key': {_PROGRAM}}})*1",
    f"sqrt(x, evaluate={_PROGRAM})",
    f"f'{{{_PROGRAM}}}'*1",
    f'f"{{{_PROGRAM}}}"*1',
    f"2*x # \n{_PROGRAM}",
    f"2*x\n{_PROGRAM}",
    f"2*x\r{_PROGRAM}",
    f"2*x;{_PROGRAM}",
    f"2*x if {_PROGRAM} else 1",
    f"S({_PROGRAM!r})*1",
    f"N({_PROGRAM!r})*1",
    f"Eq({_PROGRAM!r}, 2*x)",
    f"x.subs(x, {_PROGRAM!r})*1",
    f"Symbol({_PROGRAM!r})*1",
    f"parse_expr({_PROGRAM!r})*1",
    f"sympify({_PROGRAM!r})*1",
    f"lambdify(x, {_PROGRAM!r})(1)*1",
    f"eval({_PROGRAM!r})*1",
    f"exec({_PROGRAM!r})*1",
    f"\uff45\uff56\uff41\uff4c({_PROGRAM!r})*1",
    "\uff4f\uff50\uff45\uff4e('CANARY', 'w')*1",
    "\U0001d428\U0001d429\U0001d41e\U0001d427('CANARY', 'w')*1",
    "().__class__.__base__.__subclasses__()*1",
    "sqrt(x.__class__.__init__.__globals__)*1",
    "x.func.__globals__['os']*1",
    "x._\uff3fclass_\uff3f*1",
    "getattr(x, '_' '_class_' '_')*1",
    "chr(95)*2",
    "N(S(chr(111)+chr(115)))*1",
    rf"\mathrm{{{_PROGRAM}}}",
    rf"\text{{{_PROGRAM}}}",
    rf"\operatorname{{{_PROGRAM}}}(x)",
    rf"\operatorname{{S}}({_IMPORT})",
    rf"\operatorname{{eval}}({_PROGRAM})",
    rf"\variable{{{_PROGRAM}}}",
    rf"\variable{{{_PROGRAM}\%}}",
    rf"\mathbf{{{_IMPORT}}}*1",
    rf"x_{{{_PROGRAM}}}",
    rf"x_{{{_IMPORT}}}*1",
    rf"\sqrt[{_PROGRAM}]{{2}}",
    rf"\frac{{{_IMPORT}}}{{2}}",
    rf"\sum_{{k={_IMPORT}}}^{{2}} k",
    rf"\begin{{pmatrix}} {_IMPORT} & 1 \end{{pmatrix}}",
    rf"\left({_IMPORT}\right]",
    rf"\overline{{{_PROGRAM}}}",
    rf"\max({_IMPORT}, 2)",
    rf"\gcd({_IMPORT}, 2)",
    rf"A \in {_IMPORT}^{{2*3}}",
    rf"\text{{$}} {_IMPORT} \text{{$}}",
    rf"\boxed{{{_IMPORT}*1}}",
    rf"\sqrt{{2}}$ and ${_IMPORT}$",
    "(" * 3000 + _PROGRAM + ")" * 3000 + "*1",
    "9" * 5000 + f"*{_PROGRAM}",
    "-" * 3000 + f"{_PROGRAM}*1",
]


@pytest.mark.long
@pytest.mark.every_dose
def test_no_text_is_run_as_a_program(pool, tmp_path):
    """The text is put in every place where an answer can be, in a completion and in the dataset,
    and is also passed directly to the worker, without the checks before it."""
    canary = tmp_path / "c"
    assert "'" not in str(canary)
    attacks = [attack.replace("CANARY", str(canary)) for attack in ATTACKS]
    right = r"2\sqrt{2}"
    places = (
        "<answer>{}</answer>",
        r"so \boxed{{{}}}",
        "#### {}",
        "<answer>\\boxed{{{}}}</answer>",
    )
    for place in places:
        texts = [place.format(attack) for attack in attacks]
        verdicts = Verifier(pool)([right] * len(texts), texts)
        assert {verdict.outcome for verdict in verdicts} <= {UNPARSABLE, WRONG}
        verdicts = Verifier(pool)(texts, [r"\boxed{2^{3/2}}"] * len(texts))
        assert {verdict.outcome for verdict in verdicts} <= {SKIPPED, WRONG}
    verifier = Verifier(pool, policy=["all"], gold_policy=["all"])
    verdicts = verifier([right] * len(attacks), attacks)
    assert {verdict.outcome for verdict in verdicts} <= {UNPARSABLE, WRONG}
    results = pool.run(CHECK, [(right, attack) for attack in attacks])
    assert {result.value for result in results} <= {UNPARSABLE, WRONG}
    results = pool.run(CHECK, [(attack, right) for attack in attacks])
    assert {result.value for result in results} <= {verify.math_check.BAD_GOLD, WRONG}
    assert not canary.exists()
    assert Verifier(pool)([right], [r"\boxed{2^{3/2}}"])[0].outcome == CORRECT


# Runs in a process of its own, since a hook of audits can't be removed. It feeds pieces that are
# dangerous, in any order, to `check`, and notes whatever becomes a program.
_FUZZ = """
import json, random, sys
from maxtrain.rl.rewards import math_check
math_check.warm_up()
math_check.check(r"x^2 + 2*x + 1", "(x+1)**2")
seen = []
armed = False
def hook(event, arguments):
    if not armed:
        return
    if event == "exec" and not arguments[0].co_filename.startswith("<"):
        return
    if event == "open" and not set(str(arguments[1])) & set("wax+"):
        return
    caller = sys._getframe(1).f_globals.get("__name__")
    if event in ("exec", "compile") and caller in ("collections", "sympy.polys.monomials"):
        return
    if event == "compile" and not str(arguments[1]).startswith("<"):
        return
    if event in ("exec", "compile", "open", "os.system", "subprocess.Popen", "os.fork"):
        seen.append([event, text])
pieces = json.loads(sys.argv[1])
chance = random.Random(int(sys.argv[2]))
sys.setrecursionlimit(2000)
if sys.argv[3] == "unguarded":
    math_check.foreign_part = lambda text: ""
outcomes = {}
sys.addaudithook(hook)
for _ in range(int(sys.argv[4])):
    text = "".join(chance.choice(pieces) for _ in range(chance.randint(1, 9)))[:200]
    armed = True
    try:
        outcome = math_check.check(r"\\sqrt{2}", text)
    except Exception as error:
        outcome = type(error).__name__
    armed = False
    outcomes[outcome] = outcomes.get(outcome, 0) + 1
print(json.dumps([seen, outcomes]))
"""
_PIECES = [
    *("S", "'", '"', "('x')", "(", ")", "[", "]", "{", "}", "*", "**", "!", "_", "__", ".", ","),
    *("eval", "exec", "open", "os", "import", "lambda", "lambda x:", "f'{", "}'", ":=", "#", "\n"),
    *("__import__('os')", "__class__", "sqrt(", "sqrt(2)", "x", "y_1", "2", "2*x", "1.5", "pi"),
    *(r"\text{", r"\mathrm{", r"\operatorname{", r"\variable{", r"\frac{", r"\sqrt{", r"\in "),
    *(r"\max(", r"\sin ", r"\left(", r"\right)", "=", "<", r"\begin{pmatrix}", r"\end{pmatrix}"),
    *("\uff45\uff56\uff41\uff4c", "if", "else", "for", "&", r"\\", "^{", "|", "$", "%", ";", "1/0"),
]


@pytest.mark.long
@pytest.mark.parametrize("guards", ["guarded", "unguarded"])
def test_no_order_of_dangerous_pieces_is_run_as_a_program(guards):
    """This holds even if the checks before the parsers let everything pass."""
    pytest.importorskip("math_verify")
    seed = random.randrange(1 << 30)
    command = [sys.executable, "-c", _FUZZ, json.dumps(_PIECES), str(seed), guards, "400"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stderr
    seen, outcomes = json.loads(ran.stdout)
    assert seen == [], f"seed {seed}"
    assert sum(outcomes.values()) == 400 and outcomes[UNPARSABLE] > 50
