"""`maxtrain supervise -- COMMAND` restarts a training run as long as that can help. Imports no jax.

    75, 74              restarted: the run stopped after saving, hung, or lost another process; or
                        storage failed, and may be back
    a signal            restarted: for example SIGKILL because memory ran out, or SIGABRT because
                        jax missed a heartbeat
    0, 64, 65, 70, 78   not restarted: done, or the same would happen again; ends with this code

It gives up after several attempts in a row without progress, with 74 if storage failed and
otherwise with 70. If one process of several was the first to end in all of them, and
--min-processes allows it, the job continues without that process. SIGINT and SIGTERM are passed on
to the command, and SIGHUP as SIGTERM; then it waits, and ends with the command's code.
RUN/attempts.jsonl has a line for each attempt.
"""

import argparse
import contextlib
import platform
import random
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import NamedTuple

from data_pipeline.base.errors import (
    StorageError,
    TryAgainError,
    UsageError,
    UserError,
    may_go_better,
    run_command,
)
from data_pipeline.base.masking import masked
from maxtrain import ATTEMPT, SLOT
from maxtrain.commands.launch.processes import (
    SETTLE,
    JobExit,
    Processes,
    addresses,
    for_child,
    passing_on_signals,
    start_process,
)
from maxtrain.config import fewer_settings, fit_to_fewer, load_config, with_accumulation
from maxtrain.config.run_path import local_folder, process_number, run_path
from maxtrain.config.schema import RunConfig
from maxtrain.observe.attempts import append_attempt, reached_step, read_attempts, saved_step
from maxtrain.observe.jsonl_logs import RUN
from maxtrain.observe.launches import usual_devices
from maxtrain.trainer.run_dir import decided_accumulation, run_id

# Seconds that the other processes of a job have to end by themselves after the first one.
_SETTLE = SETTLE


def main(argv: Sequence[str], prog: str = "maxtrain supervise") -> int:
    """Supervises a command; the exit code."""
    code = 0

    def job() -> None:
        nonlocal code
        own, command = _split(argv)
        options = _parse(own, prog)
        if not command:
            fix = f"Write: {prog} -- python -m maxtrain.train config=NAME"
            raise UsageError(f"{prog} needs a command after --. {fix}")
        code = Supervisor(options, command, _config(command)).run()

    failed = run_command(job)
    return failed or code


