"""The zygote: a process that forks the processes of programs and judges.

It is started once for many programs, with Python and the usual modules imported, so that a program
starts in milliseconds. It never runs a program, has nothing secret in its memory, and dies with its
parent. A child gets its file descriptors and limits from the zygote, and its program over a socket
that the zygote does not see.
"""

import contextlib
import importlib
import io
import json
import os
import platform
import resource
import signal
import socket
import sys
from typing import Any

from maxtrain.rl.rewards.sandbox import confinement, judge, program, seccomp
from maxtrain.rl.rewards.worker_process import die_with

# Roles of a child: a program whose functions are called, one that reads stdin, and a judge. The
# descriptors of a child begin with 0 for stdin, 1 for stdout, 2 for stderr, 3 for a socket.
CHILDREN = {
    "functions": program.serve_functions,
    "script": program.run_script,
    "judge": judge.serve,
}
MAX_FDS = 8
MESSAGE_BYTES = 4096
# The message of a child after its rights were dropped.
_CONFINED = b"confined"
_FIRST_FD = 32
# Imported once for all programs.
_MODULES = (
    *("abc", "array", "ast", "bisect", "cmath", "collections", "contextlib", "copy", "dataclasses"),
    *("datetime", "decimal", "enum", "fractions", "functools", "heapq", "io", "itertools", "json"),
    *("math", "operator", "queue", "random", "re", "statistics", "string", "textwrap", "threading"),
    *("time", "traceback", "types", "typing", "unittest"),
)
# Libraries use one thread each, because the stacks of many threads would exhaust the address space
# of a program.
_ENVIRONMENT = {
    "PATH": os.defpath,
    "LANG": "C.UTF-8",
    "TZ": "UTC",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


def serve(fd: int, parent: int, kind: str) -> None:
    """Fork children on request, until there are no more requests.

    The first message is {"ready": true}, or {"error": why this kind is not possible}.
    """
    die_with(parent)
    control = socket.socket(fileno=fd)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name in _MODULES:
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(_ENVIRONMENT)
    filter_ = b""
    try:
        if kind != confinement.NOTHING:
            if not seccomp.is_available():
                raise OSError(f"there is no filter of system calls for {platform.machine()}")
            filter_ = seccomp.build_filter(platform.machine())
        if kind == confinement.NAMESPACES:
            confinement.enter_namespaces()
            # New credentials have cleared the setting.
            die_with(parent)
        confinement.readable_paths()
    except OSError as error:
        control.sendall(json.dumps({"error": str(error)}).encode())
        return
    control.sendall(json.dumps({"ready": True}).encode())
    while True:
        message, fds, _, _ = socket.recv_fds(control, MESSAGE_BYTES, MAX_FDS)
        if not message:
            return
        request = json.loads(message)
        if "kill" in request:
            answer = _kill(request["kill"])
        else:
            answer = _fork(control, request, fds, kind, filter_)
        control.sendall(json.dumps(answer).encode())


def _kill(child: int) -> dict[str, Any]:
    """Kill a child and its session, and return its exit status, which is its own if it had ended
    before."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return {"status": os.waitstatus_to_exitcode(status)}


def _fork(
    control: socket.socket, request: dict[str, Any], fds: list[int], kind: str, filter_: bytes
) -> dict[str, Any]:
    """Fork a child. The answer says whether its rights were dropped before it runs anything."""
    zygote = os.getpid()
    read_fd, write_fd = os.pipe()
    child = -1
    try:
        child = os.fork()
    except OSError as error:
        os.close(read_fd)
        return {"error": f"no process can be forked ({error})"}
    finally:
        if child:
            for fd in (*fds, write_fd):
                os.close(fd)
    if child:
        with open(read_fd, "rb") as pipe:
            message = pipe.read(MESSAGE_BYTES // 2)
        if message == _CONFINED:
            return {"pid": child}
        _kill(child)
        return {"error": message.decode(errors="replace") or "the process ended"}
    status = 1
    try:
        die_with(zygote)
        os.setsid()
        control.close()
        os.close(read_fd)
        write_fd = _arrange(fds, write_fd)
        try:
            folder = request["folder"] or confinement.FOLDER
            os.environ.update(HOME=folder, TMPDIR=folder)
            limits = (request["seconds"], request["memory_bytes"])
            confinement.confine(kind, folder, *limits, filter_)
        except BaseException as error:
            os.write(write_fd, f"{type(error).__name__}: {error}".encode()[:1000])
            raise
        os.write(write_fd, _CONFINED)
        os.close(write_fd)
        status = CHILDREN[request["role"]]()
    except BaseException as error:
        with contextlib.suppress(BaseException):
            os.write(2, f"{type(error).__name__}: {error}\n".encode()[:MESSAGE_BYTES])
    finally:
        os._exit(status)


def _arrange(fds: list[int], last: int) -> int:
    """Put the descriptors at 0, 1, 2 and so on, followed by the last one, whose new number is
    returned; close all others."""
    fds = [*fds, last]
    for place, fd in enumerate(fds):
        os.dup2(fd, _FIRST_FD + place)
    for place in range(len(fds)):
        os.dup2(_FIRST_FD + place, place)
    os.closerange(len(fds), _open_files_limit())
    # The old streams have cached properties (seekability) of other descriptors.
    sys.stdin = sys.__stdin__ = _text_stream(0, "r")
    sys.stdout = sys.__stdout__ = _text_stream(1, "w")
    sys.stderr = sys.__stderr__ = _text_stream(2, "w")
    return len(fds) - 1


def _text_stream(fd: int, mode: str) -> io.TextIOWrapper:
    raw = io.FileIO(fd, mode, closefd=False)
    binary = io.BufferedReader(raw) if mode == "r" else io.BufferedWriter(raw)
    return io.TextIOWrapper(binary, encoding="utf-8", errors="replace", line_buffering=fd == 2)


def _open_files_limit() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return 1 << 20
    return most
