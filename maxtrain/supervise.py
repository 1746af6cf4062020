"""`maxtrain supervise -- python -m maxtrain.train ...`: starts the command again while trying again
can help. Imports no jax.

    75, 74              try again: stopped after saving, stalled, another process lost; storage that
                        failed may be back
    a signal            as SIGKILL by the system's memory killer, or SIGABRT when jax misses a
                        heartbeat
    0, 64, 65, 70, 78   done, or the same again next time: passed on at once

It gives up when attempts in a row come no further, with 74 if storage failed and else 70. If the
same process of several was the first to end in all of them, and --min-processes allows it, the job
goes on without that one. Asked to stop by SIGINT or SIGTERM, it passes that on, waits, and returns
what the command did. RUN/attempts.jsonl has a line for each attempt.
"""

import argparse
import contextlib
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from data_pipeline.errors import StorageError, TryAgainError, UsageError, UserError, run_command
from maxtrain import ATTEMPT, SLOT
from maxtrain.config import fit_to_fewer, load_config
from maxtrain.config.schema import RunConfig
from maxtrain.observe.attempts import append_attempt, reached_step, read_attempts, saved_step
from maxtrain.observe.books import RUN
from maxtrain.observe.launches import usual_devices
from maxtrain.run_folder import run_id

_AGAIN = (TryAgainError.exit_code, StorageError.exit_code)
_POLL = 0.1  # seconds
_SETTLE = (
    10.0  # seconds that the other processes of a job have to end by themselves after the first one
)


def main(argv: Sequence[str], prog: str) -> int:
    """Supervises a command; the exit code."""
    code = 0

    def job() -> None:
        nonlocal code
        own, command = _split(argv)
        options = _parse(own, prog)
        if not command:
            raise UsageError(
                f"{prog} needs a command after --. Write: {prog} -- python -m maxtrain.train config=NAME"
            )
        code = Supervisor(options, command, _config(command)).run()

    failed = run_command(job)
    return failed or code


