"""Errors a user can act on, each with the exit code of the process that it ends.

Every message has three parts: the dotted path and value, the rule, the fix. Our own invariants use
`assert` instead. Codes follow sysexits.h, so that schedulers can tell "fix your input" from "try
again".
"""

import contextlib
import errno
import io
import os
import select
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TextIO

from data_pipeline.base.interrupts import INTERRUPTED, MESSAGE, ending_at_ctrl_c
from data_pipeline.base.masking import masked
from data_pipeline.base.terminal import escape_terminals, visible

# Errors of the file itself, which stay as they are.
_LASTING = {
    None,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOTDIR,
}
# Errors of the disk, the network or the machine, which may pass.
_PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)

# Signals that ask a process to stop. SIGHUP comes when its terminal is closed.
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# The exit code that a shell reports for a program ended by SIGPIPE.
NO_READER = 128 + signal.SIGPIPE


class UserError(ValueError):
    """Base class; `exit_code` is what a command returns to the shell."""

    exit_code = 70


class UsageError(UserError):
    """The command line itself can't be understood."""

    exit_code = 64


class DataError(UserError):
    """Input data is missing, malformed or not what the manifest promises."""

    exit_code = 65


class DivergedError(UserError):
    """Training produced non-finite numbers more often than allowed."""

    exit_code = 70


class OutOfMemoryError(UserError):
    """A device or the host has no memory left, which could not be foreseen."""

    exit_code = 70


class DifferentError(UserError):
    """Numbers that should be the same bit for bit are not."""

    exit_code = 70


class StorageError(UserError):
    """Reading or writing files failed, or no usable checkpoint is left."""

    exit_code = 74


class DamagedError(StorageError):
    """A checkpoint is not what was saved: its directory, and what is wrong with it."""

    def __init__(self, path: Path, what: str, fix: str = ""):
        if not fix:
            look = f"Look at all of them with `maxtrain checkpoint verify {path.parent}`"
            fix = f"{look}. Remove or rename {path} to go on from the checkpoint before it."
        super().__init__(f"{path} is damaged: {what}. {fix}")
        self.path = path
        self.what = what


class TryAgainError(UserError):
    """Interrupted or preempted after saving: the same command goes on from there."""

    exit_code = 75


class LockedError(StorageError):
    """Another process writes there."""


class InterruptedJobError(TryAgainError):
    """Ctrl-C of a command that begins anew."""

    exit_code = INTERRUPTED


class LostProcessError(TryAgainError):
    """Another process of the job can't be reached: it no longer answers where others wait for
    it."""


class ConfigError(UserError):
    """One or more config keys are wrong; `problems` holds one message each.

    Args:
        problems: messages, each with value, rule and fix.
    """

    exit_code = 78

    def __init__(self, problems: list[str] | str):
        if isinstance(problems, str):
            problems = [problems]
        self.problems = list(problems)
        head = f"{len(self.problems)} problems"
        if len(self.problems) == 1:
            head = "1 problem"
        super().__init__(f"{head} in the config:\n" + "\n".join(f"  * {p}" for p in self.problems))


# After these codes the same command may do better; see `may_go_better`.
WORTH_RESTARTING = (StorageError.exit_code, TryAgainError.exit_code)
# After these the same would happen again.
FINAL = (
    UsageError.exit_code,
    DataError.exit_code,
    UserError.exit_code,
    ConfigError.exit_code,
)


def may_go_better(code: int) -> bool:
    """Return whether a command that ended with this exit code is worth another attempt: it stopped
    after saving, storage failed, or a signal ended it (negative, or a shell's 128 + signal).
    """
    by_signal = code < 0 or code > 128
    return by_signal or code in WORTH_RESTARTING


def blame_storage(path: str, error: Exception) -> None:
    """Raise a StorageError if the error says that reading this input file failed for a reason
    outside the file, such as its disk."""
    if isinstance(error, OSError) and error.errno is not None:
        may_pass = error.errno not in _LASTING
        reason = error.strerror
    else:
        # Libraries that read files themselves give no number, but the system's words.
        reason = next((text for text in map(os.strerror, _PASSING) if text in str(error)), "")
        may_pass = bool(reason)
    if may_pass:
        fix = "Look at the disk or network file system that it is on"
        raise StorageError(
            f"{path}: can't be read now ({reason}). {fix}, then run the same command again: it "
            "goes on where it was."
        ) from error


