"""Ctrl-C handling of a command that cannot resume: it ends within three seconds, whatever it
computes, and leaves nothing behind.

Python runs signal handlers only between two of its own steps. A library call that computes for
minutes would delay Ctrl-C that long, so a thread ends the process instead.
"""

import atexit
import contextlib
import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import NoReturn

# The exit code that a shell reports for a program ended by SIGINT.
INTERRUPTED = 128 + signal.SIGINT
MESSAGE = "interrupted. Run the same command again."
# That the command has for its own end, in which it cleans up.
_SECONDS = 1.5
# That removing has, while threads of a library go on writing.
_REMOVING_SECONDS = 1.0
# In which a process can end after that, and which another thread may keep it waiting.
_UNDISTURBED_SECONDS = 0.3
# What a command is writing, and nobody is to find.
_unfinished: set[Path] = set()
# Files in the place of what Ctrl-C has left of it, until the process ends.
_places: set[Path] = set()


@contextlib.contextmanager
def unfinished(directory: Path) -> Iterator[None]:
    """Register a directory that is removed if the thread ends the process during the block. The
    directory cannot come back where Ctrl-C ends the block: threads of a library may go on writing
    until the process ends.
    """
    _unfinished.add(directory)
    try:
        yield
    except KeyboardInterrupt:
        _put_file_in_place_of(directory)
        raise
    finally:
        _unfinished.discard(directory)


def end_at_ctrl_c() -> None:
    """Let Ctrl-C end the process at once until `ending_at_ctrl_c`: there is nothing to clean up
    yet, and an exception would show a traceback of whatever is being imported.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_now)


@contextlib.contextmanager
def ending_at_ctrl_c() -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt during the block, and end the process if that has no
    effect.

    Nothing is done outside of the main thread, or where Ctrl-C is ignored or has another handler.
    Handlers that the block sets itself are left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) not in (
        signal.default_int_handler,
        _end_now,
    ):
        yield
        return
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    ended = threading.Event()
    thread = threading.Thread(target=_watch, args=(reading, ended), daemon=True)
    thread.start()
    before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        # The end of what it reads ends the thread.
        os.close(writing)
        thread.join()
        os.close(reading)


def _watch(reading: int, ended: threading.Event) -> None:
    """Ends the process some time after a SIGINT that nobody else has a handler for."""
    while numbers := os.read(reading, 1):
        is_ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if numbers[0] == signal.SIGINT and is_ours and not ended.wait(_SECONDS):
            _end_now()


def _end_now(number: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """Ends the process, even if nobody reads stderr."""
    del number, frame
    try:
        for directory in tuple(_unfinished):
            _put_file_in_place_of(directory)
        os.set_blocking(2, False)
        os.write(2, f"{MESSAGE}\n".encode())
    finally:
        _remove_places()
        os._exit(INTERRUPTED)


def _put_file_in_place_of(directory: Path) -> None:
    """Removes a directory, into which threads may be writing still: where a file is, they can't
    make it again."""
    deadline = time.monotonic() + _REMOVING_SECONDS
    while time.monotonic() < deadline:
        shutil.rmtree(directory, ignore_errors=True)
        try:
            directory.touch(exist_ok=False)
        except FileExistsError:
            # It is back already.
            continue
        except OSError:
            return
        _places.add(directory)
        return


@atexit.register
def _remove_places() -> None:
    """The last thing that a process does. No thread of Python runs between this and the end: it
    would write there again."""
    if not _places:
        return
    # A thread that waits for the interpreter requests it after this time, not after 5 ms; threads
    # that have requested it get it during the sleep.
    sys.setswitchinterval(_UNDISTURBED_SECONDS)
    time.sleep(0.05)
    keeping_the_interpreter = ctypes.PyDLL(None)
    for place in tuple(_places):
        # `os.unlink` would hand the interpreter to another thread while the kernel works.
        keeping_the_interpreter.unlink(os.fsencode(place))