class Supervisor:
    """The attempts of one command."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str], config: RunConfig):
        if options.processes > 1 and (config.mesh.coordinator or config.mesh.num_processes):
            raise UsageError(
                f"--processes {options.processes} sets mesh.coordinator and mesh.num_processes. Leave them out."
            )
        self._options, self._command, self._config = options, list(command), config
        self._least = options.min_processes or config.mesh.min_processes or options.processes
        self._slots, self._lost = (
            list(range(options.processes)),
            None,
        )  # of this machine; the one that ended an attempt
        self._folder = Path(config.output_dir, config.run_name)
        index = (
            config.mesh.process_id
            or os.environ.get("JAX_PROCESS_ID")
            or os.environ.get("SLURM_PROCID")
            or 0
        )
        self._index = int(index)
        self._children: list[subprocess.Popen] = []
        self._asked, self._deadline, self._stop = "", float("inf"), threading.Event()

    def run(self) -> int:
        """Attempts until one is the last; its exit code."""
        old = {
            number: signal.signal(number, self._pass_on)
            for number in (signal.SIGINT, signal.SIGTERM)
        }
        try:
            return self._attempts()
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _attempts(self) -> int:
        options, furthest, standing, lost = self._options, reached_step(self._folder), 0, []
        first = len(read_attempts(self._folder, self._index)) + 1
        for restart in range(options.max_restarts + 1):
            code = self._attempt(first + restart, restart)
            if self._asked or not (code in _AGAIN or code < 0 or code > 128):
                return code if code >= 0 else 128 - code
            reached = reached_step(self._folder)
            standing, furthest = (0 if reached > furthest else standing + 1), max(furthest, reached)
            lost = [*lost, self._lost] if standing else []
            if (
                standing >= options.crash_loop
                and len({*lost}) == 1
                and self._go_on_without(lost[0])
            ):
                standing, lost = 0, []
            if standing >= options.crash_loop:
                rule = f"{standing} attempts in a row ended with no step after {furthest:,} (--crash-loop {options.crash_loop})"
                error = UserError(
                    f"{rule}; the last with {_words(code)}. See the log above and {self._folder}, and mend that."
                )
                error.exit_code = code if code == StorageError.exit_code else UserError.exit_code
                raise error
            if restart < options.max_restarts:
                wait = min(options.max_backoff, options.backoff * 2**standing) * random.uniform(
                    0.5, 1
                )
                self._tell(
                    f"ended with {_words(code)} at step {reached:,}; starts again in {wait:.1f} s"
                )
                self._stop.wait(wait)
            if self._asked:
                return TryAgainError.exit_code
        rule = f"--max-restarts {options.max_restarts}: the last attempt ended with {_words(code)} at step {furthest:,}"
        raise TryAgainError(f"{rule}. Run the same command again to go on.")

    def _attempt(self, number: int, restart: int) -> int:
        """One attempt, on record when it has ended; its exit code, negative for a signal."""
        start, before = time.time(), reached_step(self._folder)
        self._children = []
        for extra in self._environments(restart + 1):
            self._children.append(self._start(extra))
        if self._asked:  # while they were started; a child that is not yet in the list was not told
            self._tell_children(signal.SIGTERM)
        code = self._wait()
        end, (saved, since) = time.time(), saved_step(self._folder)
        record = {
            "attempt": number,
            "host": platform.node(),
            "command": shlex.join(self._command),
            "processes": len(self._slots),
            "lost": self._lost,
            "start": start,
            "end": end,
            "code": code,
            "reason": f"asked to stop by {self._asked}" if self._asked else _words(code),
            "from_step": before,
            "reached_step": reached_step(self._folder),
            "saved_step": saved,
            "lost_seconds": 0.0 if code == 0 else max(0.0, end - max(start, since)),
        }
        if run := run_id(self._folder):
            record[RUN] = run
        append_attempt(self._folder, record, self._index)
        return code

    def _go_on_without(self, slot: int | None) -> bool:
        """Whether the job can do without a process, as it then will: no device gets more rows at a
        time than it had."""
        had, each, rest = (
            self._options.processes,
            usual_devices(self._config),
            [other for other in self._slots if other != slot],
        )
        for count in range(len(rest), self._least - 1, -1):
            if fewer := fit_to_fewer(self._config, had, count, each):
                name, accumulation = "optimizer.accumulation=", fewer.optimizer.accumulation
                self._command = [
                    *(word for word in self._command if not word.startswith(name)),
                    f"{name}{accumulation}",
                ]
                self._slots = rest[:count]
                self._tell(
                    f"process {slot} is lost; goes on with {count} of {had} processes, {name}{accumulation}"
                )
                return True
        return False

    def _environments(self, attempt: int) -> list[dict[str, str]]:
        """What each process of an attempt finds in its environment, beside ours."""
        count, common = len(self._slots), {ATTEMPT: str(attempt)}
        if count == 1:
            return [common]
        with socket.socket() as free:
            free.bind(("localhost", 0))
            common |= {
                "JAX_COORDINATOR_ADDRESS": f"localhost:{free.getsockname()[1]}",
                "JAX_NUM_PROCESSES": str(count),
            }
        return [
            common | {"JAX_PROCESS_ID": str(index), SLOT: str(slot)}
            for index, slot in enumerate(self._slots)
        ]

    def _start(self, extra: dict[str, str]) -> subprocess.Popen:
        """A group of its own: ctrl-C comes to it once, from us; and what it leaves behind can be
        ended."""
        try:
            return subprocess.Popen(self._command, env=os.environ | extra, start_new_session=True)
        except OSError as error:
            self._end_all()
            raise UsageError(
                f"{self._command[0]}: {error.strerror}. Name a command that can be run after --."
            ) from error

    def _wait(self) -> int:
        """Until all processes have ended; once one has failed, the others have little time left.

        The code is of the first that failed by itself: 75 alone may only say that another one is
        lost.
        """
        failed, deadline, silent = dict[int, int](), float("inf"), self._slots
        try:
            while silent and time.monotonic() <= min(deadline, self._deadline):
                time.sleep(_POLL if failed or len(silent) == len(self._slots) else 0)
                ended = {slot: child.poll() for slot, child in zip(self._slots, self._children)}
                silent = [slot for slot, code in ended.items() if code is None]
                failed |= {
                    slot: code for slot, code in ended.items() if code and slot not in failed
                }
                deadline = min(deadline, time.monotonic() + _SETTLE) if failed else deadline
            own = [slot for slot, code in failed.items() if code != TryAgainError.exit_code]
            self._lost = [*own, *(silent if len(silent) == 1 else ()), *failed, None][0]
            return next((failed[slot] for slot in [*own, *failed]), 0)
        finally:
            self._end_all()

    def _end_all(self) -> None:
        """Nothing of an attempt, nor of what it started, outlives it."""
        for child in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked, self._deadline = (
            signal.Signals(number).name,
            time.monotonic() + self._options.grace,
        )
        self._stop.set()
        self._tell_children(number)

    def _tell_children(self, number: int) -> None:
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def _tell(self, text: str) -> None:
        print(f"supervise: {self._folder}: {text}", file=sys.stderr, flush=True)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command after `--`."""
    words = list(argv)
    return (
        (words[: words.index("--")], words[words.index("--") + 1 :])
        if "--" in words
        else (words, [])
    )


