"""Processes of one job must be about to do the same thing.

That is compared, not assumed, and those that differ are named.
"""

import collections
import contextlib
import functools
import itertools
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the coordinator's key-value store has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.base.errors import (
    DataError,
    LostProcessError,
    StorageError,
    TryAgainError,
    UserError,
)

# What the runtime says when it can't reach another process, whichever way they talk.
LOST = re.compile(
    r"gloo|nccl|unavailable|aborted|deadline.exceeded|connection (closed|reset|refused)"
    r"|heartbeat|coordination|topolog",
    re.I,
)

# Characters in one message: a message has at most 4 MB.
_PIECE = 1 << 20


class Board:
    """Message board of the processes, kept by the coordinator: the last message of each process.

    No process waits for another one.
    """

    def __init__(self, what: str):
        self._folder = f"maxtrain/{what}"

    def say(self, text: str) -> None:
        """Replace the message of this process."""
        client = distributed.global_state.client
        assert client is not None
        client.key_value_set(f"{self._folder}/{jax.process_index()}", text, allow_overwrite=True)

    def heard(self) -> dict[int, str]:
        """Return the last message of each process that ever posted one, by its number."""
        client = distributed.global_state.client
        assert client is not None
        heard = {}
        for key, text in client.key_value_dir_get(self._folder):
            _, _, index = key.rpartition("/")
            heard[int(index)] = text
        return heard


def is_loss(error: BaseException) -> bool:
    """Return whether an error, one of ours or the runtime's, says that another process is out of
    reach.

    Where a program is called, jax raises the runtime's errors as ValueErrors that begin with a
    status such as UNKNOWN.
    """
    if isinstance(error, LostProcessError):
        return True
    if not isinstance(error, jax.errors.JaxRuntimeError):
        has_status = re.match(r"[A-Z_]+: ", str(error)) is not None
        if type(error) is not ValueError or not has_status:
            return False
    return jax.process_count() > 1 and LOST.search(str(error)) is not None


