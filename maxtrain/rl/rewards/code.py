"""The reward `code`: a program in the completion passes the tests of a column. What a model wrote
is run on this machine, with the limits of sandbox.py: it is off unless a config names it."""

import re
from collections.abc import Callable

from maxtrain.rl.rewards import sandbox
from maxtrain.rl.rewards.contract import OK, Batch, Scored, column_of
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.workers import RewardWorkers

RUN = "maxtrain.rl.rewards.code:run"
# No program was found in the completion: 0, as where one fails.
NO_PROGRAM = "no_program"
# Seconds beyond its own limit that a program may take to start and to be cleaned up after.
_SPARE_SECONDS = 10.0
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)


def program_of(completion: str) -> str | None:
    """The last block of code, between ``` and ```; None if there is none."""
    found = _BLOCK.findall(completion)
    if not found:
        return None
    return found[-1]


def run(completion: str, tests: str, seconds: float, memory_bytes: int) -> list:
    """In a worker: an outcome and what the program printed."""
    program = program_of(completion)
    if program is None:
        return [NO_PROGRAM, ""]
    ran = sandbox.run_program(program, tests, seconds, memory_bytes)
    return [ran.outcome, ran.output]


def code(
    pool: RewardWorkers | None,
    column: str = "tests",
    reward: float = 1.0,
    seconds: float = 5.0,
    memory_bytes: int = 1 << 30,
) -> Callable[[Batch], list[Scored]]:
    """A reward for completions whose last block of code passes the tests, which are Python that
    raises where something is wrong (`assert add(1, 2) == 3`); any other gives 0.

    Args:
        column: the column with the tests; None there: the reward does not apply.
        seconds, memory_bytes: limits of a program and its tests together.
    """
    workers = required(pool, "code")

    def score(batch: Batch) -> list[Scored]:
        tests = column_of(batch.columns, column, "code")
        places = [place for place, test in enumerate(tests) if test is not None]
        items = [(batch.completions[i], str(tests[i]), seconds, memory_bytes) for i in places]
        found = [Scored(None) for _ in tests]
        results = workers.run(RUN, items, seconds=seconds + _SPARE_SECONDS)
        for place, result in zip(places, results):
            if result.outcome != OK:
                found[place] = Scored(None, result.outcome, result.detail)
                continue
            outcome, output = result.value
            if outcome == sandbox.PASSED:
                found[place] = Scored(reward)
            else:
                found[place] = Scored(0.0, outcome, output)
        return found

    return score
