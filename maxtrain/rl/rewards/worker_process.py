"""What runs in the processes of a pool: a server that forks workers, and the workers.

The server is one clean process: it imports what workers need once, so that a worker which was
killed is replaced in milliseconds. It never runs a reward, hence it always answers, and it notices
the end of the process that it serves, however that ended; it then kills all its workers. On Linux,
workers also die with the server, by the kernel.

A worker is the leader of a session of its own, so that what it starts is killed with it. On Linux,
so is what left that session: processes whose parent has ended become children of the worker, and
those of a worker that has ended become children of the server, which kills them.
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

from maxtrain.rl.rewards.dotted import load_function

# Messages to the server: a command, and the id of a process.
COMMAND = struct.Struct("<cq")
FORK = b"f"
KILL = b"k"
# Its answer: the id of the process that it forked or killed; 0: it could not.
ANSWER = struct.Struct("<q")
# Seconds between two looks at whether the parent lives.
_LOOK = 1.0
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
# Seconds between two looks for processes that were left, and in which they have to be gone at last.
_SWEEP = 0.05
_END_SECONDS = 5.0
# Characters of a message about an error.
_DETAIL = 2000


def die_with(parent: int) -> None:
    """On Linux, the kernel kills this process when its parent ends, which is `parent`. Call it in a
    process that was just started."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """On Linux, descendants whose parent has ended become children of this process."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _children() -> dict[int, list[int]]:
    """The children of each process, by the ids of both; empty where there is no /proc."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            with open(f"/proc/{name}/stat", "rb") as file:
                # The name of a program, in brackets, may have spaces and brackets.
                parent = int(file.read().rpartition(b")")[2].split()[1])
            found.setdefault(parent, []).append(int(name))
    return found


def _descendants(process: int) -> list[int]:
    """The children of a process, their children, and so on."""
    children = _children()
    found = list(children.get(process, []))
    for each in found:
        found += children.get(each, [])
    return found


def serve(fd: int, parent: int, preload: list[str], memory_bytes: int) -> None:
    """Forks and kills workers as the commands say, until nobody is left to give commands.

    Args:
        fd: the socket of the commands.
        parent: the process that gives them.
        preload: modules that are imported before the first worker is forked, or functions
            (`module:function`) that are called once; what fails is left to workers, which say so.
        memory_bytes: the address space of a worker; 0: no limit.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    adopt_orphans()
    control = socket.socket(fileno=fd)
    for name in preload:
        with contextlib.suppress(Exception):
            _preload(name)
    # Collecting garbage in workers would copy the pages of what is here.
    gc.freeze()
    workers: set[int] = set()
    # Killed, but perhaps not gone: that takes a while where there is much memory to be freed.
    killed: set[int] = set()
    try:
        while os.getppid() == parent:
            # What a killed worker leaves behind becomes a child of this process a little later.
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
    """Waits for killed processes, and kills all children of this process that are no workers."""
    gone = {worker for worker in killed if _is_gone(worker, os.WNOHANG)}
    killed -= gone
    for child in _children().get(os.getpid(), []):
        if child not in workers and child not in killed:
            _kill(child)
            killed.add(child)


def _preload(name: str) -> None:
    if ":" in name:
        load_function(name)()
    else:
        importlib.import_module(name)


def _obey(control: socket.socket, workers: set[int], killed: set[int], memory_bytes: int) -> bool:
    """Does one command. False: there will be no more."""
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
    """The id of a new worker that talks over the descriptor; 0: the system has no room for it."""
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
    """Kills a worker and what it started. It was not waited for before, so that its id is still its
    own."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        # It can't start more, nor wait for a process, whose id would then be another one's.
        os.kill(worker, signal.SIGSTOP)
    for process in _descendants(worker):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(process, signal.SIGKILL)
    for kill in (os.kill, os.killpg):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(worker, signal.SIGKILL)


def _is_gone(worker: int, options: int) -> bool:
    """Waits for the end of a worker, or with os.WNOHANG only looks."""
    try:
        pid, _ = os.waitpid(worker, options)
    except ChildProcessError:
        return True
    return pid == worker


def work(fd: int, memory_bytes: int) -> None:
    """Answers requests until the other end of the descriptor is closed."""
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
    """An outcome ("ok" or "error"), the value, and what is to be said about an error.

    The answer is JSON, since a worker is not trusted: it deals with what a model wrote. A
    MemoryError ends the process, in which nothing is certain any more.
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
    """An error with the place where it was raised: the last one in these files, if there is one,
    else the last one of all."""
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    frames = [frame for frame in frames if frame.filename in files] or frames
    if not frames:
        return said[:_DETAIL]
    return f"{said[:_DETAIL]} ({frames[-1].filename}, line {frames[-1].lineno})"