@contextlib.contextmanager
def losing_others() -> Iterator[None]:
    """Turns the runtime's error that another process is out of reach into a LostProcessError."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, UserError) or not is_loss(error):
            raise
        what = str(error).strip().splitlines()[0][:300]
        who = f"process {jax.process_index()} on {platform.node()}"
        raise LostProcessError(
            f"{who} can't reach another process of this job ({what}). "
            "See the others' logs, then run the same command again."
        ) from error


def require_agreement(what: str, fields: Mapping[str, str], timeout_seconds: float = 300.0) -> None:
    """Return if all processes give the same fields; else all of them raise the same error.

    Goes through the coordinator's key-value store: a process that never comes is named after
    `timeout_seconds`, where a collective would wait for ever. Costs two messages a process, so it
    is for launches. `what` is a name used once.

    Raises:
        DataError: names the processes that differ, the field, and both values.
        TryAgainError: names the processes that did not come.
    """
    count = jax.process_count()
    if count == 1:
        return
    deadline = time.monotonic() + timeout_seconds
    client = distributed.global_state.client
    assert client is not None
    key = f"maxtrain/{what}"
    index = jax.process_index()
    client.key_value_set(f"{key}/{index}", json.dumps([platform.node(), dict(fields)]))
    if index == 0:
        said, missing = _hear_all(client, key, count, deadline)
        client.key_value_set(f"{key}/verdict", json.dumps([missing, differences(said)]))
    try:
        grace = int(1000 * (deadline - time.monotonic())) + 30_000
        missing, differing = json.loads(client.blocking_key_value_get(f"{key}/verdict", grace))
    except jax.errors.JaxRuntimeError as error:
        rule = f"process 0 did not answer within {timeout_seconds:.0f} s"
        raise TryAgainError(f"{what}: {rule}. Run the same command again.") from error
    if missing:
        names = ", ".join(map(str, missing[:20]))
        rule = f"process {names} did not come within {timeout_seconds:.0f} s"
        if len(missing) > 20:
            rule += " and more"
        raise TryAgainError(
            f"{what}: {rule}; {count} are expected. "
            "See their logs, then run the same command again."
        )
    if differing:
        lines = "".join(f"\n  * {line}" for line in differing)
        raise DataError(
            f"{what}: the processes of this job have different settings:{lines}\n"
            "Give all of them the same settings and start again."
        )


def _hear_all(
    client: Any, key: str, count: int, deadline: float
) -> tuple[dict[int, Any], list[int]]:
    """Return the messages of all processes, and the processes without one at the deadline; on
    process 0.
    """
    said = {}
    missing = []
    for process in range(count):
        try:
            left = max(1, int(1000 * (deadline - time.monotonic())))
            said[process] = json.loads(client.blocking_key_value_get(f"{key}/{process}", left))
        except jax.errors.JaxRuntimeError:
            missing.append(process)
    return said, missing


def differences(said: Mapping[int, tuple[str, Mapping[str, str]]]) -> list[str]:
    """One line for each field of a process that is not what most have.

    Args:
        said: by process, its host name and fields.
    """
    lines = []
    for name in sorted({name for _, fields in said.values() for name in fields}):
        values = {process: fields.get(name, "missing") for process, (_, fields) in said.items()}
        (usual, _), *others = collections.Counter(values.values()).most_common()
        if not others:
            continue
        odd = [process for process, value in values.items() if value != usual]
        for process in odd[:20]:
            host, _ = said[process]
            who = f"process {process} on {host}"
            lines.append(f"{who}: {name} is {values[process]}, but {usual} elsewhere")
    return lines


def gather(values: Mapping[str, Any], size: int = 256) -> list[dict[str, Any]]:
    """Return the texts of all processes, in their order.

    It is one collective of `size` bytes a process, to be called every few seconds at most.

    Args:
        values: JSON, of at most `size` bytes as UTF-8.
        size: the same in all processes.
    """
    text = json.dumps(values, ensure_ascii=False).encode(errors="backslashreplace").ljust(size)
    assert len(text) == size, text
    return [json.loads(row.tobytes()) for row in gather_bytes(np.frombuffer(text, np.uint8))]


def gather_bytes(mine: np.ndarray) -> np.ndarray:
    """uint8 [processes, n] from the [n] of each; however many devices each has.

    On CPUs a program does not wait for the one before it, and two of them at a time, each with
    collectives, could read each other's messages: so this waits for all that is under way.
    Accelerators keep the order by themselves. An error of a program under way is raised where its
    result is fetched. LostProcessError: a process does not come.
    """
    if jax.process_count() == 1:
        return mine[None]
    return _between_all(mine, _between_processes().everywhere)


def from_first(mine: np.ndarray) -> np.ndarray:
    """uint8 [n] of process 0, in all processes; what others give counts for its length alone.

    It waits as `gather_bytes` does. LostProcessError: a process does not come.
    """
    return from_one(mine, 0)


def from_one(mine: np.ndarray, sender: int) -> np.ndarray:
    """Send an array from one process to all, as `from_first` does from process 0."""
    if jax.process_count() == 1:
        return mine
    if jax.process_index() != sender:
        mine = np.zeros_like(mine)
    return _between_all(mine, _between_processes().summed)


def _between_all(mine: np.ndarray, program: Callable[[jax.Array], jax.Array]) -> np.ndarray:
    """Return what a program makes of the rows of all processes, uint8 [processes, n]."""
    if jax.default_backend() == "cpu":
        for array in jax.live_arrays():
            # Another thread may just have deleted it.
            with contextlib.suppress(RuntimeError):
                array.block_until_ready()
    between = _between_processes()
    shape = (jax.process_count(), *mine.shape)
    rows = jax.make_array_from_callback(shape, between.apart, lambda _: mine[None])
    with jax.set_mesh(between.mesh), losing_others():
        return np.asarray(program(rows))


class _ProcessMesh(NamedTuple):
    """A mesh of one device of each process, and programs on a row of each."""

    mesh: Mesh
    # How the rows lie there.
    apart: NamedSharding
    # They give to all processes: all rows, and their sum modulo 256.
    everywhere: jax.stages.Wrapped
    summed: jax.stages.Wrapped


@functools.cache
def _between_processes() -> _ProcessMesh:
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), "process")
    apart = NamedSharding(mesh, PartitionSpec("process"))
    to_all = NamedSharding(mesh, PartitionSpec())
    everywhere = jax.jit(lambda rows: rows, out_shardings=to_all)
    summed = jax.jit(lambda rows: rows.sum(0, dtype=jnp.uint8), out_shardings=to_all)
    return _ProcessMesh(mesh, apart, everywhere, summed)


def connect_peers(mesh: Mesh) -> None:
    """Connects the processes of a job whose devices are CPUs, in all groups that mesh axes make.

    A group is connected by the first program that needs it, and a process that comes there 30 s
    after another finds that one gone; no setting changes this. So large programs, which one process
    may be much longer at compiling, find all connected. To be called where all processes have just
    met. LostProcessError: a process does not come.
    """
    if jax.process_count() == 1 or jax.default_backend() != "cpu":
        return
    gather({})
    axes = [axis for axis, size in mesh.shape.items() if size > 1]
    for count in range(1, len(axes) + 1):
        for group in itertools.combinations(axes, count):
            total = jax.shard_map(
                functools.partial(_sum_of_places, group),
                mesh=mesh,
                in_specs=(),
                out_specs=PartitionSpec(),
                check_vma=False,
            )
            with jax.set_mesh(mesh), losing_others():
                jax.jit(total)().block_until_ready()


def _sum_of_places(group: tuple[str, ...]) -> jax.Array:
    """The smallest program for which all devices of a group have to meet.

    It is a sum of what the compiler can't know.
    """
    return jax.lax.psum(jax.lax.axis_index(group).astype(jnp.float32), axis_name=group)


def report(what: str, text: str, timeout_seconds: float = 1200.0) -> list[str]:
    """Collect the texts of all processes on process 0, in their order; other processes get nothing.

    Goes through the coordinator's key-value store, without a device: for threads in the background.

    Args:
        what: a name used once.

    Raises:
        TryAgainError: on process 0, names the first process that sent nothing.
    """
    count = jax.process_count()
    if count == 1:
        return [text]
    deadline = time.monotonic() + timeout_seconds
    client = distributed.global_state.client
    assert client is not None
    key = f"maxtrain/{what}/"
    index = jax.process_index()
    client.key_value_set(f"{key}{index}", text)
    if index != 0:
        return []
    said = []
    for process in range(count):
        left = max(1, int(1000 * (deadline - time.monotonic())))
        try:
            said.append(client.blocking_key_value_get(f"{key}{process}", left))
        except jax.errors.JaxRuntimeError as error:
            rule = f"process {process} did not answer within {timeout_seconds:.0f} s"
            fix = "See its log, then run the same command again"
            raise TryAgainError(f"{what}: {rule}. {fix}.") from error
    # This deletes all that is below the key.
    client.key_value_delete(key)
    return said


def broadcast_text(what: str, text: str, sender: int = 0, timeout_seconds: float = 1200.0) -> str:
    """Send the text of one process to all processes; the texts of the others are ignored.

    Goes through the coordinator's key-value store, without a device: for threads in the background.
    The text stays there until `forget`.

    Args:
        what: a name used once.

    Raises:
        LostProcessError: the sender sent nothing.
    """
    if jax.process_count() == 1:
        return text
    client = distributed.global_state.client
    assert client is not None
    key = f"maxtrain/{what}"
    if jax.process_index() == sender:
        starts = range(0, len(text), _PIECE)
        for start in starts:
            client.key_value_set(f"{key}/{start}", text[start : start + _PIECE])
        client.key_value_set(f"{key}/length", str(len(text)))
        return text
    try:
        limit = int(1000 * timeout_seconds)
        length = int(client.blocking_key_value_get(f"{key}/length", limit))
        starts = range(0, length, _PIECE)
        pieces = [client.blocking_key_value_get(f"{key}/{start}", limit) for start in starts]
    except jax.errors.JaxRuntimeError as error:
        rule = f"{what}: process {sender} did not come within {timeout_seconds:g} s"
        raise LostProcessError(f"{rule}. See its log, then run the same command again.") from error
    return "".join(pieces)


def forget(what: str) -> None:
    """Free a text of `broadcast_text` after all processes have read it; called by process 0."""
    if jax.process_count() == 1:
        return
    client = distributed.global_state.client
    assert client is not None
    client.key_value_delete(f"maxtrain/{what}/")


def await_first(what: str, timeout_seconds: float) -> None:
    """Returns when process 0 has come here, too; it does not wait for the others.

    Goes through the coordinator's key-value store, without a device.

    Args:
        what: a name used once.

    Raises:
        LostProcessError: it did not come.
    """
    if jax.process_count() == 1:
        return
    client = distributed.global_state.client
    assert client is not None
    key = f"maxtrain/{what}"
    if jax.process_index() == 0:
        client.key_value_set(key, "")
        return
    try:
        client.blocking_key_value_get(key, int(1000 * timeout_seconds))
    except jax.errors.JaxRuntimeError as error:
        rule = f"{what}: process 0 did not come within {timeout_seconds:g} s"
        raise LostProcessError(f"{rule}. See its log, then run the same command again.") from error


def raise_together(error: Exception | None) -> None:
    """Returns if no process has an error; else all raise the same one.

    It is that of the first process that has one, with its place and exit code. For what one process
    alone finds out: if it raised alone, the others would wait for it in their next step. Where
    there is but one, its error is raised as it is.
    """
    if jax.process_count() == 1:
        if error:
            raise error
        return
    said = gather(_code_and_text(error), 4096)
    errors = [theirs for theirs in said if theirs["code"]]
    if not errors:
        return
    # A bug of ours is raised with its traceback.
    if error and not isinstance(error, UserError | OSError):
        raise error
    text = errors[0]["text"]
    if len(errors) > 1:
        text += f" ({len(errors)} processes have errors.)"
    together = UserError(text)
    together.exit_code = errors[0]["code"]
    raise together from error


@contextlib.contextmanager
def raising_together(*kinds: type[Exception]) -> Iterator[None]:
    """All processes raise what one of them raises within, as `raise_together` does, if it is of
    these kinds. Others are a process's own."""
    error = None
    try:
        yield
    except kinds as problem:
        error = problem
    raise_together(error)


def _code_and_text(error: Exception | None) -> dict[str, Any]:
    """Return what a process reports to the others about its error; the code is 0 if it has none."""
    if error is None:
        return {"code": 0, "text": ""}
    who = f"process {jax.process_index()} on {platform.node()}"
    if isinstance(error, UserError):
        return {"code": error.exit_code, "text": f"{who}: {error}"[:600]}
    code = UserError.exit_code
    if isinstance(error, OSError):
        code = StorageError.exit_code
    what = f"{type(error).__name__}: {error}"
    text = f"{who}: {what} See its log, then run the same command again."
    return {"code": code, "text": text[:600]}
