"""A process beside this one in which chat templates run, with limits: they are other people's
programs, and may not end.

Limits are of CPU time, not of time: a machine that is busy, or sleeps, changes nothing. Nothing
within Python could end a template for certain: `9 ** (9 ** 9)` is one call of C, in any thread. A
process can be ended at any time, and so can one of a worker. Its hashes have a fixed seed, and its
clock no zone.
"""

import atexit
import contextlib
import marshal
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection, Pipe
from typing import Any

from data_pipeline import chat_template
from data_pipeline.errors import DataError, TryAgainError, UsageError

CPU_SECONDS = 60  # of one request, of a few conversations: one takes some 100 microseconds
MEMORY_BYTES = 1 << 31
_OUT_OF_MEMORY = 99  # exit status
_MEND = "A template is a program, and this one may not end: mend it"
_PROGRAM = "import sys; sys.path[:] = {path!r}; from data_pipeline.template_process import serve; serve({fd}, {seconds})"


class _Process:
    """A process that serves requests, one by one."""

    def __init__(self) -> None:
        self.pid = os.getpid()  # whose it is: a fork must not talk to it
        self.connection, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, fd=theirs.fileno(), seconds=CPU_SECONDS)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONHASHSEED": "0", "TZ": "UTC"},
            start_new_session=True,  # ctrl-C is for this process, whose end closes the pipe
        )
        theirs.close()

    def close(self, now: bool = False) -> int:
        """Let it end what it does, or end it `now`; its exit status, negative for a signal."""
        self.connection.close()
        if now:
            self._process.kill()
        return self._process.wait()


_lock = threading.Lock()
_running: list[_Process] = []  # at most one


def ask(function: str, *arguments: Any, what: str = "the chat template") -> Any:
    """The result of a function of `chat_template`, computed in the other process.

    Args:
        function: "examine", "render" or "render_all".
        arguments: its own, but a plain tuple for a Template; of types that JSON has.
        what: how a message calls the template.

    Raises:
        ChatError: as the function does.
        DataError: it took more CPU time or memory than there is for it, or ended the process.
        UsageError: jinja2 is not installed.
        TryAgainError: the process was killed.
    """
    with _lock:
        process = _open()
        try:
            process.connection.send_bytes(marshal.dumps((function, arguments)))
            outcome, result = marshal.loads(process.connection.recv_bytes())
        except (EOFError, OSError) as error:
            _running.clear()
            status = process.close()
            raise _explain(status, what) from error
        except BaseException:  # interrupted between a request and its answer, which must not be taken for the next one's
            _running.clear()
            process.close(now=True)
            raise
    if outcome == "result":
        return result
    if outcome == "refused":
        raise chat_template.ChatError(result)
    assert outcome == "usage", outcome
    raise UsageError(result)


def _open() -> _Process:
    """The process that there is, or a new one."""
    if _running and _running[0].pid != os.getpid():
        _running.clear()
    if not _running:
        atexit.unregister(_close)
        atexit.register(_close)
        _running.append(_Process())
    return _running[0]


def _close() -> None:
    while _running:
        process = _running.pop()
        if process.pid == os.getpid():
            process.close()


def _explain(status: int, what: str) -> DataError | TryAgainError:
    """Why the process ended with this status."""
    if status == -signal.SIGXCPU:
        return DataError(f"{what}: takes more than {CPU_SECONDS} s of CPU time. {_MEND}.")
    if status == _OUT_OF_MEMORY:
        return DataError(f"{what}: needs more than {MEMORY_BYTES:,} bytes of memory. {_MEND}.")
    if status in (-signal.SIGKILL, -signal.SIGTERM):
        mend = "Run the same command again, with fewer --workers if memory was short; finished work is kept"
        return TryAgainError(f"{what}: its process was killed. {mend}.")
    return DataError(f"{what}: ended the process that runs it (exit status {status}). {_MEND}.")


def serve(fd: int, seconds: int) -> None:
    """Answer requests from this descriptor, each within so much CPU time, until its other end is
    closed."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(ValueError, OSError):  # not every system limits it
        resource.setrlimit(resource.RLIMIT_AS, (_at_most(MEMORY_BYTES, most), most))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    connection = Connection(fd)
    try:
        while True:
            request = connection.recv_bytes()
            limit = math.ceil(time.process_time()) + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (_at_most(limit, most), most))
            connection.send_bytes(marshal.dumps(_answer(request)))
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    except (EOFError, OSError):  # nobody asks any more
        return


def _at_most(limit: int, most: int) -> int:
    return limit if most == resource.RLIM_INFINITY else min(limit, most)


def _answer(request: bytes) -> tuple[str, Any]:
    """What came of a request: "result", "refused" or "usage"; and the result, or a message.
    MemoryError: too little."""
    function, arguments = marshal.loads(request)
    try:
        if function == "examine":
            found = chat_template.examine(*arguments)
            return "result", found if isinstance(found, str) else tuple(found)
        template = chat_template.Template(*arguments[0])
        return "result", getattr(chat_template, function)(template, *arguments[1:])
    except chat_template.ChatError as error:
        return "refused", str(error)
    except UsageError as error:
        return "usage", str(error)
