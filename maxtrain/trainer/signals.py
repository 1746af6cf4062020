"""Graceful stops: the first SIGINT or SIGTERM requests a stop, the second one ends the process at
once.

SIGHUP, which comes when the terminal is closed, also requests a stop. It may come several times,
and together with SIGTERM, so it never counts as a second signal. Where SIGHUP is ignored, as with
`nohup`, it stays ignored.

Before the first step of a launch there is nothing to save: the process ends at once, with exit code
75. After it, the run ends at the next step that all processes agree on, once that is saved. If this
takes longer than checkpoint.grace_seconds, the process prints a message and ends; the checkpoint
before counts.

Python handles a signal only between two of its own instructions, and a compiler may work for an
hour between these. So a thread that the system wakes with each signal enforces the stop.
"""

import contextlib
import errno
import math
import os
import select
import signal
import socket
import sys
import termios
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, TextIO

import jax

from data_pipeline.base.errors import STOP_SIGNALS, TryAgainError, end_by_signal, handled_signals
from data_pipeline.base.terminal import unescaped
from maxtrain.parallel.agreement import gather

# Seconds between exchanges of stop requests between processes.
_PACE = 3.0
# Seconds that Python has to end the process, before the thread does it.
_AT_ONCE = 2.0


class StopRequested(KeyboardInterrupt):
    """Exception raised when a stop is requested and there may be steps to save first.

    A signal handler also raises it, inside other packages' code. So it is no subclass of Exception,
    which these may catch.
    """


class StopRequest:
    """Context manager for signals: `with StopRequest() as stop:`; inside, `stop.name` is the
    received signal, or empty.

    Args:
        grace_seconds: longest time from the first signal to the end of the `with`; 0: no limit.
        ends_process: whether the process ends after the `with`. Then grace_seconds also covers that
            end.
    """

    SIGNALS = STOP_SIGNALS

    def __init__(self, grace_seconds: float = 0.0, ends_process: bool = False):
        self.name = ""
        self._old = {}
        self._ends_process = ends_process
        self._patience = math.inf
        if grace_seconds:
            self._patience = grace_seconds - min(5.0, grace_seconds / 10)
        self._grace = grace_seconds
        self._doing: Callable[[], str] | None = None
        self._interrupts = False
        self._paces = defaultdict[str, _Pace](_Pace)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._ours, self._theirs = socket.socketpair()
            self._theirs.setblocking(False)
            descriptor = self._theirs.fileno()
            self._old_fd = signal.set_wakeup_fd(descriptor, warn_on_full_buffer=False)
            self._old = {n: signal.signal(n, self._handle) for n in handled_signals()}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            # A Python handler would wait while jax shuts down.
            if old is end_by_signal:
                old = signal.SIG_DFL
            signal.signal(number, old)
        if self._old:
            signal.set_wakeup_fd(self._old_fd)
            self._theirs.close()

    def save_first(self, doing: Callable[[], str] | None) -> None:
        """Declare that there are steps to save before the process ends; None: there are none.

        `doing` returns what the process is doing, for messages.
        """
        self._doing = doing

    def agreed(self, what: str = "step", save: bool = False) -> tuple[bool, bool]:
        """Return whether to stop here, if any process requests it, and whether to save, if process
        0 does.

        All processes call this equally often for each `what`, and get the same answer. They
        communicate only every few seconds by the clock of process 0, because each exchange waits
        for the devices; in between, the answer is no.
        """
        if jax.process_count() == 1:
            return bool(self.name), save
        pace = self._paces[what]
        pace.left -= 1
        if pace.left > 0:
            return False, False
        calls = int(pace.calls * _PACE / (time.monotonic() - pace.since + 1e-9))
        calls = max(1, min(calls, 4 * pace.calls))
        reports = gather({"stop": bool(self.name), "save": save, "calls": calls}, 64)
        of_first = reports[0]
        pace.calls = of_first["calls"]
        pace.left = pace.calls
        pace.since = time.monotonic()
        return any(report["stop"] for report in reports), of_first["save"]

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a signal raise StopRequested inside this block, also a signal that came before.

        With several processes nothing is raised, since the others would wait forever.
        """
        self._interrupts = jax.process_count() == 1
        try:
            if self._interrupts and self.name:
                raise StopRequested
            yield
        finally:
            self._interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        if number == signal.SIGHUP:
            _outlive_terminal()
        # The thread handles the second signal.
        if self.name:
            return
        self.name = signal.Signals(number).name
        if self._interrupts:
            raise StopRequested
        if not self._doing:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """End the process at the second signal, or when its time after the first one is over."""
        name = ""
        # The last signal but SIGHUP, which never counts as a second one.
        insistent = ""
        deadline = math.inf
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not left:
                self._end(TryAgainError.exit_code, f"{name}: {self._why_over()}.")
            timeout = None
            if not math.isinf(left):
                timeout = left
            ready, _, _ = select.select([self._ours], [], [], timeout)
            if not ready:
                continue
            received = self._ours.recv(1)
            # The other end is closed after the `with`.
            if not received:
                self._ours.close()
                if math.isinf(left) or not self._ends_process:
                    return
                time.sleep(left)
                continue
            number = received[0]
            if number not in self.SIGNALS:
                continue
            latest = signal.Signals(number).name
            if number != signal.SIGHUP:
                if insistent:
                    self._end(128 + number, f"{insistent}, then {latest}: ended at once.")
                insistent = latest
            if not name:
                name = latest
                deadline = time.monotonic() + self._seconds_left()

    def _why_over(self) -> str:
        """Return why the process is ended when its time after the first signal is over."""
        doing = self._doing and self._doing()
        if not doing:
            return "nothing is left to save"
        rule = f"checkpoint.grace_seconds={self._grace:g} are over, in: {doing}"
        return f"{rule}. The last whole checkpoint counts"

    def _seconds_left(self) -> float:
        """Return how long the process may continue after the first signal."""
        if self._doing:
            return self._patience
        # jax would wait for the other processes.
        if jax.distributed.is_initialized():
            return 0
        return _AT_ONCE

    @staticmethod
    def _end(code: int, text: str) -> None:
        """End the process, even if nothing reads stderr any more."""
        text += " Run the same command again: it goes on from the last checkpoint."
        # A progress line may have hidden the cursor.
        if sys.stderr.isatty():
            text = "\033[?25h" + text
        where = {"file": unescaped(sys.stderr), "flush": True}
        printer = threading.Thread(target=print, args=(text,), kwargs=where, daemon=True)
        printer.start()
        printer.join(_AT_ONCE)
        os._exit(code)


class _LastingStream:
    """A text stream that discards its output once the terminal or the reading program has gone."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError:
            _write_to_nowhere(self._stream.fileno())
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            _write_to_nowhere(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _write_to_nowhere(descriptor: int) -> None:
    """Redirect a file descriptor to the null device."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, descriptor)
    os.close(nothing)


def _outlive_terminal() -> None:
    """Let writes to standard output and standard error succeed although their terminal, or the
    program that reads them, has gone or is about to go.

    Each write to a closed terminal fails, which would end the run before it has saved. The kernel
    also ends a program such as `tee` that reads the output in a pipe, before or after this process
    gets the signal.
    """
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                _write_to_nowhere(descriptor)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _LastingStream):
            setattr(sys, name, _LastingStream(stream))


class _Pace:
    """Number of calls until the processes communicate again, and the time of the last exchange."""

    def __init__(self) -> None:
        self.left = 0
        self.calls = 1
        self.since = time.monotonic()
