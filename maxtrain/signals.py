"""Stopping in good order: the first SIGINT or SIGTERM asks, the second one ends the process at once."""

import os
import signal
import threading
from types import FrameType

import jax

from maxtrain.parallel.agreement import gather


class StopRequest:
    """Use as `with StopRequest() as stop:`; inside, `stop.name` is the signal that came, or empty."""

    SIGNALS = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.name, self._old = "", {}

    def __enter__(self) -> "StopRequest":
        if threading.current_thread() is threading.main_thread():
            self._old = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, old in self._old.items():
            signal.signal(number, old)

    def agreed(self, every_host: bool, save: bool = False) -> tuple[bool, bool]:
        """Whether to stop here, as any host asks; and whether to save, as process 0 does, whose clock alone counts.

        The same answer on all hosts, if `every_host` is at this line now, so that they can ask; else neither.
        """
        if jax.process_count() == 1:
            return bool(self.name), save
        said = gather({"stop": bool(self.name), "save": save}, 40) if every_host else [{"stop": False, "save": False}]
        return any(theirs["stop"] for theirs in said), said[0]["save"]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.name:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self.name = signal.Signals(number).name
