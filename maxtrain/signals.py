"""Stopping in good order: the first SIGINT or SIGTERM asks, the second one ends the process at
once.

What is asked depends on what there is to save. Before the first step of a launch nothing is: the
process ends at once, with exit 75. After it, the run ends at the next step that all processes agree
on, when that is saved. If this takes longer than checkpoint.grace_seconds, the process says so and
ends: the checkpoint before counts.

Python handles a signal only between two of its own instructions, and a compiler may work for an
hour between these. So a thread that the system wakes with each signal sees to it that what was
asked for happens.
"""

import contextlib
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import FrameType

import jax

from data_pipeline.errors import TryAgainError, end_by_signal
from maxtrain.parallel.agreement import gather

_PACE = 3.0  # seconds after which processes ask each other
_AT_ONCE = 2.0  # seconds that Python has for it, before the thread does it


class StopRequested(KeyboardInterrupt):
    """Somebody asks to stop, and there may be steps to save first.

    It is raised in a signal's handler too, inside other packages' code, so that it must not be an
    Exception, which these may catch.
    """


class StopRequest:
    """Use as `with StopRequest() as stop:`; inside, `stop.name` is the signal that came, or empty.

    Args:
        grace_seconds: from the first signal to the end of the `with`; 0: as long as it takes.
        ends_process: whether the process is to end after the `with`. Then it has no longer than
            grace_seconds for that, either.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self, grace_seconds: float = 0.0, ends_process: bool = False):
        self.name, self._old = "", {}
        self._ends_process = ends_process
        self._patience = grace_seconds - min(5.0, grace_seconds / 10) if grace_seconds else math.inf
        self._grace = grace_seconds
        self._doing: Callable[[], str] | None = None
        self._interrupts = False
        self._paces = defaultdict[str, _Pace](_Pace)

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._ours, theirs = socket.socketpair()
            theirs.setblocking(False)
            self._theirs, self._old_fd = (
                theirs,
                signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False),
            )
            self._old = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
            threading.Thread(target=self._watch, name="signals", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(
                number, signal.SIG_DFL if old is end_by_signal else old
            )  # Python's waits while jax says goodbye
        if self._old:
            signal.set_wakeup_fd(self._old_fd)
            self._theirs.close()

    def save_first(self, doing: Callable[[], str] | None) -> None:
        """From now on there are steps to save before the process ends; `doing` tells what it does.
        None: there are none."""
        self._doing = doing

    def agreed(self, what: str = "step", save: bool = False) -> tuple[bool, bool]:
        """Whether to stop here, as any process asks; and whether to save, as process 0 does, whose
        clock alone counts.

        The same answer in all processes, which call this equally often for each `what`. They ask
        each other every few seconds, since they have to wait for their devices each time; between,
        the answer is no.
        """
        if jax.process_count() == 1:
            return bool(self.name), save
        pace = self._paces[what]
        pace.left -= 1
        if pace.left > 0:
            return False, False
        calls = int(pace.calls * _PACE / (time.monotonic() - pace.since + 1e-9))
        said = gather(
            {"stop": bool(self.name), "save": save, "calls": max(1, min(calls, 4 * pace.calls))}, 64
        )
        pace.calls = pace.left = said[0]["calls"]
        pace.since = time.monotonic()
        return any(theirs["stop"] for theirs in said), said[0]["save"]

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """A signal raises StopRequested in here, also one that came before; not where others would
        be left alone."""
        self._interrupts = jax.process_count() == 1
        try:
            if self._interrupts and self.name:
                raise StopRequested
            yield
        finally:
            self._interrupts = False

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name:
            return  # the thread does what the second one asks for
        self.name = signal.Signals(number).name
        if self._interrupts:
            raise StopRequested
        if not self._doing:
            raise KeyboardInterrupt

    def _watch(self) -> None:
        """Ends the process at the second signal, or when its time after the first one is over."""
        name, deadline = "", math.inf
        while True:
            left = max(0.0, deadline - time.monotonic())
            if not left:
                doing = self._doing and self._doing()
                rule = f"checkpoint.grace_seconds={self._grace:g} are over, in: {doing}. The last whole checkpoint counts"
                self._end(
                    TryAgainError.exit_code,
                    f"{name}: {rule if doing else 'nothing is left to save'}.",
                )
            if not select.select([self._ours], [], [], None if math.isinf(left) else left)[0]:
                continue
            received = self._ours.recv(1)
            if not received:  # after the `with`
                self._ours.close()
                if math.isinf(left) or not self._ends_process:
                    return
                time.sleep(left)
            elif received[0] in self.SIGNALS:
                if name:
                    self._end(
                        128 + received[0],
                        f"{name}, then {signal.Signals(received[0]).name}: ended at once.",
                    )
                name = signal.Signals(received[0]).name
                patience = (
                    self._patience
                    if self._doing
                    else 0
                    if jax.distributed.is_initialized()
                    else _AT_ONCE
                )
                deadline = time.monotonic() + patience

    @staticmethod
    def _end(code: int, text: str) -> None:
        """Ends the process, even if whoever reads stderr does not."""
        text += " Run the same command again: it goes on from the last checkpoint."
        show_cursor = "\033[?25h" if sys.stderr.isatty() else ""
        teller = threading.Thread(
            target=print,
            args=(show_cursor + text,),
            kwargs={"file": sys.stderr, "flush": True},
            daemon=True,
        )
        teller.start()
        teller.join(_AT_ONCE)
        os._exit(code)


class _Pace:
    """After how many calls processes ask each other again, and since when they have not."""

    def __init__(self) -> None:
        self.left, self.calls, self.since = 0, 1, time.monotonic()
