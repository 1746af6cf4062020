"""Ends a process in which no Python thread can run any more, because one of them holds Python's
lock: `python outer_watchdog.py PID`.

That process writes a number to stdin every second: within how many seconds it will write the next
one; 0: no limit. Only time in which this watchdog itself was running counts, so a pause of the
whole machine, or of the terminal's job, does not.
"""

import contextlib
import os
import select
import signal
import sys

TICK = 1.0  # seconds
_LAST = 20.0  # seconds for the stacks to be written down


def end_when_stuck(pid: int) -> None:
    """Returns when the process has closed its end of the pipe, as at its end, or is ended from
    here."""
    limit = waited = 0.0
    while not 0 < limit < waited:
        if not select.select([0], [], [], TICK)[0]:
            waited += TICK
        elif said := os.read(0, 4096).split():
            limit, waited = float(said[-1]), 0.0
        else:
            return
    if os.getppid() != pid:
        return  # it has gone, and its number may be another's by now
    seen = f"process {pid} has not run Python for {waited:.0f} s"
    rule = f"{seen}: something keeps the interpreter's lock. It is ended; its stacks:"
    print(rule, file=sys.stderr, flush=True)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGABRT)  # which faulthandler answers without the lock
        if not select.select([0], [], [], _LAST)[0] and os.getppid() == pid:
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # meant for the other process
    end_when_stuck(int(sys.argv[1]))