class Supervisor:
    """The attempts of one command."""

    def __init__(self, options: argparse.Namespace, command: Sequence[str], config: RunConfig):
        if options.processes > 1 and (config.mesh.coordinator or config.mesh.num_processes):
            rule = "sets mesh.coordinator and mesh.num_processes"
            raise UsageError(f"--processes {options.processes} {rule}. Leave them out.")
        self._options = options
        self._command = list(command)
        self._config = config
        # Of a run behind a URL, where this host works on it, and has steps that are not uploaded.
        self._folder = run_path(config)
        self._local = local_folder(config)
        self._least = options.min_processes or config.mesh.min_processes or options.processes
        # The processes of this machine, by number, and the one that ended the last attempt.
        self._slots = list(range(options.processes))
        self._lost: int | None = None
        self._index = process_number(config.mesh)
        self._processes = Processes()
        # The signal that requested a stop, and when the processes are ended after it.
        self._asked = ""
        self._deadline = float("inf")
        self._stop = threading.Event()

    def run(self) -> int:
        """Attempts until one is the last; its exit code."""
        with passing_on_signals(self._pass_on):
            return self._attempts()

    def _attempts(self) -> int:
        options = self._options
        furthest = reached_step(self._folder)
        # Of the attempts in a row that came no further: their number, and which process was the
        # first to end in each.
        standing = 0
        lost: list[int | None] = []
        first = len(read_attempts(self._folder, self._index)) + 1
        for restart in range(options.max_restarts + 1):
            code = self._attempt(first + restart, restart)
            if self._asked or not may_go_better(code):
                return code if code >= 0 else 128 - code
            reached = reached_step(self._folder)
            if reached > furthest:
                furthest = reached
                standing = 0
                lost = []
            else:
                standing += 1
                lost.append(self._lost)
            if standing >= options.crash_loop:
                is_one = len(set(lost)) == 1
                if not is_one or not self._go_on_without(lost[0]):
                    raise self._crash_loop(standing, furthest, code)
                standing = 0
                lost = []
            if restart < options.max_restarts:
                self._back_off(standing, reached, code)
            if self._asked:
                return TryAgainError.exit_code
        rule = f"the last attempt ended with {_words(code)} at step {furthest:,}"
        raise TryAgainError(
            f"--max-restarts {options.max_restarts}: {rule}. Run the same command again to go on."
        )

    def _crash_loop(self, standing: int, furthest: int, code: int) -> UserError:
        """The error to raise when attempts in a row, the last with this exit code, came no
        further."""
        option = f"--crash-loop {self._options.crash_loop}"
        rule = f"{standing} attempts in a row ended with no step after {furthest:,} ({option})"
        fix = f"See the log above and {self._folder}, and fix the cause"
        error = UserError(f"{rule}; the last with {_words(code)}. {fix}.")
        if code == StorageError.exit_code:
            error.exit_code = code
        return error

    def _back_off(self, standing: int, reached: int, code: int) -> None:
        """Waits before the next attempt: twice as long after each that came no further."""
        longest = min(self._options.max_backoff, self._options.backoff * 2**standing)
        wait = longest * random.uniform(0.5, 1)
        ended = f"ended with {_words(code)} at step {reached:,}"
        self._report(f"{ended}; starts again in {wait:.1f} s")
        self._stop.wait(wait)

    def _attempt(self, number: int, restart: int) -> int:
        """One attempt, on record when it has ended; its exit code, negative for a signal."""
        start = time.time()
        before = reached_step(self._folder)
        self._processes = Processes()
        try:
            for slot, extra in zip(self._slots, self._environments(restart + 1)):
                self._processes.add(slot, self._start(extra))
        except UsageError:
            self._processes.end_all()
            raise
        # A child that was not yet in the list when the signal came did not get it.
        if self._asked:
            self._processes.tell(signal.SIGTERM)
        code = self._wait()
        end = time.time()
        saved, since = saved_step(self._folder, self._local)
        reason = _words(code)
        if self._asked:
            reason = f"stopped by {self._asked}"
        lost_seconds = 0.0
        if code != 0:
            lost_seconds = max(0.0, end - max(start, since))
        record = {
            "attempt": number,
            "host": platform.node(),
            "command": masked(shlex.join(self._command)),
            "processes": len(self._slots),
            "lost": self._lost,
            "start": start,
            "end": end,
            "code": code,
            "reason": reason,
            "from_step": before,
            "reached_step": reached_step(self._folder),
            "saved_step": saved,
            "lost_seconds": lost_seconds,
        }
        run = run_id(self._folder)
        if run:
            record[RUN] = run
        append_attempt(self._folder, record, self._index)
        return code

    def _go_on_without(self, slot: int | None) -> bool:
        """Return whether the job can do without a process, as it then will.

        No device gets more rows at a time than it had.
        """
        had = max(self._options.processes, self._config.mesh.planned_processes or 0)
        devices = usual_devices(self._folder, self._config.mesh.simulated_devices)
        config = self._config
        decided = decided_accumulation(self._folder)
        if config.optimizer.accumulation == "auto" and decided is not None:
            config = with_accumulation(config, decided)
        rest = [other for other in self._slots if other != slot]
        for count in range(len(rest), self._least - 1, -1):
            fewer = fit_to_fewer(config, had, count, devices)
            if not fewer:
                continue
            changed = fewer_settings(self._config, fewer)
            kept = [word for word in self._command if word.partition("=")[0] not in changed]
            settings = [f"{name}={value}" for name, value in changed.items()]
            self._command = [*kept, *settings]
            self._slots = rest[:count]
            said = (
                f"goes on with {count} of {self._options.processes} processes, {' '.join(settings)}"
            )
            self._report(f"process {slot} is lost; {said}")
            return True
        return False

    def _environments(self, attempt: int) -> list[dict[str, str]]:
        """Return what each process of an attempt finds in its environment, beside ours."""
        common = {ATTEMPT: str(attempt)}
        environments = []
        for slot, address in zip(self._slots, addresses(len(self._slots))):
            extra = common | address
            if address:
                extra[SLOT] = str(slot)
            environments.append(extra)
        return environments

    def _start(self, extra: dict[str, str]) -> subprocess.Popen:
        """Starts one process of an attempt."""
        return start_process(self._command, extra)

    def _wait(self) -> int:
        """Wait until all processes have ended; return the exit code of the attempt."""
        ended = self._processes.wait(_SETTLE, lambda: self._deadline)
        self._lost = _lost_slot(ended)
        return ended.code

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = signal.Signals(number).name
        self._deadline = time.monotonic() + self._options.grace
        self._stop.set()
        self._processes.tell(for_child(number))

    def _report(self, text: str) -> None:
        # The terminal may be closed.
        with contextlib.suppress(OSError):
            print(f"supervise: {self._folder}: {text}", file=sys.stderr, flush=True)


