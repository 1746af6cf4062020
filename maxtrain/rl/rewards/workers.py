"""A pool of processes for functions that may hang, crash or exhaust memory: a slow or dead item
affects only itself.

A limit is enforced by killing the process, since nothing within Python can end every call: the
power `9**9**9` is one call of C, which no signal handler and no thread interrupts.
worker_process.py creates the processes.
"""

import array
import collections
import json
import multiprocessing.connection
import os
import pickle
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from data_pipeline.base.bare_environment import bare_environment
from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards import worker_process

OK = "ok"
# The item exceeded its time limit, or the batch's deadline passed while it ran.
TIMEOUT = "timeout"
# The process ended: by a signal, lack of memory, or an exit.
CRASH = "crash"
# The item never started: the deadline had passed, or there are no processes.
SKIPPED = "skipped"
# The function raised an exception.
ERROR = "error"

# Seconds in which the server must answer. Before its first answer it imports modules.
_ANSWER_SECONDS = 60.0
# Seconds in which a worker must import a function.
_LOAD_SECONDS = 60.0
# Seconds in which an idle worker must accept a request.
_SEND_SECONDS = 5
# Number of consecutive failed starts after which no more are tried.
_ATTEMPTS = 3
_PROGRAM = (
    "import sys; sys.path[:] = {path!r}; from maxtrain.rl.rewards.worker_process import serve; "
    "serve({fd}, {parent}, {preload!r}, {memory_bytes})"
)


class ItemResult(NamedTuple):
    """The outcome of an item (OK, TIMEOUT, CRASH, SKIPPED or ERROR), the value if it is OK, and a
    text about what went wrong."""

    outcome: str
    value: Any = None
    detail: str = ""


class _LostError(Exception):
    """The server of workers does not answer, or could not be started."""


class _WorkerProcess:
    """A process that executes one item at a time."""

    def __init__(self, pid: int, connection: Connection):
        self.pid = pid
        self.connection = connection
        self.loaded: tuple[str, ...] = ()  # the functions that it has imported
        self.done = 0  # items that it has done
        self.item: int | None = None  # what it works on; None while it imports or waits
        self.ends = 0.0  # when it has to be ready


class _WorkerServer:
    """The process that forks and kills workers."""

    def __init__(self, preload: Sequence[str], memory_bytes: int, passed: Sequence[str]):
        self._control, theirs = socket.socketpair()
        self._control.settimeout(_ANSWER_SECONDS)
        program = _PROGRAM.format(
            path=_search_path(),
            fd=theirs.fileno(),
            parent=os.getpid(),
            preload=list(preload),
            memory_bytes=memory_bytes,
        )
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", program],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=bare_environment(passed),
                # Ctrl-C reaches this process only; the server notices its end.
                start_new_session=True,
            )
        except OSError as error:
            self._control.close()
            raise _LostError(f"no process can be started ({error})") from error
        finally:
            theirs.close()
        self.close = weakref.finalize(self, _end, self._control, self._process, os.getpid())

    def fork(self) -> _WorkerProcess:
        """Fork a new worker."""
        ours, theirs = socket.socketpair()
        # A stopped worker accepts no request, and must not block this process.
        limit = struct.pack("ll", _SEND_SECONDS, 0)
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            with theirs:
                pid = self._ask(worker_process.FORK, 0, [theirs.fileno()])
            if not pid:
                raise _LostError("no process can be forked")
        except _LostError:
            ours.close()
            raise
        return _WorkerProcess(pid, Connection(ours.detach()))

    def kill(self, worker: _WorkerProcess) -> None:
        """Kill a worker and its descendants."""
        worker.connection.close()
        self._ask(worker_process.KILL, worker.pid, [])

    def _ask(self, command: bytes, target: int, fds: list[int]) -> int:
        size = worker_process.ANSWER.size
        message = worker_process.COMMAND.pack(command, target)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
        if not fds:
            rights = []
        try:
            self._control.sendmsg([message], rights)
            answer = self._control.recv(size)
        except OSError as error:
            raise _LostError(f"the server of workers does not answer ({error})") from error
        if len(answer) < size:
            raise _LostError("the server of workers has ended")
        (pid,) = worker_process.ANSWER.unpack(answer)
        return pid


