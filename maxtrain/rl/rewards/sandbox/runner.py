"""Runs programs and their tests in confined processes, and reports the outcome.

The program and the judge of its tests are two processes. They share one socket, over which the
judge calls functions of the program. The verdict comes over another socket, which the program does
not have. The output of a program that reads stdin is compared in this module.
"""

import collections
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import maxtrain
from data_pipeline.base.bare_environment import bare_environment
from maxtrain.rl.rewards.sandbox import confinement, forms, judge, zygote
from maxtrain.rl.rewards.sandbox.values import ProtocolError, receive, send

# Outcomes. UNSUPPORTED depends on the tests alone.
PASSED = judge.PASSED
FAILED = judge.FAILED
UNSUPPORTED = judge.UNSUPPORTED
TIMEOUT = "timeout"

# Most threads of a program.
MAX_THREADS = 128
# Bytes that a script may print, and bytes that are kept of a program's output.
_PRINTED_BYTES = 16 << 20
_OUTPUT_BYTES = 4000
# Number of blocks that a pipe can hold.
_PIPE_BLOCKS = 16
# Seconds between checks of threads and folder.
_LOOK_SECONDS = 0.05
# Address space of the judge.
_JUDGE_BYTES = 1 << 30
_START_SECONDS = 60.0
_PROGRAM = (
    "import sys; path = sys.path[:]; sys.path.insert(0, {root!r}); "
    "from maxtrain.rl.rewards.sandbox.zygote import serve; sys.path[:] = path; "
    "serve({fd}, {parent}, {kind!r})"
)


class SandboxResult(NamedTuple):
    """An outcome, with the end of the program's output or a text about what went wrong."""

    outcome: str
    output: str


class ConfinementError(RuntimeError):
    """Rights could not be dropped, so nothing was run."""