def _lost_slot(ended: JobExit) -> int | None:
    """The process that ended an attempt; None: it is not known.

    The first that failed by itself; else the only one that has not ended, which the others wait
    for; else the first that failed.
    """
    if ended.own:
        return ended.own[0]
    if len(ended.running) == 1:
        return ended.running[0]
    return next(iter(ended.failed), None)


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options, and the command after `--`."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _config(command: Sequence[str]) -> RunConfig:
    """The config of the run in a command, for its folder.

    ConfigError: as the run would say, but before it is started.
    """
    for i, word in enumerate(command):
        if word in ("maxtrain.train", "train") or word.endswith("maxtrain/train.py"):
            return load_config(command[i + 1 :])
    fix = "Write -- python -m maxtrain.train ..., or -- maxtrain train ..."
    raise UsageError(f"{shlex.join(command)} does not start a training run. {fix}")


def _words(code: int) -> str:
    """An exit code for people."""
    number = 0
    if code < 0:
        number = -code
    elif code > 128:
        number = code - 128
    if number in set(signal.Signals):
        return signal.Signals(number).name
    return f"exit {code}"


class _Option(NamedTuple):
    """An option with a number: its least value, and what --help says."""

    name: str
    kind: type
    default: float | None
    low: int
    unit: str
    help: str


_OPTIONS = (
    _Option("--processes", int, 1, 1, "N", "processes of a job on this machine"),
    _Option(
        "--min-processes",
        int,
        None,
        1,
        "N",
        "go on with as few when one is lost for good; default: mesh.min_processes, or all of them",
    ),
    _Option("--max-restarts", int, 100, 0, "N", "default: %(default)s"),
    _Option(
        "--crash-loop", int, 3, 1, "N", "attempts without a further step; default: %(default)s"
    ),
    _Option(
        "--backoff",
        float,
        5,
        0,
        "SECONDS",
        "before a restart, doubled while no step is made (%(default)s)",
    ),
    _Option("--max-backoff", float, 300, 0, "SECONDS", "default: %(default)s"),
    _Option(
        "--grace", float, 300, 0, "SECONDS", "from a signal to the end of the command (%(default)s)"
    ),
)


def _parse(argv: Sequence[str], prog: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [OPTION ...] -- python -m maxtrain.train config=NAME key=value ...",
        description=(__doc__ or "").partition("\n\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for option in _OPTIONS:
        parser.add_argument(
            option.name,
            type=option.kind,
            default=option.default,
            metavar=option.unit,
            help=option.help,
        )
    options = parser.parse_args(argv)
    for option in _OPTIONS:
        value = getattr(options, option.name.removeprefix("--").replace("-", "_"))
        # NaN is not at least anything.
        if value is not None and not value >= option.low:
            rule = f"{option.name} {value} must be at least {option.low}"
            raise UsageError(f"{rule}. Set {option.name} to {option.low} or more.")
    return options
