"""A process beside this one in which chat templates run, with limits: they are other people's
programs, and may not end.

The limit is on CPU time, so that it does not matter whether the machine is busy or sleeps. It takes
a process, since nothing within Python can end every template: `9 ** (9 ** 9)` is one call of C, in
any thread. Worker processes have a process of their own for it, too. Its hashes have a fixed seed,
and its clock is in UTC.
"""

import atexit
import contextlib
import json
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

from data_pipeline.base import strict_json
from data_pipeline.base.bare_environment import bare_environment
from data_pipeline.base.errors import DataError, TryAgainError, UsageError
from data_pipeline.chat import template as chat_template

# For one request, of a few conversations; one conversation takes some 100 microseconds.
CPU_SECONDS = 60
MEMORY_BYTES = 1 << 31
# Exit status.
_OUT_OF_MEMORY = 99
_MEND = "A template is a program, and this one may not end: correct it"
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; "
    "from data_pipeline.chat.template_process import serve; serve({fd}, {seconds})"
)


class _Process:
    """A process that serves requests, one by one."""

    def __init__(self) -> None:
        # The process that it belongs to; a fork of that one must not talk to it.
        self.pid = os.getpid()
        self.connection, theirs = Pipe()
        program = _PROGRAM.format(path=sys.path, fd=theirs.fileno(), seconds=CPU_SECONDS)
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=bare_environment(PYTHONHASHSEED="0", TZ="UTC"),
            # Ctrl-C goes to this process alone, whose end closes the pipe.
            start_new_session=True,
        )
        theirs.close()

    def close(self, now: bool = False) -> int:
        """Ends the process, after its last request or `now`. Returns its exit status, which is
        negative for a signal."""
        self.connection.close()
        if now:
            self._process.kill()
        return self._process.wait()


_lock = threading.Lock()
# At most one.
_running: list[_Process] = []


def ask(function: str, *arguments: Any, what: str = "the chat template") -> Any:
    """The result of a function of `chat_template`, computed in the other process.

    Args:
        function: "examine", "render" or "render_all".
        arguments: the function's arguments, of types that JSON has; a Template as a plain tuple.
        what: the template's name in messages.

    Raises:
        ChatError: as the function does.
        DataError: the template took more CPU time or memory than it may, or ended the process.
        UsageError: jinja2 is not installed.
        TryAgainError: the process was killed.
    """
    with _lock:
        process = _open()
        try:
            process.connection.send_bytes(marshal.dumps((function, arguments)))
            outcome, result = strict_json.loads(process.connection.recv_bytes())
        except (EOFError, OSError) as error:
            _running.clear()
            status = process.close()
            raise _explain(status, what) from error
        except BaseException:
            # Interrupted before the answer came, which the next request must not take for its own.
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
    """The running process, or a new one."""
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
        fix = "Run the same command again, with fewer --workers if memory was short"
        return TryAgainError(f"{what}: its process was killed. {fix}; finished work is kept.")
    return DataError(f"{what}: ended the process that runs it (exit status {status}). {_MEND}.")


def serve(fd: int, seconds: int) -> None:
    """Answer requests from a descriptor until its other end is closed; each request may take
    `seconds` seconds of CPU time.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    # Not every system limits memory.
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_AS, (_at_most(MEMORY_BYTES, most), most))
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    connection = Connection(fd)
    try:
        while True:
            request = connection.recv_bytes()
            limit = math.ceil(time.process_time()) + seconds
            resource.setrlimit(resource.RLIMIT_CPU, (_at_most(limit, most), most))
            connection.send_bytes(json.dumps(_answer(request)).encode())
    except MemoryError:
        sys.exit(_OUT_OF_MEMORY)
    except (EOFError, OSError):
        # The other end is closed.
        return


def _at_most(limit: int, most: int) -> int:
    """A limit that is not above the system's `most`."""
    if most == resource.RLIM_INFINITY:
        return limit
    return min(limit, most)


def _answer(request: bytes) -> tuple[str, Any]:
    """The outcome of a request ("result", "refused" or "usage"), and its result or a message, which
    goes back as JSON: this process runs programs of others, and bytes for `marshal` can crash.
    MemoryError: the process has too little memory."""
    function, arguments = marshal.loads(request)
    try:
        if function == "examine":
            found = chat_template.examine(*arguments)
            if isinstance(found, chat_template.TemplateNames):
                return "result", tuple(found)
            return "result", found
        template = chat_template.Template(*arguments[0])
        return "result", getattr(chat_template, function)(template, *arguments[1:])
    except chat_template.ChatError as error:
        return "refused", str(error)
    except UsageError as error:
        return "usage", str(error)
