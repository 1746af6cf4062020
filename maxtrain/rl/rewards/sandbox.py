"""Runs one program that a model wrote, with limits: of CPU time, memory, files and time, in an
empty folder, and where the system lets a user do so without a network and with processes of its
own.

It keeps accidents from this machine: endless loops, memory, files, processes that stay. It is no
wall against a program that looks for a way out: whatever this user may read, the program may read.
For that, run the whole job in a container, or as a user who may do nothing.

This file is also the program that is started, as `python -I sandbox.py`, and imports nothing of
ours.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

PASSED = "passed"
FAILED = "failed"
TIMEOUT = "timeout"
# Bytes that a program may write to a file, and that are kept of what it prints.
_FILE_BYTES = 16 << 20
_OUTPUT_BYTES = 4000
_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38


class Ran(NamedTuple):
    """How a program ended: PASSED, FAILED or TIMEOUT; the end of what it printed; and whether it
    was without a network."""

    outcome: str
    output: str
    isolated: bool


def run_program(code: str, tests: str, seconds: float, memory_bytes: int) -> Ran:
    """Runs code, and then tests with the names that the code defined.

    PASSED means that the tests were run to their end: a program that ends before, even with exit
    status 0, has FAILED.

    Args:
        code, tests: programs in Python.
        seconds: limit, of CPU time (rounded up) and of time.
        memory_bytes: limit of the address space.
    """
    # Printed after the tests. A program that ends early, or prints that all is well, lacks it.
    proof = os.urandom(16).hex()
    job = {"code": code, "tests": tests, "proof": proof, "seconds": seconds}
    job["memory_bytes"] = memory_bytes
    job["parent"] = os.getpid()
    with tempfile.TemporaryDirectory(prefix="reward-", ignore_cleanup_errors=True) as folder:
        process = subprocess.Popen(
            [sys.executable, "-I", str(Path(__file__))],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder, "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        try:
            assert process.stdin is not None and process.stdout is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(json.dumps(job).encode())
                process.stdin.close()
            output, in_time = _read(process.stdout.fileno(), seconds)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
    said = output.decode(errors="replace")
    isolated = said.startswith("isolated\n")
    said = said.partition("\n")[2]
    passed = said.endswith(f"\n{proof}\n")
    if passed:
        return Ran(PASSED, said.removesuffix(f"\n{proof}\n"), isolated)
    if not in_time or process.returncode == -signal.SIGXCPU:
        return Ran(TIMEOUT, said, isolated)
    return Ran(FAILED, said, isolated)


def _read(fd: int, seconds: float) -> tuple[bytes, bool]:
    """What is printed until the end or the limit: its first line and its end; and whether the end
    came."""
    ends = time.monotonic() + seconds
    first = b""
    rest = b""
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, ends - time.monotonic()))
        if not ready:
            return first + rest, False
        block = os.read(fd, 1 << 16)
        if not block:
            return first + rest, True
        if not first.endswith(b"\n"):
            line, newline, block = block.partition(b"\n")
            first += line + newline
        rest = (rest + block)[-_OUTPUT_BYTES:]


def _main() -> None:
    job = json.loads(sys.stdin.buffer.read())
    _die_with(job["parent"])
    isolated = _isolate()
    # In a namespace of processes of its own, everything ends with the first of them.
    child = os.fork()
    if child == 0:
        _die_with(0)
        _run(job, isolated)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
        signal.signal(signal.SIGXCPU, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGXCPU)
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def _run(job: dict[str, Any], isolated: bool) -> None:
    """The first process of the namespace: starts the program in another one, and waits for it."""
    if isolated:
        child = os.fork()
        if child:
            _, status = os.waitpid(child, 0)
            os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    _limit(job["seconds"], job["memory_bytes"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.write(1, b"isolated\n" if isolated else b"shared\n")
    try:
        names: dict[str, Any] = {"__name__": "__main__"}
        exec(compile(job["code"], "completion", "exec"), names)
        exec(compile(job["tests"], "tests", "exec"), names)
        sys.stdout.flush()
        os.write(1, f"\n{job['proof']}\n".encode())
    except BaseException as error:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os.write(1, f"\n{type(error).__name__}: {error}\n".encode()[:_OUTPUT_BYTES])
        os._exit(1)
    os._exit(0)


def _die_with(parent: int) -> None:
    """On Linux, this process is killed when its parent ends; 0: whichever that is."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if parent and os.getppid() != parent:
        os._exit(1)


def _isolate() -> bool:
    """No network and no other processes from here on, if the system lets a user have that."""
    if sys.platform != "linux":
        return False
    try:
        os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNET | os.CLONE_NEWPID | os.CLONE_NEWIPC)
    except OSError:
        return False
    return True


def _limit(seconds: float, memory_bytes: int) -> None:
    cpu = max(1, int(seconds + 0.999))
    limits = [
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, cpu),
        (resource.RLIMIT_FSIZE, _FILE_BYTES),
        (resource.RLIMIT_NOFILE, 64),
    ]
    if memory_bytes:
        limits.append((resource.RLIMIT_AS, memory_bytes))
    for which, limit in limits:
        # Not every system has every limit.
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(which, (limit, limit))


if __name__ == "__main__":
    _main()
