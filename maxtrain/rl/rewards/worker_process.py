"""What runs in the processes of a pool: a server that forks workers, and the workers.

The server is one clean process: it imports what workers need once, so that a worker which was
killed is replaced in milliseconds. It never runs a reward, hence it always answers, and it notices
the end of the process that it serves, however that ended; it then kills all its workers. On Linux,
workers also die with the server, by the kernel.

A worker is the leader of a session of its own, so that what it starts is killed with it.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import pickle
import resource
import select
import signal
import socket
import struct
import sys
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
# Characters of a message about an error.
_DETAIL = 2000


def die_with(parent: int) -> None:
    """On Linux, the kernel kills this process when its parent ends, which is `parent`. Call it in a
    process that was just started."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


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
            ready, _, _ = select.select([control], [], [], _LOOK)
            if ready and not _obey(control, workers, killed, memory_bytes):
                return
            killed -= {worker for worker in killed if _is_gone(worker, os.WNOHANG)}
    finally:
        for worker in workers:
            _kill(worker)
        for worker in workers | killed:
            _is_gone(worker, 0)


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
        return "error", None, _described(error)


def _described(error: Exception) -> str:
    """An error with the place where it was raised."""
    said = "".join(traceback.format_exception_only(error)).strip()
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return said[:_DETAIL]
    return f"{said[:_DETAIL]} ({frames[-1].filename}, line {frames[-1].lineno})"