def _config(command: Sequence[str]) -> RunConfig:
    """The config of the run in a command, for its folder. ConfigError: as the run would say, but
    before it is started."""
    ends = [
        i
        for i, word in enumerate(command)
        if word in ("maxtrain.train", "train") or word.endswith("maxtrain/train.py")
    ]
    if not ends:
        raise UsageError(
            f"{shlex.join(command)} is no training. Write -- python -m maxtrain.train ..., or -- maxtrain train ..."
        )
    return load_config(command[ends[0] + 1 :])


def _words(code: int) -> str:
    """An exit code for people."""
    number = -code if code < 0 else code - 128 if code > 128 else 0
    return signal.Signals(number).name if number in set(signal.Signals) else f"exit {code}"


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    form = argparse.RawDescriptionHelpFormatter
    usage = f"{prog} [OPTION ...] -- python -m maxtrain.train config=NAME key=value ..."
    about = (__doc__ or "").partition("\n\n")[2]
    parser = argparse.ArgumentParser(
        prog=prog, usage=usage, description=about, formatter_class=form
    )
    parser.add_argument(
        "--processes", type=int, default=1, metavar="N", help="processes of a job on this machine"
    )
    parser.add_argument(
        "--min-processes",
        type=int,
        metavar="N",
        help="go on with as few when one is lost for good; default: mesh.min_processes, or all of them",
    )
    parser.add_argument(
        "--max-restarts", type=int, default=100, metavar="N", help="default: %(default)s"
    )
    parser.add_argument(
        "--crash-loop",
        type=int,
        default=3,
        metavar="N",
        help="attempts without a further step; default: %(default)s",
    )
    parser.add_argument(
        "--backoff",
        type=float,
        default=5,
        metavar="SECONDS",
        help="before a restart, doubled while no step is made (%(default)s)",
    )
    parser.add_argument(
        "--max-backoff", type=float, default=300, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=300,
        metavar="SECONDS",
        help="from a signal to the end of the command (%(default)s)",
    )
    options = parser.parse_args(argv)
    lows = {
        "processes": 1,
        "min_processes": 1,
        "max_restarts": 0,
        "crash_loop": 1,
        "backoff": 0,
        "max_backoff": 0,
        "grace": 0,
    }
    for name, low in lows.items():
        if getattr(options, name) is not None and not getattr(options, name) >= low:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{option} {getattr(options, name)} must be at least {low}. Set {option} to {low} or more."
            )
    return options
