"""Verification of answers against the gold answers of a dataset.

1. The answer is extracted by a policy (answers.py).
2. Numbers are compared exactly, in this process (numerals.py), and so are texts.
3. The rest goes to math-verify (math_check.py), in a pool whose processes are killed at their time
limit (workers.py), unless guards.py refuses it.

Without a pool, the third part is "skipped". Nothing here raises because of what a model wrote.
"""

import collections
import re
from collections.abc import Sequence
from typing import NamedTuple

from data_pipeline.base.errors import ConfigError
from data_pipeline.base.extras import require_package
from maxtrain.rl.rewards import math_check, workers
from maxtrain.rl.rewards.answers import POLICY, extract
from maxtrain.rl.rewards.guards import has_words, refusal
from maxtrain.rl.rewards.numerals import normalized, read_number, same_number
from maxtrain.rl.rewards.workers import RewardWorkers

CORRECT = math_check.CORRECT
WRONG = math_check.WRONG
# No answer was found, it is no mathematics, or guards refused it.
UNPARSABLE = math_check.UNPARSABLE
TIMEOUT = workers.TIMEOUT
CRASH = workers.CRASH
# The answer was not judged: no pool, the deadline passed, or the gold answer cannot be read.
SKIPPED = workers.SKIPPED
OUTCOMES = (CORRECT, WRONG, UNPARSABLE, TIMEOUT, CRASH, SKIPPED)
# Where a dataset has its answer: in a box of a solution, after ####, or as the whole text.
GOLD_POLICY = ("boxed", "hash", "all")
CHECK = "maxtrain.rl.rewards.math_check:check"
WARM_UP = "maxtrain.rl.rewards.math_check:warm_up"
# Gold expressions are not longer, and the time of parsers may grow faster than the length.
LONGEST = 300
_UNIT_AT_THE_END = re.compile(r"\\(?:text|mathrm|mbox)\s*\{[^{}\d]*\}(?:\^\{?[23]\}?)?$")


class Verdict(NamedTuple):
    """One of OUTCOMES, and a reason."""

    outcome: str
    detail: str = ""


def compare_exactly(gold: str, answer: str) -> Verdict | None:
    """Compare numbers as numbers and texts as texts; None: the comparison needs mathematics.

    A factor of 100 is wrong, with a percent sign or without: 50% is 50.
    """
    expected = read_number(gold)
    found = read_number(answer)
    if expected is not None and found is not None:
        if same_number(expected, found):
            return Verdict(CORRECT)
        return Verdict(WRONG)
    if _as_text(gold) == _as_text(answer):
        return Verdict(CORRECT)
    gold_is_prose = expected is None and has_words(_without_units(gold))
    answer_is_prose = found is None and has_words(_without_units(answer))
    if gold_is_prose or answer_is_prose:
        if _as_text(gold).casefold() == _as_text(answer).casefold():
            return Verdict(CORRECT)
        return Verdict(WRONG)
    return None


