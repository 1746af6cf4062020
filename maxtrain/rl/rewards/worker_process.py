"""The processes of a pool: a server that forks workers, and the workers.

The server is one clean process. It imports what workers need once, so that a killed worker is
replaced in milliseconds. It never runs a reward, so it always answers. It notices any end of the
process that it serves, and then kills all its workers. On Linux, the kernel also kills workers when
the server ends.

A worker is the leader of a session of its own, so that its child processes are killed with it. On
Linux, processes that left the session are killed as well: orphans become children of the worker,
and those of a dead worker become children of the server, which kills them.
"""

import contextlib
import ctypes
import gc
import importlib
import inspect
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards.dotted import load_function

# Messages to the server: a command, and the id of a process.
COMMAND = struct.Struct("<cq")
FORK = b"f"
KILL = b"k"
# The server's answer: the id of the process that it forked or killed; 0: it could not.
ANSWER = struct.Struct("<q")
# Seconds between checks that the parent is alive.
_LOOK = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Seconds between searches for leftover processes, and the limit for their end at shutdown.
_SWEEP = 0.05
_END_SECONDS = 5.0
# Most characters of an error message.
_DETAIL = 2000


def die_with(parent: int) -> None:
    """Let the kernel (on Linux) kill this process when its parent ends, which must be `parent`.
    Call it in a new process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Make descendants whose parent has ended children of this process (on Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> dict[int, list[int]]:
    """Return the children of each process, by process id; empty without /proc."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program, in brackets, may contain spaces and brackets.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


def _descendants(process: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children = _children()
    found = list(children.get(process, []))
    for each in found:
        found += children.get(each, [])
    return found


def serve(fd: int, parent: int, preload: list[str], memory_bytes: int) -> None:
    """Fork and kill workers on command, until the commanding process has ended.

    Args:
        fd: the socket of the commands.
        parent: the process that sends them.
        preload: modules that are imported before the first worker is forked, or functions
            (`module:function`) that are called once; workers report a failure when they import
            again.
        memory_bytes: the address space of a worker; 0: no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    control = socket.socket(fileno=fd)
    for name in preload:
        with contextlib.suppress(Exception):
            _preload(name)
    # Garbage collection in workers would otherwise copy the shared memory pages.
    gc.freeze()
    workers: set[int] = set()
    # Killed processes that may still exist, because freeing much memory takes a while.
    killed: set[int] = set()
    try:
        while os.getppid() == parent:
            # Children of a killed worker become children of this process a little later.
            patience = _SWEEP if killed else _LOOK
            ready, _, _ = select.select([control], [], [], patience)
            if ready and not _obey(control, workers, killed, memory_bytes):
                return
            if killed:
                _sweep(workers, killed)
    finally:
        for worker in workers:
            _kill(worker)
        killed |= workers
        ends = time.monotonic() + _END_SECONDS
        while killed and time.monotonic() < ends:
            _sweep(set(), killed)
            time.sleep(_SWEEP / 10)


def _sweep(workers: set[int], killed: set[int]) -> None:
    """Wait for killed processes, and kill all children of this process that are no workers."""
    gone = {worker for worker in killed if _is_gone(worker, os.WNOHANG)}
    killed -= gone
    for child in _children().get(os.getpid(), []):
        if child not in workers and child not in killed:
            _kill(child)
            killed.add(child)


def _preload(name: str) -> None:
    """Import a module, or call a function."""
    if ":" in name:
        load_function(name)()
    else:
        importlib.import_module(name)


def _obey(control: socket.socket, workers: set[int], killed: set[int], memory_bytes: int) -> bool:
    """Execute one command. False: there will be no more commands."""
    message, fds, _, _ = socket.recv_fds(control, COMMAND.size, 1)
    if len(message) < COMMAND.size:
        return False
    command, target = COMMAND.unpack(message)
    if command == FORK:
        target = _fork(fds[0], control, memory_bytes)
        if target:
            workers.add(target)
    elif target in workers:
        _kill(target)
        workers.discard(target)
        killed.add(target)
    try:
        control.sendall(ANSWER.pack(target))
    except OSError:
        return False
    return True


def _fork(fd: int, control: socket.socket, memory_bytes: int) -> int:
    """Fork a worker that communicates over the descriptor, and return its id; 0: the system has no
    room for it."""
    server = os.getpid()
    try:
        worker = os.fork()
    except OSError:
        worker = 0
        os.close(fd)
        return worker
    if worker == 0:
        try:
            control.close()
            die_with(server)
            work(fd, memory_bytes)
        finally:
            os._exit(0)
    os.close(fd)
    return worker


def _kill(worker: int) -> None:
    """Kill a worker and its descendants. Nobody has waited for it yet, so its process id is still
    valid."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # A stopped worker can neither start processes nor reap them, which would let their ids be
        # reused.
        os.kill(worker, signal.SIGSTOP)
    for process in _descendants(worker):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(worker, signal.SIGKILL)


def _is_gone(worker: int, options: int) -> bool:
    """Return whether a worker has ended; wait for its end unless os.WNOHANG is given."""
    try:
        pid, _ = os.waitpid(worker, options)
    except ChildProcessError:
        return True
    return pid == worker


def work(fd: int, memory_bytes: int) -> None:
    """Answer requests until the other end of the descriptor is closed."""
    os.setsid()
    adopt_orphans()
    if memory_bytes:
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        if most != resource.RLIM_INFINITY:
            memory_bytes = min(memory_bytes, most)
        # Not every system limits memory.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, most))
    connection = Connection(fd)
    while True:
        try:
            request = connection.recv_bytes()
        except (EOFError, OSError):
            return
        connection.send_bytes(json.dumps(_answer(request)).encode())


def _answer(request: bytes) -> tuple[str, Any, str]:
    """Return an outcome ("ok" or "error"), the value, and a text about an error.

    The answer is JSON, because a worker processes model output and is not trusted. A MemoryError
    ends the process, whose state is unreliable then.
    """
    functions = []
    try:
        paths, arguments = pickle.loads(request)
        functions = [load_function(path) for path in paths]
        if arguments is None:
            return "ok", None, ""
        value = functions[0](*arguments)
        json.dumps(value)
        return "ok", value, ""
    except MemoryError:
        os._exit(99)
    except Exception as error:
        files = {
            inspect.unwrap(each).__code__.co_filename for each in functions[1:] if _has_code(each)
        }
        return "error", None, _described(error, files)


def _has_code(function: Any) -> bool:
    return hasattr(inspect.unwrap(function), "__code__")


def _described(error: Exception, files: set[str]) -> str:
    """Describe an error with the place where it was raised: the last frame in these files if there
    is one, else the last frame."""
    if isinstance(error, ConfigError):
        return " ".join(error.problems)
    text = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename in files] or frames
    if not frames:
        return text[:_DETAIL]
    return f"{text[:_DETAIL]} ({frames[-1].filename}, line {frames[-1].lineno})"