def _end(control: socket.socket, process: subprocess.Popen, owner: int) -> None:
    """End a server, which ends its workers. In a fork of its owner, leave it alone."""
    control.close()
    if os.getpid() != owner:
        return
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class RewardWorkers:
    """A pool of processes for functions that may hang or crash. Use as `with RewardWorkers() as
    workers:`, or close it; the processes also end with this one, however it ends.

    It never raises because of a process: if none can be started, every item is "skipped". Several
    threads may use it; one runs at a time.

    Args:
        workers: number of items that run at once.
        seconds: time limit of an item.
        deadline: time limit of a whole batch, in seconds; items that have not started by then are
            skipped.
        memory_bytes: address space of a worker; 0: no limit. Array packages reserve much more than
            they use.
        recycle: items after which a worker is replaced, since packages cache results.
        preload: modules that are imported once for all workers, or functions (`module:function`)
            that are called once. They must not start threads.
        passed: names of environment variables that workers get, beside those of `bare_environment`;
            all others, such as keys and tokens, are removed.
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        seconds: float = 5.0,
        deadline: float = 120.0,
        memory_bytes: int = 4 << 30,
        recycle: int = 1000,
        preload: Sequence[str] = (),
        passed: Sequence[str] = (),
    ):
        for name, value in (("workers", workers), ("recycle", recycle)):
            if value < 1:
                raise ConfigError(f"{name}={value} must be at least 1. Set {name}=1 or more.")
        for name, value in (("seconds", seconds), ("deadline", deadline)):
            if not value > 0:
                raise ConfigError(f"{name}={value} must be above 0. Set {name}=5, for example.")
        self.size = workers
        self.seconds = seconds
        self.deadline = deadline
        self.replaced = 0  # workers that were killed, died or were recycled
        self._memory_bytes = memory_bytes
        self._recycle = recycle
        self._preload = tuple(preload)
        self._passed = tuple(passed)
        self._server: _WorkerServer | None = None
        self._workers: list[_WorkerProcess] = []
        self._failures = 0
        self._lost = ""
        self._is_closing = False
        self._lock = threading.Lock()

    def __enter__(self) -> "RewardWorkers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the present workers."""
        return [worker.pid for worker in self._workers]

    @property
    def server_pid(self) -> int | None:
        """Return the process id of the server, if it was started."""
        if self._server is None:
            return None
        return self._server._process.pid

    def close(self) -> None:
        """End all processes, and the batch of another thread, whose remaining items are lost. The
        processes start again with the next batch."""
        self._is_closing = True
        server = self._server
        if server is not None:
            # This wakes the other thread.
            server.close()
        with self._lock:
            self._drop()
            self._is_closing = False

    def run(
        self,
        function: str,
        items: Sequence[tuple],
        *,
        seconds: float | None = None,
        deadline: float | None = None,
        imports: Sequence[str] = (),
    ) -> list[ItemResult]:
        """Call a function for each item, several at once.

        Args:
            function: the dotted path of the function.
            items: the arguments of each call, of types that can be pickled.
            seconds, deadline: time limits; None: those of the pool. Importing the function does not
                count against an item's limit.
            imports: dotted paths of other functions that are imported with the function.

        Returns:
            A result for each item, in their order. Values are JSON values.
        """
        seconds = seconds or self.seconds
        with self._lock:
            batch = _ItemBatch((function, *imports), items, seconds)
            self._start()
            limit = time.monotonic() + (deadline or self.deadline)
            while batch.waiting or self._busy():
                now = time.monotonic()
                if now >= limit or self._lost or self._is_closing:
                    break
                try:
                    self._hand_out(batch, now)
                    self._collect(batch, limit)
                except _LostError as error:
                    if self._is_closing:
                        break
                    self._recover(batch, error)
            self._interrupt(batch)
            return batch.finished(self._lost)

    def _busy(self) -> list[_WorkerProcess]:
        """Return the workers that are executing an item or an import."""
        return [worker for worker in self._workers if worker.ends]

    def _start(self) -> None:
        """Start all missing workers; on failure, set `_lost` to the reason."""
        if self._failures >= _ATTEMPTS:
            return
        self._lost = ""
        try:
            if self._server is None:
                self._server = _WorkerServer(self._preload, self._memory_bytes, self._passed)
            while len(self._workers) < self.size:
                self._workers.append(self._server.fork())
            self._failures = 0
        except _LostError as error:
            self._fail(error)

    def _fail(self, error: _LostError) -> None:
        """Record a failure: there are no processes until the next batch, or never again after
        several failures."""
        self._failures += 1
        self._drop()
        self._lost = str(error)

    def _drop(self) -> None:
        """Forget all workers, and end the server."""
        for worker in self._workers:
            worker.connection.close()
        self._workers = []
        if self._server is not None:
            self._server.close()
            self._server = None

    def _replace(self, worker: _WorkerProcess) -> None:
        """Kill a worker and fork a new one. Raise a _LostError if the server has ended."""
        assert self._server is not None
        self._workers.remove(worker)
        self.replaced += 1
        self._server.kill(worker)
        self._workers.append(self._server.fork())

    def _recover(self, batch: "_ItemBatch", error: _LostError) -> None:
        """Start the server and all workers anew after the server has ended, and record the lost
        items."""
        for worker in self._busy():
            if worker.item is not None:
                batch.note(worker.item, ItemResult(CRASH, detail=str(error)))
        self.replaced += len(self._workers)
        batch.servers_lost += 1
        if batch.servers_lost >= _ATTEMPTS:
            self._fail(error)
            return
        self._drop()
        self._start()

    def _hand_out(self, batch: "_ItemBatch", now: float) -> None:
        """Give waiting items to idle workers."""
        for worker in list(self._workers):
            if worker.ends or not batch.waiting:
                continue
            if worker.done >= self._recycle:
                self._replace(worker)
                continue
            if worker.loaded != batch.functions:
                arguments = None
                worker.item = None
                worker.ends = now + _LOAD_SECONDS
            else:
                worker.item = batch.waiting.popleft()
                arguments = batch.items[worker.item]
                worker.ends = now + batch.seconds
            try:
                worker.connection.send_bytes(batch.request(arguments))
            except OSError:
                # The worker died or was stopped before it got the item, so another worker may
                # execute it.
                batch.give_back(worker.item)
                self._replace(worker)

    def _collect(self, batch: "_ItemBatch", limit: float) -> None:
        """Wait until a worker is ready, dead or out of time, and record its result."""
        busy = self._busy()
        if not busy:
            return
        first = min(limit, *(worker.ends for worker in busy))
        patience = max(0.0, first - time.monotonic())
        ready = multiprocessing.connection.wait([worker.connection for worker in busy], patience)
        for worker in busy:
            if worker.connection in ready:
                self._receive(worker, batch)
            elif time.monotonic() >= worker.ends:
                self._kill(
                    worker, batch, ItemResult(TIMEOUT, detail=f"took over {batch.seconds:g} s")
                )

    def _receive(self, worker: _WorkerProcess, batch: "_ItemBatch") -> None:
        try:
            outcome, value, detail = json.loads(worker.connection.recv_bytes())
        except (EOFError, OSError, ValueError):
            self._kill(worker, batch, ItemResult(CRASH, detail="the process of the item ended"))
            return
        worker.ends = 0.0
        if worker.item is None and outcome == OK:
            worker.loaded = batch.functions
            return
        worker.done += 1
        batch.note(worker.item, ItemResult(outcome, value, detail))
        worker.item = None

    def _kill(self, worker: _WorkerProcess, batch: "_ItemBatch", result: ItemResult) -> None:
        """Record the result of a worker's item, and replace the worker."""
        batch.note(worker.item, result)
        self._replace(worker)

    def _interrupt(self, batch: "_ItemBatch") -> None:
        """Kill what still runs when the deadline has passed."""
        for worker in self._busy():
            if worker.item is not None:
                batch.note(worker.item, ItemResult(TIMEOUT, detail="the batch's deadline came"))
        try:
            for worker in self._busy():
                self._replace(worker)
        except _LostError:
            self._drop()