class Verifier:
    """Verifier of answers.

    Args:
        pool: the processes of math-verify, best with preload=(WARM_UP,); None: math-verify is not
            used.
        policy: where to find the answers in completions, see `extract`.
        gold_policy: where to find the answers in the dataset.
        seconds, deadline: time limits of an answer and of a batch; None: those of the pool.

    Raises:
        UsageError: there is a pool, but math-verify is not installed.
        ConfigError: a name in a policy is not known.
    """

    def __init__(
        self,
        pool: RewardWorkers | None = None,
        *,
        policy: Sequence[str] = POLICY,
        gold_policy: Sequence[str] = GOLD_POLICY,
        seconds: float | None = None,
        deadline: float | None = None,
    ):
        if pool is not None:
            require_package("math_verify", math_check.EXTRA, math_check.WANTED_BY)
        for names in (policy, gold_policy):
            extract("", names)
        self._pool = pool
        self._policy = tuple(policy)
        self._gold_policy = tuple(gold_policy)
        self._seconds = seconds
        self._deadline = deadline

    def __call__(self, golds: Sequence[str], completions: Sequence[str]) -> list[Verdict]:
        """Return a verdict for each completion; equal answers to a question are judged once."""
        if len(golds) != len(completions):
            raise ConfigError(
                f"{len(golds)} golds for {len(completions)} completions: there must be one for "
                "each. Give the column of the dataset that belongs to these rows."
            )
        pairs = [self._pair(*row) for row in zip(golds, completions)]
        verdicts = {pair: self._judge(*pair) for pair in dict.fromkeys(pairs)}
        open_pairs = [pair for pair, verdict in verdicts.items() if verdict is None]
        found = dict(zip(open_pairs, self._by_mathematics(open_pairs)))
        return [verdicts[pair] or found[pair] for pair in pairs]

    def _pair(self, gold: str, completion: str) -> tuple[str, str]:
        """Return the gold answer and the given answer; "" for a missing one."""
        expected = extract(gold, self._gold_policy) or ""
        return expected, extract(completion, self._policy) or ""

    def _judge(self, gold: str, answer: str) -> Verdict | None:
        """Return a verdict that needs no parser; None: a parser is needed."""
        if not gold:
            return Verdict(SKIPPED, "there is no gold")
        if not answer:
            return Verdict(UNPARSABLE, "there is no answer")
        if max(len(gold), len(answer)) > LONGEST:
            if gold == answer:
                return Verdict(CORRECT)
            if len(gold) > LONGEST:
                return Verdict(SKIPPED, f"the gold has {len(gold)} characters")
            return Verdict(UNPARSABLE, f"refused: {len(answer)} characters")
        verdict = compare_exactly(gold, answer)
        if verdict is not None:
            return verdict
        if reason := refusal(_expression(gold)):
            return Verdict(SKIPPED, f"the gold is refused: {reason}")
        if reason := refusal(_expression(answer)):
            return Verdict(UNPARSABLE, f"refused: {reason}")
        return None

    def _by_mathematics(self, pairs: list[tuple[str, str]]) -> list[Verdict]:
        if self._pool is None:
            return [Verdict(SKIPPED, "there is no pool for math-verify") for _ in pairs]
        if not pairs:
            return []
        items = [(_expression(gold), _expression(answer)) for gold, answer in pairs]
        results = self._pool.run(CHECK, items, seconds=self._seconds, deadline=self._deadline)
        return [_verdict(result) for result in results]


def counts(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """Return the number of verdicts of each outcome, including zeros."""
    found = collections.Counter(verdict.outcome for verdict in verdicts)
    return {outcome: found[outcome] for outcome in OUTCOMES}


def _verdict(result: workers.ItemResult) -> Verdict:
    if result.outcome == workers.ERROR:
        # sympy raised an exception.
        return Verdict(UNPARSABLE, result.detail)
    if result.outcome != workers.OK:
        return Verdict(result.outcome, result.detail)
    if result.value == math_check.BAD_GOLD:
        return Verdict(SKIPPED, "the gold cannot be parsed")
    return Verdict(result.value)


def _expression(text: str) -> str:
    """Return the text for a parser: no delimiters, no percent signs, and numbers as fractions."""
    number = read_number(text)
    if number is None:
        return _without_units(text)
    if number.value.denominator == 1:
        return str(number.value.numerator)
    return rf"\frac{{{number.value.numerator}}}{{{number.value.denominator}}}"


def _without_units(text: str) -> str:
    bare = normalized(text).replace("%", "").replace("$", "").replace("degrees", "").strip(" .")
    unit = _UNIT_AT_THE_END.search(bare)
    if unit is not None and re.search(r"\d", bare[: unit.start()]):
        return bare[: unit.start()].strip()
    return bare


def _as_text(text: str) -> str:
    return normalized(text).rstrip(".").replace(" ", "")
