"""A run that stands still says where, and ends with exit 75, so that whoever started it can start
it again.

The stopwatch knows what the run does and since when; how long that may take follows from the usual
time of the steps between two records, or is set. Where no thread gets Python's lock, a process
beside this one ends it, by SIGABRT; see judge.py.
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

from data_pipeline.errors import TryAgainError
from maxtrain.config.schema import WatchdogConfig
from maxtrain.observe import judge
from maxtrain.observe.goodput import Ledger
from maxtrain.observe.metrics import Stopwatch
from maxtrain.parallel.agreement import Board

_TICK = judge.TICK
_BEAT = 3.0  # seconds between two signs of life
_LEDGER = 4  # beats between two lines of the ledger
_PATIENCE = (
    20.0  # seconds that may pass while it is found out and written down where the run stands
)


class Watchdog:
    """Use as `with Watchdog(...) as watchdog:` around everything that a run may hang in.

    Args:
        config: limits, in seconds; 0: none.
        folder: where `stalled-PROCESS.txt` is written.
        clock: what the run does now.
        rows: which rows a step, numbered from 0, reads.
        process: number of this process.
        board: where all processes say what they do; None: there is but one.
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
        self._tell_judge: Callable[[bytes], object] = bytes
        self._ledger: Ledger | None = None
        self._config, self._folder, self._clock, self._rows = config, folder, clock, rows
        self._process, self._board, self._ended = process, board, threading.Event()

    def __enter__(self) -> "Watchdog":
        self._stacks = not faulthandler.is_enabled()
        if self._stacks:
            faulthandler.enable(file=2)  # also where sys.stderr is something else
        words = [sys.executable, "-IS", judge.__file__, str(os.getpid())]
        self._judge = subprocess.Popen(words, stdin=subprocess.PIPE, bufsize=0)
        self._tell_judge = self._judge.stdin.write if self._judge.stdin else bytes
        for work in (self._watch, self._beat):  # apart: telling may hang too
            threading.Thread(target=work, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._judge.communicate()
        if self._stacks:
            faulthandler.disable()
        if self._ledger:
            self._ledger.write(self._step())

    def begin(self, step: Callable[[], int], run: str = "") -> None:
        """From now on, `step` tells how many steps were begun, and process 0 keeps the ledger of
        this launch of the run."""
        self._step = step
        if self._process == 0:
            self._ledger = Ledger(self._folder, self._clock, step(), run)

    def limit(self, cause: str) -> float:
        """Seconds that the run may spend at once on a cause; infinite if none is set."""
        config, laps = self._config, self._clock.laps
        fixed = {"compile": config.compile_seconds, "eval": config.eval_seconds}
        fixed |= dict.fromkeys(("save", "restore"), config.save_seconds)
        if cause in fixed:
            return fixed[cause] or float("inf")
        if not config.factor:
            return float("inf")
        if len(laps) < 2:  # the first has what is compiled on the way
            return config.compile_seconds or float("inf")
        return max(config.step_seconds, config.factor * statistics.median(list(laps)))

    def _watch(self) -> None:
        """Only time that this process itself had counts: one that was frozen as a whole, or slept,
        does not hang."""
        doing, stood, last = None, 0.0, time.monotonic()
        while not self._ended.wait(_TICK):
            now, before = time.monotonic(), doing
            doing = self._clock.doing()
            stood = stood + min(now - last, 2 * _TICK) if doing == before else 0.0
            last = now
            limit = self.limit(doing[0])
            if stood > limit:
                self._end(doing[0], stood)
            with contextlib.suppress(
                OSError, ValueError
            ):  # it was killed, or the run is at its end
                self._tell_judge(b"%g\n" % (0 if math.isinf(limit) else limit + _PATIENCE))

    def _end(self, cause: str, stood: float) -> None:
        """Ends the process, whatever hangs: the disk or whoever reads stderr may, too."""
        report = threading.Thread(target=self._report, args=(cause, stood), daemon=True)
        report.start()
        report.join(_PATIENCE)
        if self._board and self._process == 0:
            time.sleep(_TICK)  # the board goes with this process
        os._exit(TryAgainError.exit_code)

    def _report(self, cause: str, stood: float) -> None:
        path, step = self._folder / f"stalled-{self._process}.txt", self._step()
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:

            def say(text: str) -> None:
                print(text, file=file, flush=True)
                print(text, file=sys.stderr, flush=True)

            say(
                f"{time.strftime('%F %T')} process {self._process} has stood still for {stood:,.0f} s after {step:,} steps, "
                f"in: {cause} (limit: {self.limit(cause):,.0f} s, section watchdog). Run the same command again to go on; "
                f"if it stands there again, the stacks in {path} say where."
            )
            faulthandler.dump_traceback(file)
            faulthandler.dump_traceback(sys.__stderr__ or sys.stderr)
            for number in (step - 1, step) if step else (step,):
                say(f"Step {number + 1:,}: {self._rows(number)}")
            if self._board:
                say(self._roll_call(self._board))

    def _beat(self) -> None:
        beat = 0
        while not self._ended.wait(_BEAT if beat else 0):
            beat += 1
            if self._ledger and beat % _LEDGER == 0:
                self._ledger.write(self._step())
            if self._board:
                with contextlib.suppress(
                    RuntimeError
                ):  # process 0 is gone: whoever waits for it says so
                    self._board.say(json.dumps([beat, self._clock.doing()[0], self._step()]))

    def _roll_call(self, board: Board) -> str:
        """Which processes give no sign of life, and where the others are: a line each."""
        before = {process: json.loads(said)[0] for process, said in board.heard().items()}
        time.sleep(2.5 * _BEAT)
        lines = []
        for process, (beat, cause, step) in sorted(
            (process, json.loads(said)) for process, said in board.heard().items()
        ):
            state = (
                "is alive"
                if beat > before.get(process, 0)
                else "IS SILENT: stopped, gone or cut off"
            )
            lines.append(f"process {process} {state}; it was after {step:,} steps, in: {cause}")
        return "\n".join(lines)
