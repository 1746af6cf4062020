"""The reward `code`: a program in the completion passes the tests of a column.

The program and the tests run in confined processes (`sandbox/`): the program never shares a process
with the tests or with the verdict. The reward runs only if a config names it, and it refuses to
start on a machine that cannot confine programs.
"""

import re
import sys
from collections.abc import Mapping
from typing import Any

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.contract import OK, RewardBatch, RowReward, column_of
from maxtrain.rl.rewards.pooled import required
from maxtrain.rl.rewards.sandbox import confinement, forms, probe, runner
from maxtrain.rl.rewards.workers import RewardWorkers

RUN = "maxtrain.rl.rewards.code:run"
FIND = "maxtrain.rl.rewards.code:find"
# No program was found in the completion. It scores 0, like a failing program.
NO_PROGRAM = "no_program"
# The tests cannot be judged: the reward does not apply to any completion.
UNSUPPORTED = runner.UNSUPPORTED
# The column with the name of the function that `check(candidate)` tests.
_ENTRY_POINT = "entry_point"
# Seconds beyond its own limit for the start and the clean-up of a program, and the limit of the
# probe at the beginning.
_SPARE_SECONDS = 10.0
_PROBE_SECONDS = 120.0
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)\n?```", re.DOTALL)
_WORDS = {
    confinement.NAMESPACES: "in Linux namespaces, behind a seccomp filter",
    confinement.LANDLOCK: "under Landlock, behind a seccomp filter",
    confinement.NOTHING: "WITHOUT isolation (unsafe=true): they may do whatever you may do",
}

# The sandbox of a worker, by the kind of confinement.
_sandboxes: dict[str, runner.Sandbox] = {}


def program_of(completion: str) -> str | None:
    """Return the last code block between ``` and ```; None if there is none."""
    found = _BLOCK.findall(completion)
    if not found:
        return None
    return found[-1]


def find() -> list[str]:
    """Return the kind of confinement of this machine, or the reason why there is none. Runs in a
    worker."""
    return list(probe.find_confinement())


def run(
    completion: str,
    tests: Any,
    entry_point: str | None,
    kind: str,
    seconds: float,
    memory_bytes: int,
) -> list[str]:
    """Run the tests on the program of a completion; return an outcome and the printed text. Runs in
    a worker."""
    try:
        read = forms.read_tests(tests, entry_point)
    except forms.NoTestsError as error:
        return [UNSUPPORTED, str(error)]
    program = program_of(completion)
    ran = _sandbox(kind).run(program, read, seconds, memory_bytes)
    if program is None and ran.outcome != UNSUPPORTED:
        return [NO_PROGRAM, ""]
    return list(ran)


def _sandbox(kind: str) -> runner.Sandbox:
    """Return this worker's sandbox, started anew if it has ended."""
    sandbox = _sandboxes.get(kind)
    if sandbox is None or not sandbox.is_alive:
        sandbox = _sandboxes[kind] = runner.Sandbox(kind)
    return sandbox


class code:
    """A reward for completions whose last block of code passes the tests; any other gives 0.

    Tests have one of the forms of `sandbox/forms.py`. If they cannot be judged, the reward does not
    apply, and the outcome is `unsupported_tests`. This depends on the tests alone.

    Args:
        column: the column with the tests; None there: the reward does not apply.
        seconds: limit of wall time and of CPU time, for a program with all its tests.
        memory_bytes: limit of the address space of a program.
        unsafe: whether to run programs without isolation on a machine that has none.

    Raises, when it is checked or called first:
        ConfigError: this machine cannot confine programs.
    """

    def __init__(
        self,
        pool: RewardWorkers | None,
        column: str = "tests",
        reward: float = 1.0,
        seconds: float = 5.0,
        memory_bytes: int = 1 << 30,
        unsafe: bool = False,
    ):
        self._workers = required(pool, "code")
        for name, value in (("seconds", seconds), ("memory_bytes", memory_bytes)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ConfigError(
                    f"the reward code has {name}={value!r}, which must be a number above 0. Set "
                    "code(seconds=5.0, memory_bytes=1073741824), for example."
                )
        if not isinstance(unsafe, bool):
            raise ConfigError(
                f"the reward code has unsafe={unsafe!r}, which must be True or False. Set "
                "code(unsafe=True), or leave it out."
            )
        self._column = column
        self._reward = reward
        self._seconds = seconds
        self._memory_bytes = int(memory_bytes)
        self._unsafe = unsafe
        self._kind = ""

    def check(self) -> None:
        """Find out how this machine can confine programs, and print it."""
        if self._kind:
            return
        (result,) = self._workers.run(
            FIND, [()], seconds=_PROBE_SECONDS, deadline=_PROBE_SECONDS + _SPARE_SECONDS
        )
        kind, why_not = "", f"{result.outcome} {result.detail}"
        if result.outcome == OK:
            kind, why_not = result.value
        if not kind and self._unsafe:
            kind = confinement.NOTHING
        if not kind:
            raise ConfigError(
                "the reward code runs programs that a model wrote, and this machine cannot confine "
                f"them ({why_not}). It needs Linux on x86-64 or aarch64 with seccomp, and either "
                "Landlock (Linux 5.13, in the list of /sys/kernel/security/lsm) or user "
                "namespaces (sysctl user.max_user_namespaces above 0, no AppArmor restriction; in "
                "Docker --security-opt seccomp=unconfined). To run them without isolation, set "
                "grpo.rewards='[\"code(unsafe=True)\"]'."
            )
        self._kind = kind
        print(f"reward code: programs run {_WORDS[kind]}", file=sys.stderr, flush=True)

    def __call__(self, batch: RewardBatch) -> list[RowReward]:
        self.check()
        tests = column_of(batch.columns, self._column, "code")
        points = batch.columns.get(_ENTRY_POINT, [None] * len(tests))
        places = [place for place, test in enumerate(tests) if test is not None]
        limits = (self._kind, self._seconds, self._memory_bytes)
        items = [
            (batch.completions[i], _plain(tests[i]), points[i] or None, *limits) for i in places
        ]
        found = [RowReward(None) for _ in tests]
        results = self._workers.run(RUN, items, seconds=self._seconds + _SPARE_SECONDS)
        for place, result in zip(places, results):
            if result.outcome != OK:
                found[place] = RowReward(None, result.outcome, result.detail)
                continue
            outcome, output = result.value
            if outcome == runner.PASSED:
                found[place] = RowReward(self._reward)
            elif outcome == UNSUPPORTED:
                found[place] = RowReward(None, outcome, output)
            else:
                found[place] = RowReward(0.0, outcome, output)
        return found


def _plain(tests: Any) -> Any:
    """Convert tests to types that can be sent to a worker."""
    if isinstance(tests, Mapping):
        return {str(key): _plain(value) for key, value in tests.items()}
    if isinstance(tests, str | bytes | int | float | None):
        return tests
    return [_plain(each) for each in tests]
