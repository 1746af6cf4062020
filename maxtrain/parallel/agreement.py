"""Processes of one job must be about to do the same thing: compared, not assumed, and with the
names of those that differ."""

import collections
import contextlib
import functools
import itertools
import json
import platform
import re
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed  # the coordinator's key-value store has no public name
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.errors import DataError, LostProcessError, StorageError, TryAgainError, UserError

# What the runtime says when it can't reach another process, whichever way they talk.
LOST = re.compile(
    r"gloo|nccl|unavailable|aborted|deadline.exceeded|connection (closed|reset|refused)|heartbeat|coordination|topolog",
    re.I,
)


class Board:
    """What each process said last of itself, by way of the coordinator; no process waits for
    another one."""

    def __init__(self, what: str):
        self._folder = f"maxtrain/{what}"

    def say(self, text: str) -> None:
        """What this process has to say from now on."""
        client = distributed.global_state.client
        assert client is not None
        client.key_value_set(f"{self._folder}/{jax.process_index()}", text, allow_overwrite=True)

    def heard(self) -> dict[int, str]:
        """What each process that ever spoke said last, by its number."""
        client = distributed.global_state.client
        assert client is not None
        return {
            int(key.rpartition("/")[2]): text
            for key, text in client.key_value_dir_get(self._folder)
        }


def is_loss(error: BaseException) -> bool:
    """Whether it says that another process of this job is out of reach: one of ours, or the
    runtime's.

    Where a program is called, jax raises the runtime's errors as ValueErrors that begin with a
    status such as UNKNOWN.
    """
    runtime = isinstance(error, jax.errors.JaxRuntimeError) or (
        type(error) is ValueError and re.match(r"[A-Z_]+: ", str(error)) is not None
    )
    lost = runtime and jax.process_count() > 1 and LOST.search(str(error)) is not None
    return lost or isinstance(error, LostProcessError)