class Sandbox:
    """Processes with one kind of confinement. Must be closed.

    Args:
        kind: NAMESPACES, LANDLOCK or NOTHING of confinement.py.

    Raises:
        ConfinementError: this machine does not support it.
    """

    def __init__(self, kind: str):
        self.kind = kind
        self._control, theirs = socket.socketpair()
        program = _PROGRAM.format(
            root=str(Path(maxtrain.__file__).parents[1]),
            fd=theirs.fileno(),
            parent=os.getpid(),
            kind=kind,
        )
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-X", "utf8", "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=bare_environment(),
                cwd="/",
            )
        self._control.settimeout(_START_SECONDS)
        answer = self._answer()
        if "error" in answer:
            self.close()
            raise ConfinementError(str(answer["error"]))

    def close(self) -> None:
        """End all processes."""
        self._control.close()
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> "Sandbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def _answer(self) -> dict[str, Any]:
        try:
            data = self._control.recv(zygote.MESSAGE_BYTES)
            return json.loads(data)
        except (OSError, ValueError) as error:
            raise ConfinementError("the process that forks programs has ended") from error

    def _request(self, message: dict[str, Any], fds: list[int]) -> dict[str, Any]:
        try:
            socket.send_fds(self._control, [json.dumps(message).encode()], fds)
        except OSError as error:
            raise ConfinementError("the process that forks programs has ended") from error
        return self._answer()

    @contextlib.contextmanager
    def child(
        self, role: str, fds: list[int], seconds: float, memory_bytes: int
    ) -> Iterator["_Child"]:
        """Start a process that ends with the block."""
        with _folder(self.kind) as folder:
            message = {
                "role": role,
                "folder": folder,
                "seconds": seconds,
                "memory_bytes": memory_bytes,
            }
            answer = self._request(message, fds)
            if "error" in answer:
                raise ConfinementError(answer["error"])
            child = _Child(answer["pid"], folder)
            try:
                yield child
            finally:
                child.status = self._request({"kill": child.pid}, [])["status"]

    def run(
        self,
        program: str | None,
        tests: forms.AssertionTests | forms.FunctionCases | forms.ProgramCases,
        seconds: float,
        memory_bytes: int,
    ) -> SandboxResult:
        """Run a program and its tests.

        Args:
            program: Python; None: only find out whether the tests can be judged.
            tests: the tests that the program must pass.
            seconds: limit of all tests together.
            memory_bytes: limit of the address space of the program.
        """
        ends = time.monotonic() + seconds
        if not isinstance(tests, forms.ProgramCases):
            return self._run_functions(program, tests, seconds, memory_bytes, ends)
        for number, (read, expected) in enumerate(tests.cases):
            if program is None:
                return SandboxResult(FAILED, "no program")
            ran = self.run_script(program, read, seconds, memory_bytes, ends)
            if ran.outcome != PASSED:
                return ran
            if not forms.is_same_output(ran.output, expected):
                return SandboxResult(
                    FAILED, f"case {number}: printed {ran.output[:_OUTPUT_BYTES]!r}"
                )
        return SandboxResult(PASSED, "")

    def run_script(
        self, program: str, read: str, seconds: float, memory_bytes: int, ends: float
    ) -> SandboxResult:
        """Run a program that reads stdin. PASSED means that it exited with 0; the output is what it
        printed."""
        with contextlib.ExitStack() as stack:
            stdin = stack.enter_context(tempfile.TemporaryFile())
            stdin.write(read.encode(errors="surrogatepass"))
            stdin.seek(0)
            printed, errors = stack.enter_context(_Pipe()), stack.enter_context(_Pipe())
            ours, theirs = map(stack.enter_context, socket.socketpair())
            fds = [stdin.fileno(), printed.write_fd, errors.write_fd, theirs.fileno()]
            with self.child("script", fds, seconds, memory_bytes) as child:
                theirs.close()
                with contextlib.suppress(OSError):
                    send(ours, program)
                printed.keep(_PRINTED_BYTES)
                outcome = _watch([printed, errors], [child], None, ends)
        if outcome is None and child.status == 0:
            if printed.size > _PRINTED_BYTES:
                return SandboxResult(FAILED, f"it printed over {_PRINTED_BYTES} bytes")
            return SandboxResult(PASSED, printed.text())
        if outcome is None and child.status == -signal.SIGXCPU:
            outcome = TIMEOUT
        return SandboxResult(outcome or FAILED, errors.text())

    def _run_functions(
        self,
        program: str | None,
        tests: forms.AssertionTests | forms.FunctionCases,
        seconds: float,
        memory_bytes: int,
        ends: float,
    ) -> SandboxResult:
        with contextlib.ExitStack() as stack:
            null = stack.enter_context(open(os.devnull, "r+b")).fileno()
            printed = stack.enter_context(_Pipe())
            calls, answers = map(stack.enter_context, socket.socketpair())
            verdicts, judge_end = map(stack.enter_context, socket.socketpair())
            children = []
            # The judge is forked first: the dataset's tests may be faulty whatever the program is.
            fds = [null, null, null, judge_end.fileno(), calls.fileno()]
            judging = self.child("judge", fds, seconds, _JUDGE_BYTES)
            children.append(stack.enter_context(judging))
            judge_end.close()
            with contextlib.suppress(OSError):
                send(verdicts, _job(tests, program is not None))
            if program is not None:
                fds = [null, printed.write_fd, printed.write_fd, answers.fileno()]
                running = self.child("functions", fds, seconds, memory_bytes)
                children.append(stack.enter_context(running))
                answers.close()
                with contextlib.suppress(OSError):
                    send(calls, program)
            calls.close()
            answers.close()
            outcome = _watch([printed], children, verdicts, ends)
            verdict = None
            if outcome is None:
                verdict = _verdict(verdicts, ends)
                printed.read_rest()
        text = printed.text()
        if outcome is None and verdict is None:
            is_over = any(child.status == -signal.SIGXCPU for child in children)
            return SandboxResult(TIMEOUT if is_over else FAILED, text)
        if verdict is None:
            return SandboxResult(outcome or FAILED, text)
        if verdict[0] == FAILED and any(child.status == -signal.SIGXCPU for child in children):
            return SandboxResult(TIMEOUT, text)
        return SandboxResult(verdict[0], text if verdict[0] == PASSED else f"{text}{verdict[1]}")


class _Child:
    """A process: its id, its folder if that is on a disk, and its exit status once it has ended."""

    def __init__(self, pid: int, folder: str):
        self.pid = pid
        self.folder = folder
        self.status: int | None = None

    def has_too_much(self) -> str:
        """Return which limit the process exceeds; empty if none."""
        with contextlib.suppress(OSError):
            if len(os.listdir(f"/proc/{self.pid}/task")) > MAX_THREADS:
                return f"it had over {MAX_THREADS} threads"
        if self.folder and _is_too_large(self.folder):
            return f"it wrote over {confinement.FOLDER_BYTES} bytes, or too many files"
        return ""