class _ItemBatch:
    """The items of one call of `run`, with their results."""

    def __init__(self, functions: tuple[str, ...], items: Sequence[tuple], seconds: float):
        # The function to call, and those that are imported with it.
        self.functions = functions
        self.items = items
        self.seconds = seconds
        self.waiting = collections.deque(range(len(items)))
        self._results: list[ItemResult | None] = [None] * len(items)
        self.servers_lost = 0
        self._given_back: set[int] = set()
        self._failed_loads = 0

    def request(self, arguments: tuple | None) -> bytes:
        """Return the message to a worker: the arguments of a call; None: only import the
        functions."""
        return pickle.dumps((self.functions, arguments))

    def give_back(self, item: int | None) -> None:
        """Return an item that did not reach its worker to the queue; the second time it is lost."""
        if item is None:
            return
        if item in self._given_back:
            self._results[item] = ItemResult(CRASH, detail="no process took the item")
            return
        self._given_back.add(item)
        self.waiting.appendleft(item)

    def note(self, item: int | None, result: ItemResult) -> None:
        """Record the result of an item; None: of importing the function, without which no item can
        run."""
        if item is not None:
            self._results[item] = result
            return
        self._failed_loads += 1
        # A worker that was killed during an import says nothing about the function.
        if result.outcome == ERROR or self._failed_loads >= _ATTEMPTS:
            while self.waiting:
                self._results[self.waiting.popleft()] = result

    def finished(self, lost: str) -> list[ItemResult]:
        """Return the results of all items; those without a result were skipped."""
        skipped = ItemResult(SKIPPED, detail=lost or "the batch's deadline came before it")
        return [result or skipped for result in self._results]


def _search_path() -> list[str]:
    """Return the directories where workers look for modules: those of this process, and last the
    current folder, which only `python -m` searches by itself."""
    here = os.getcwd()
    if here in sys.path or "" in sys.path:
        return sys.path
    return [*sys.path, here]
