"""The processes of a job on this machine: started together, ended together."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple

from data_pipeline.base.errors import TryAgainError, UsageError, handled_signals

# Seconds between two looks at the processes.
POLL = 0.1
# Seconds that the other processes of a job have to end by themselves after the first one failed.
SETTLE = 10.0


@contextlib.contextmanager
def passing_on_signals(pass_on: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """Calls a function at each signal that asks this process to end: SIGINT, SIGTERM, and a SIGHUP
    that is not ignored."""
    before: dict[int, Any] = {}
    for number in handled_signals():
        before[number] = signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def for_child(number: int) -> int:
    """Return the signal to pass on to a child: a closed terminal is not the child's own."""
    if number == signal.SIGHUP:
        return signal.SIGTERM
    return number


class JobExit(NamedTuple):
    """Outcome of the processes of a job, by their numbers."""

    # Exit codes of those that failed, in the order in which they did; negative: a signal.
    failed: dict[int, int]
    # Those that had to be ended, since others had failed or the time was over.
    running: list[int]

    @property
    def own(self) -> list[int]:
        """Return the processes that failed by themselves: 75 alone may only mean that another one
        is lost.
        """
        return [number for number, code in self.failed.items() if code != TryAgainError.exit_code]

    @property
    def code(self) -> int:
        """Exit code of the first process that failed by itself, or else of the first that failed; 0
        if none failed.
        """
        for number in [*self.own, *self.failed]:
            return self.failed[number]
        if self.running:
            return -signal.SIGKILL
        return 0


def addresses(count: int) -> list[dict[str, str]]:
    """Return the environment with which several processes on this machine find each other."""
    if count == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        _, port = free.getsockname()
    common = {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": str(count),
    }
    return [common | {"JAX_PROCESS_ID": str(index)} for index in range(count)]


def start_process(
    command: Sequence[str], extra: Mapping[str, str], output: int | None = None
) -> subprocess.Popen:
    """Starts one process, in a group of its own.

    So ctrl-C comes to it once, from us; and what it leaves behind can be ended.

    Args:
        command: its words.
        extra: of its environment, beside ours.
        output: where it prints to; subprocess.PIPE, or None: where we print to.

    Raises:
        UsageError: the command can't be run.
    """
    try:
        return subprocess.Popen(
            command, env=os.environ | extra, start_new_session=True, stdout=output, stderr=output
        )
    except OSError as error:
        fix = "Name a command that can be run after --"
        raise UsageError(f"{command[0]}: {error.strerror}. {fix}.") from error


class Processes:
    """Processes of one job, each with a number: of type Popen, or with as much of it as is used."""

    def __init__(self) -> None:
        self._children: dict[int, Any] = {}

    def add(self, number: int, child: Any) -> None:
        """One more process, which runs already."""
        self._children[number] = child

    def wait(self, settle: float, deadline: Callable[[], float]) -> JobExit:
        """Wait until all processes have ended; once one has failed, the others have little time
        left.

        None of them, nor of what they started, lives on.

        Args:
            settle: seconds that the others have.
            deadline: until when all have time, by the monotonic clock; called again and again.
        """
        failed: dict[int, int] = {}
        running = list(self._children)
        last = float("inf")
        try:
            while running and time.monotonic() <= min(last, deadline()):
                time.sleep(POLL)
                running = []
                for number, child in self._children.items():
                    code = child.poll()
                    if code is None:
                        running.append(number)
                    elif code != 0 and number not in failed:
                        failed[number] = code
                if failed:
                    last = min(last, time.monotonic() + settle)
            return JobExit(failed, running)
        finally:
            self.end_all()

    def end_all(self) -> None:
        """Nothing of these processes, nor of what they started, lives on."""
        for child in self._children.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def tell(self, number: int) -> None:
        """Sends a signal to each process that has not ended."""
        for child in self._children.values():
            if child.poll() is None:
                child.send_signal(number)
