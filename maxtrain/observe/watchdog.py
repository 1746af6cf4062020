"""A run that hangs says where, and ends with exit 75, so that a supervisor can start it again.

The stopwatch knows what the run does and since when. How long that may take is set in the config,
or follows from the usual time of the steps between two records. If no thread of this process gets
Python's lock, a second process ends it by SIGABRT; see outer_watchdog.py.
"""

import contextlib
import faulthandler
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from data_pipeline.base.errors import TryAgainError
from maxtrain.config.schema import WatchdogConfig
from maxtrain.observe import outer_watchdog
from maxtrain.observe.goodput import Ledger
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.speed import ROLLOUT
from maxtrain.parallel.agreement import Board

_TICK = outer_watchdog.TICK
# Seconds between two signs of life.
_BEAT = 3.0
# Beats between two lines of the ledger.
_LEDGER = 4
# Seconds that the report of where the run hangs may take.
_PATIENCE = 20.0


class Watchdog:
    """Use as `with Watchdog(...) as watchdog:` around everything that a run may hang in.

    Args:
        config: limits, in seconds; 0: none.
        folder: where `stalled-PROCESS.txt` is written.
        clock: what the run does now.
        rows: which rows a step, numbered from 0, reads.
        process: number of this process.
        board: where all processes say what they do; None: there is only one process.
    """

    def __init__(
        self,
        config: WatchdogConfig,
        folder: Path,
        clock: Stopwatch,
        rows: Callable[[int], str],
        process: int = 0,
        board: Board | None = None,
    ):
        self._step: Callable[[], int] = int
        self._tell_outer: Callable[[bytes], object] = bytes
        self._ledger: Ledger | None = None
        self._config = config
        self._folder = folder
        self._clock = clock
        self._rows = rows
        self._process = process
        self._board = board
        self._ended = threading.Event()

    def __enter__(self) -> "Watchdog":
        self._stacks = not faulthandler.is_enabled()
        if self._stacks:
            # By its number, since sys.stderr may be something else.
            faulthandler.enable(file=2)
        words = [sys.executable, "-IS", outer_watchdog.__file__, str(os.getpid())]
        self._outer = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0)
        if self._outer.stdin:
            self._tell_outer = self._outer.stdin.write
        # Two threads, since a sign of life may hang, too.
        for work in (self._watch, self._beat):
            threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._outer.communicate()
        if self._stacks:
            faulthandler.disable()
        if self._ledger:
            self._ledger.write(self._step())

    def begin(self, step: Callable[[], int], run: str = "") -> None:
        """Start watching: `step` returns how many steps were begun, and process 0 keeps the ledger
        of this launch of the run.
        """
        self._step = step
        if self._process == 0:
            self._ledger = Ledger(self._folder, self._clock, step(), run)

    def limit(self, cause: str) -> float:
        """Seconds that the run may spend at once on a cause; infinite if there is no limit."""
        config = self._config
        laps = self._clock.laps
        fixed = {
            "compile": config.compile_seconds,
            "eval": config.eval_seconds,
            ROLLOUT: config.rollout_seconds,
        }
        fixed |= dict.fromkeys(("save", "restore"), config.save_seconds)
        if cause in fixed:
            return fixed[cause] or float("inf")
        if not config.factor:
            return float("inf")
        # The first one includes compiling.
        if len(laps) < 2:
            return config.compile_seconds or float("inf")
        return max(config.step_seconds, config.factor * statistics.median(list(laps)))

    def _watch(self) -> None:
        """Ends the process when it has done the same for too long.

        At most two ticks count from one tick to the next: a process that was frozen as a whole, or
        whose machine slept, does not hang.
        """
        doing = None
        stood = 0.0
        last = time.monotonic()
        while not self._ended.wait(_TICK):
            now = time.monotonic()
            before = doing
            doing = self._clock.doing()
            if doing == before:
                stood += min(now - last, 2 * _TICK)
            else:
                stood = 0.0
            last = now
            limit = self.limit(doing[0])
            if stood > limit:
                self._end(doing[0], stood)
            limit_of_outer = 0.0
            if not math.isinf(limit):
                limit_of_outer = limit + _PATIENCE
            # The outer watchdog was killed, or the run is at its end.
            with contextlib.suppress(OSError, ValueError):
                self._tell_outer(b"%g\n" % limit_of_outer)

    def _end(self, cause: str, stood: float) -> None:
        """Ends the process, even if the report hangs, since the disk or the reader of stderr
        does."""
        report = threading.Thread(target=self._report, args=(cause, stood), daemon=True)
        report.start()
        report.join(_PATIENCE)
        if self._board and self._process == 0:
            # The board ends with this process, and others may still read it.
            time.sleep(_TICK)
        os._exit(TryAgainError.exit_code)

    def _report(self, cause: str, stood: float) -> None:
        path = self._folder / f"stalled-{self._process}.txt"
        step = self._step()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:

            def say(text: str) -> None:
                print(text, file=file, flush=True)
                print(text, file=sys.stderr, flush=True)

            now = time.strftime("%F %T")
            limit = f"limit: {self.limit(cause):,.0f} s, section watchdog"
            say(
                f"{now} process {self._process} has stood still for {stood:,.0f} s after "
                f"{step:,} steps, in: {cause} ({limit}). Run the same command again to go on; if "
                f"it stands there again, the stacks in {path} say where."
            )
            faulthandler.dump_traceback(file)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
            for number in range(max(step - 1, 0), step + 1):
                say(f"Step {number + 1:,}: {self._rows(number)}")
            if self._board:
                say(self._roll_call(self._board))

    def _beat(self) -> None:
        """Gives signs of life, the first one at once."""
        beat = 0
        pause = 0.0
        while not self._ended.wait(pause):
            pause = _BEAT
            beat += 1
            if self._ledger and beat % _LEDGER == 0:
                self._ledger.write(self._step())
            if self._board:
                # Process 0 is gone; the code that waits for it raises an error.
                with contextlib.suppress(RuntimeError):
                    self._board.say(json.dumps([beat, self._clock.doing()[0], self._step()]))

    def _roll_call(self, board: Board) -> str:
        """Return which processes give no sign of life, and where the others are: a line each."""
        beats_before = {process: json.loads(said)[0] for process, said in board.heard().items()}
        time.sleep(2.5 * _BEAT)
        lines = []
        for process, said in sorted(board.heard().items()):
            beat, cause, step = json.loads(said)
            state = "IS SILENT: stopped, gone or cut off"
            if beat > beats_before.get(process, 0):
                state = "is alive"
            lines.append(f"process {process} {state}; it was after {step:,} steps, in: {cause}")
        return "\n".join(lines)