class _Pipe:
    """The output of a process, of which the end is kept."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.size = 0
        self._kept = _OUTPUT_BYTES
        self._blocks: collections.deque[bytes] = collections.deque()
        self._held = 0

    def __enter__(self) -> "_Pipe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close_write()
        os.close(self.read_fd)

    def keep(self, size: int) -> None:
        self._kept = size

    def close_write(self) -> None:
        if self.write_fd >= 0:
            os.close(self.write_fd)
            self.write_fd = -1

    def read(self) -> bool:
        """Read the available output; False: there is no more."""
        block = os.read(self.read_fd, 1 << 16)
        self.size += len(block)
        self._blocks.append(block)
        self._held += len(block)
        while self._held - len(self._blocks[0]) >= self._kept:
            self._held -= len(self._blocks.popleft())
        return bool(block)

    def read_rest(self) -> None:
        """Read the output up to now of a program that may continue."""
        for _ in range(_PIPE_BLOCKS):
            if not select.select([self.read_fd], [], [], 0)[0] or not self.read():
                return

    def add(self, text: str) -> None:
        self._blocks.append(text.encode())

    def text(self) -> str:
        return b"".join(self._blocks)[-self._kept :].decode(errors="replace")


def _watch(
    pipes: list[_Pipe], children: list[_Child], verdicts: socket.socket | None, ends: float
) -> str | None:
    """Read the output of processes until there is a verdict or nothing more comes. Return TIMEOUT
    or FAILED if a limit was exceeded, else None."""
    for pipe in pipes:
        pipe.close_write()
    open_pipes = {pipe.read_fd: pipe for pipe in pipes}
    look = time.monotonic() + _LOOK_SECONDS
    while True:
        now = time.monotonic()
        if now >= ends:
            return TIMEOUT
        wanted: list[Any] = list(open_pipes)
        if verdicts is not None:
            wanted.append(verdicts)
        if not wanted:
            return None
        ready, _, _ = select.select(wanted, [], [], max(0.0, min(look, ends) - now))
        for each in ready:
            if each is not verdicts and not open_pipes[each].read():
                del open_pipes[each]
            elif (
                each is not verdicts and verdicts is None and open_pipes[each].size > _PRINTED_BYTES
            ):
                return FAILED
        if verdicts is not None and verdicts in ready:
            return None
        if time.monotonic() >= look:
            look = time.monotonic() + _LOOK_SECONDS
            for child in children:
                if why := child.has_too_much():
                    pipes[-1].add(f"\n{why}\n")
                    return FAILED


def _verdict(connection: socket.socket, ends: float) -> tuple[str, str] | None:
    """Return the judge's verdict; None: there is none, or it is invalid."""
    connection.settimeout(max(0.01, ends - time.monotonic()))
    try:
        message = receive(connection)
    except (OSError, EOFError, ProtocolError):
        return None
    if not isinstance(message, list) or len(message) != 2:
        return None
    outcome, detail = message
    if outcome not in (PASSED, FAILED, UNSUPPORTED) or not isinstance(detail, str):
        return None
    return outcome, detail[:_OUTPUT_BYTES]


def _job(tests: forms.AssertionTests | forms.FunctionCases, has_program: bool) -> dict[str, Any]:
    if isinstance(tests, forms.AssertionTests):
        job = {"form": "assertions", "tests": tests.tests, "entry_point": tests.entry_point}
    else:
        job = {"form": "calls", "name": tests.name, "cases": tests.cases}
        job["may_be_wrapped"] = tests.may_be_wrapped
    return job | {"has_program": has_program}


@contextlib.contextmanager
def _folder(kind: str) -> Iterator[str]:
    """Create a folder on the disk for a process; empty if the process has one in memory."""
    if kind == confinement.NAMESPACES:
        yield ""
        return
    folder = tempfile.mkdtemp(prefix="reward-")
    try:
        yield folder
    finally:
        try:
            shutil.rmtree(folder)
        except (OSError, RecursionError):
            # `rm` also removes what is nested deeper than a path can be long.
            subprocess.run(["rm", "-rf", folder], check=False, stderr=subprocess.DEVNULL)


def _is_too_large(folder: str) -> bool:
    size = 0
    entries = 0
    try:
        for path, folders, files in os.walk(folder, onerror=_raise_unless_gone):
            entries += len(folders) + len(files)
            for name in files:
                with contextlib.suppress(FileNotFoundError):
                    size += os.lstat(os.path.join(path, name)).st_blocks * 512
            if size > confinement.FOLDER_BYTES or entries > confinement.FOLDER_ENTRIES:
                return True
    except OSError:
        # Nested deeper than a path can be long, or hidden by its permissions.
        return True
    return False


def _raise_unless_gone(error: OSError) -> None:
    """Let `os.walk` skip only folders that the program has removed meanwhile."""
    if not isinstance(error, FileNotFoundError):
        raise error
