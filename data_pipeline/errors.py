"""Errors a user can act on, each with the exit code of the process that it ends.

Every message has three parts: the dotted path and value, the rule, the mend. Our own invariants use
`assert` instead. Codes follow sysexits.h, so that schedulers can tell "fix your input" from "try
again".
"""

import errno
import io
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

_LASTING = {
    None,
    errno.EACCES,
    errno.EPERM,
    errno.EINVAL,
    errno.EISDIR,
    errno.ENOTDIR,
}  # of a file itself
_PASSING = (
    errno.EIO,
    errno.ESTALE,
    errno.ETIMEDOUT,
    errno.ENOTCONN,
    errno.ENOMEM,
    errno.EMFILE,
    errno.ENFILE,
)


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

    def __init__(self, path: Path, what: str):
        look = f"Look at all of them with `maxtrain checkpoint verify {path.parent}`"
        super().__init__(
            f"{path} is damaged: {what}. {look}. Remove or rename {path} to go on from the checkpoint before it."
        )
        self.path, self.what = path, what


class TryAgainError(UserError):
    """Interrupted or preempted after saving: the same command goes on from there."""

    exit_code = 75


class LockedError(StorageError):
    """Another process writes there."""


class LostProcessError(TryAgainError):
    """Another process of the job is out of reach: it does not come to anything any more that waits
    for it."""


class ConfigError(UserError):
    """One or more config keys are wrong; `problems` holds one message each.

    Args:
        problems: messages, each with value, rule and mend.
    """

    exit_code = 78

    def __init__(self, problems: list[str] | str):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        count = len(self.problems)
        head = "1 problem" if count == 1 else f"{count} problems"
        super().__init__(f"{head} in the config:\n" + "\n".join(f"  * {p}" for p in self.problems))


def blame_storage(path: str, error: Exception) -> None:
    """Raise a StorageError if reading this input file failed for a reason that is not in it, as far
    as the error says.

    Libraries that read files themselves say it in words.
    """
    if isinstance(error, OSError) and error.errno is not None:
        passing, reason = error.errno not in _LASTING, error.strerror
    else:
        reason = next((text for text in map(os.strerror, _PASSING) if text in str(error)), "")
        passing = bool(reason)
    if passing:
        mend = "Look at the disk or network file system that it is on, then run the same command again: it goes on where it was"
        raise StorageError(f"{path}: can't be read now ({reason}). {mend}.") from error


def end_at_signals() -> None:
    """Until somebody else handles them, SIGINT and SIGTERM end this process with exit 75: there is
    nothing to save yet."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end_by_signal)


def end_by_signal(number: int, frame: FrameType | None) -> None:
    """Ends the process, even if nobody reads stderr; an exception would be a traceback of whatever
    is being imported."""
    try:
        if select.select([], [2], [], 1)[1]:
            os.write(
                2,
                f"{signal.Signals(number).name}: nothing is left to save. Run the same command again.\n".encode(),
            )
    finally:
        os._exit(TryAgainError.exit_code)


def run_command(job: Callable[[], object], resumes: bool = True) -> int:
    """The exit code of a command that does this job. What a user can mend is a message on stderr, a
    bug of ours a traceback.

    `resumes`: the same command goes on where it was interrupted.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(
                errors="backslashreplace"
            )  # names of files may be bytes that are no text in any encoding
    again = (
        "the same command again: it goes on where it was." if resumes else "the same command again."
    )
    try:
        job()
        return 0
    except SystemExit as stop:  # argparse has said why
        return UsageError.exit_code if stop.code else 0
    except UserError as problem:
        error = problem
    except KeyboardInterrupt:
        error = TryAgainError(f"interrupted. Run {again}")
    except OSError as problem:
        what = (
            f"{problem.filename}: {problem.strerror}"
            if problem.filename
            else problem.strerror or problem
        )
        error = StorageError(f"{what}. Free space or mend access, then run {again}")
    except MemoryError:
        error = OutOfMemoryError(
            f"this machine has no memory left. End what else uses it, then run {again}"
        )
    except Exception:
        traceback.print_exc()
        return UserError.exit_code
    print(error if isinstance(error, TryAgainError) else f"error: {error}", file=sys.stderr)
    return error.exit_code