def handled_signals() -> list[signal.Signals]:
    """Return the signals that stop this process: a SIGHUP that it was started to ignore, as `nohup`
    does, stays ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [n for n in STOP_SIGNALS if n != signal.SIGHUP or not is_ignored]


def end_at_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end this process with exit code 75 until other handlers are
    set: there is nothing to save yet.
    """
    for number in handled_signals():
        signal.signal(number, end_by_signal)


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the process, even if nobody reads stderr. An exception instead would show a traceback of
    whatever is being imported."""
    stderr = 2
    try:
        name = signal.Signals(number).name
        text = f"{name}: nothing is left to save. Run the same command again.\n"
        _, writable, _ = select.select([], [stderr], [], 1)
        if writable:
            os.write(stderr, text.encode())
    finally:
        os._exit(TryAgainError.exit_code)


@contextlib.contextmanager
def ending_with_reader() -> Iterator[None]:
    """Ends the process without a word if nobody reads its standard output any more, as when `head`
    has read enough. Its exit code is then that of a program that SIGPIPE has ended."""
    try:
        try:
            yield
        finally:
            # Flushing the rest of the buffer would fail where the error cannot be reported.
            if sys.stdout is not None:
                sys.stdout.flush()
    except SystemExit as stop:
        # argparse passes over a help that could not be written.
        if not stop.code and sys.stdout is not None and _is_without_reader(sys.stdout):
            raise SystemExit(NO_READER) from None
        raise
    except BrokenPipeError:
        if sys.stdout is None or not _is_without_reader(sys.stdout):
            raise
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
        raise SystemExit(NO_READER) from None


def _is_without_reader(stream: TextIO) -> bool:
    """Return whether a stream is a pipe whose other end is closed."""
    try:
        poll = select.poll()
        poll.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (OSError, ValueError):
        # It is no file.
        return False


def _at_ctrl_c(resumes: bool) -> contextlib.AbstractContextManager[None]:
    """Return the context that a job runs in; `resumes` is that of `run_command`."""
    if resumes:
        return contextlib.nullcontext()
    return ending_at_ctrl_c()


def _interrupted(resumes: bool) -> TryAgainError:
    """The error of a command that Ctrl-C has ended; `resumes` as of `run_command`."""
    if resumes:
        return TryAgainError(f"{MESSAGE.removesuffix('.')}: it goes on where it was.")
    return InterruptedJobError(MESSAGE)


def run_command(job: Callable[[], object], resumes: bool = True) -> int:
    """Run the job of a command. An error that the user can fix is printed to stderr as a message, a
    bug of ours as a traceback.

    Args:
        job: the command's work.
        resumes: whether the same command goes on where it was interrupted; else Ctrl-C ends it
            with 130, as a shell does.

    Returns:
        The exit code.
    """
    # Names of files may be bytes that are not text in any encoding.
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    escape_terminals()
    again = "the same command again."
    if resumes:
        again = "the same command again: it goes on where it was."
    try:
        with ending_with_reader(), _at_ctrl_c(resumes):
            job()
        return 0
    except SystemExit as stop:
        # rich ends with 1 where nobody reads.
        if stop.code in (NO_READER, 1):
            return NO_READER
        # argparse has printed the reason.
        if stop.code:
            return UsageError.exit_code
        return 0
    except UserError as problem:
        error = problem
    except KeyboardInterrupt:
        # What libraries have begun ends with the process, and is nothing to warn of after that.
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        error = _interrupted(resumes)
    except OSError as problem:
        what = problem.strerror or problem
        if problem.filename:
            what = f"{problem.filename}: {problem.strerror}"
        error = StorageError(f"{what}. Free space or restore access, then run {again}")
    except MemoryError:
        error = OutOfMemoryError(
            f"this machine has no memory left. End what else uses it, then run {again}"
        )
    except Exception:
        print(masked(traceback.format_exc()), end="", file=sys.stderr)
        return UserError.exit_code
    message = f"error: {error}"
    # Nothing is wrong with an interrupted command.
    if isinstance(error, TryAgainError):
        message = str(error)
    print(visible(masked(message)), file=sys.stderr)
    return error.exit_code