@contextlib.contextmanager
def losing_others() -> Iterator[None]:
    """Turns the runtime's error that another process of this job is out of reach into one that says
    to try again."""
    try:
        yield
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        if isinstance(error, UserError) or not is_loss(error):
            raise
        what = str(error).strip().splitlines()[0][:300]
        rule = f"process {jax.process_index()} on {platform.node()} can't reach another process of this job"
        raise LostProcessError(
            f"{rule} ({what}). See the others' logs, then run the same command again."
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
    count, client, deadline = (
        jax.process_count(),
        distributed.global_state.client,
        time.monotonic() + timeout_seconds,
    )
    if count == 1:
        return
    assert client is not None
    key, index = f"maxtrain/{what}", jax.process_index()
    client.key_value_set(f"{key}/{index}", json.dumps([platform.node(), dict(fields)]))
    if index == 0:
        said, missing = {}, []
        for process in range(count):
            try:
                left = max(1, int(1000 * (deadline - time.monotonic())))
                said[process] = json.loads(client.blocking_key_value_get(f"{key}/{process}", left))
            except jax.errors.JaxRuntimeError:
                missing.append(process)
        client.key_value_set(f"{key}/verdict", json.dumps([missing, differences(said)]))
    try:
        grace = int(1000 * (deadline - time.monotonic())) + 30_000
        missing, differing = json.loads(client.blocking_key_value_get(f"{key}/verdict", grace))
    except jax.errors.JaxRuntimeError as error:
        raise TryAgainError(
            f"{what}: process 0 did not answer within {timeout_seconds:.0f} s. Run the same command again."
        ) from error
    if missing:
        names = ", ".join(map(str, missing[:20]))
        rule = f"process {names} did not come within {timeout_seconds:.0f} s" + (
            " and more" if len(missing) > 20 else ""
        )
        raise TryAgainError(
            f"{what}: {rule}; {count} are expected. See their logs, then run the same command again."
        )
    if differing:
        lines = "".join(f"\n  * {line}" for line in differing)
        raise DataError(
            f"{what}: the processes of this job are not about to do the same:{lines}\nGive all the same and start again."
        )


def differences(said: Mapping[int, tuple[str, Mapping[str, str]]]) -> list[str]:
    """One line for each field of a process that is not what most have; `said`: host name and fields
    of each process."""
    lines = []
    for name in sorted({name for _, fields in said.values() for name in fields}):
        values = {process: fields.get(name, "missing") for process, (_, fields) in said.items()}
        (usual, _), *others = collections.Counter(values.values()).most_common()
        odd = [process for process, value in values.items() if value != usual] if others else []
        lines += [
            f"process {p} on {said[p][0]}: {name} is {values[p]}, but {usual} elsewhere"
            for p in odd[:20]
        ]
    return lines


def gather(values: Mapping[str, Any], size: int = 256) -> list[dict[str, Any]]:
    """What every process says, in their order: one collective of `size` bytes a process, for every
    few seconds.

    `values` are JSON, of at most `size` bytes as UTF-8; `size` is the same in all processes.
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
    if jax.default_backend() == "cpu":
        for array in jax.live_arrays():
            with contextlib.suppress(RuntimeError):  # another thread may just have deleted it
                array.block_until_ready()
    mesh, apart, replicate = _between_processes()
    rows = jax.make_array_from_callback(
        (jax.process_count(), *mine.shape), apart, lambda _: mine[None]
    )
    with jax.set_mesh(mesh), losing_others():
        return np.asarray(replicate(rows))


@functools.cache
def _between_processes() -> tuple[Mesh, NamedSharding, jax.stages.Wrapped]:
    """A mesh of one device of each process, how a row of each lies there, and what gives all rows
    to all."""
    firsts = {device.process_index: device for device in reversed(jax.devices())}
    mesh = Mesh(np.array([firsts[process] for process in sorted(firsts)]), "process")
    everywhere = NamedSharding(mesh, PartitionSpec())
    return (
        mesh,
        NamedSharding(mesh, PartitionSpec("process")),
        jax.jit(lambda rows: rows, out_shardings=everywhere),
    )


def connect_peers(mesh: Mesh) -> None:
    """Connects the processes of a job whose devices are CPUs, in all groups that axes of the mesh
    make.

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
    """The smallest program for which all devices of a group have to meet: a sum of what the
    compiler can't know."""
    return jax.lax.psum(jax.lax.axis_index(group).astype(jnp.float32), axis_name=group)


def report(what: str, text: str, timeout_seconds: float = 1200.0) -> list[str]:
    """On process 0 what every process says, in their order; elsewhere nothing. `what` is a name
    used once.

    Goes through the coordinator's key-value store, without a device: for threads in the background.

    Raises:
        TryAgainError: on process 0, names the first process that did not say anything.
    """
    count, client = jax.process_count(), distributed.global_state.client
    if count == 1:
        return [text]
    assert client is not None
    key, deadline = f"maxtrain/{what}/", time.monotonic() + timeout_seconds
    client.key_value_set(f"{key}{jax.process_index()}", text)
    said = []
    for process in range(count) if jax.process_index() == 0 else ():
        try:
            said.append(
                client.blocking_key_value_get(
                    f"{key}{process}", max(1, int(1000 * (deadline - time.monotonic())))
                )
            )
        except jax.errors.JaxRuntimeError as error:
            rule = f"process {process} did not answer within {timeout_seconds:.0f} s"
            raise TryAgainError(
                f"{what}: {rule}. See its log, then run the same command again."
            ) from error
    if said:
        client.key_value_delete(key)  # and all below it
    return said


def await_first(what: str, timeout_seconds: float) -> None:
    """Return when process 0 has come here, too; it does not wait for the others. `what` is a name
    used once.

    Goes through the coordinator's key-value store, without a device.

    Raises:
        LostProcessError: it did not come.
    """
    if jax.process_count() == 1:
        return
    client, key = distributed.global_state.client, f"maxtrain/{what}"
    assert client is not None
    if jax.process_index() == 0:
        client.key_value_set(key, "")
        return
    try:
        client.blocking_key_value_get(key, int(1000 * timeout_seconds))
    except jax.errors.JaxRuntimeError as error:
        rule = f"{what}: process 0 did not come within {timeout_seconds:g} s"
        raise LostProcessError(f"{rule}. See its log, then run the same command again.") from error


def raise_together(error: Exception | None) -> None:
    """Return if no process has an error; else all raise the same one, of the first that has, with
    its place and exit code.

    For what one process alone finds out: if it raised alone, the others would wait for it in their
    next step. Where there is but one, its error is raised as it is.
    """
    if jax.process_count() == 1:
        if error:
            raise error
        return
    known = isinstance(error, UserError)
    code = (
        error.exit_code
        if known
        else StorageError.exit_code
        if isinstance(error, OSError)
        else UserError.exit_code
    )
    mend = "" if known else " See its log, then run the same command again."
    text = f"process {jax.process_index()} on {platform.node()}: {'' if known else type(error).__name__ + ': '}{error}{mend}"
    said = [
        x
        for x in gather({"code": code if error else 0, "text": text[:600] if error else ""}, 4096)
        if x["code"]
    ]
    if not said:
        return
    if error and not isinstance(error, UserError | OSError):
        raise error  # a bug of ours: with its traceback
    together = UserError(
        said[0]["text"] + (f" ({len(said)} processes have errors.)" if len(said) > 1 else "")
    )
    together.exit_code = said[0]["code"]
    raise together from error
