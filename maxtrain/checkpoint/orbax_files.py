"""Orbax's part of a checkpoint: how arrays are written by it, and what it need not say."""

import collections
import logging
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

# What Orbax has begun where a save fails, and then drops: any of dozens of its functions, all of
# which have one of these words in their names.
_NOT_AWAITED = (
    "coroutine '(cancellable|.*(serialize|save|write|commit|create|metadata|Checkpoint).*)' "
    "was never awaited"
)


def new_checkpointer(shares_directory: bool, with_copies: bool = False) -> ocp.AsyncCheckpointer:
    """Return what writes and reads arrays, together with all other processes.

    Args:
        shares_directory: processes write to the same one.
        with_copies: a process writes all parts that its devices hold, also those that others write,
            too, if `copies_are_complete`; otherwise processes divide them up.
    """
    # All processes, by name: they then wait for each other at the coordinator. Left to itself,
    # Orbax has all devices take part, and fails where processes have different numbers of them.
    together = None
    if jax.process_count() > 1:
        together = set(range(jax.process_count()))
    # Each process makes its own directories, where they share none.
    first = None
    if shares_directory:
        first = 0
    options = ocp.options.MultiprocessingOptions(primary_host=first, active_processes=together)
    # Compressing noise, which weights mostly are, took four times as long as writing it.
    # Many processes write few files each, to be merged; one writes a file a shard, which can be
    # read in one pass. Nothing can be merged that is on disks of several hosts.
    settings: dict[str, Any] = {}
    if with_copies:
        arrays = type_handlers.ArrayHandler(
            primary_host=None, replica_id=None, use_replica_parallel=False
        )
        registry = type_handlers.create_type_handler_registry((jax.Array, arrays))
        settings["type_handler_registry"] = registry
    handler = ocp.PyTreeCheckpointHandler(
        use_compression=False,
        use_ocdbt=jax.process_count() > 1 and shares_directory,
        multiprocessing_options=options,
        **settings,
    )
    return ocp.AsyncCheckpointer(handler, multiprocessing_options=options)


def copies_are_complete(layouts: Iterable[tuple[Any, tuple[int, ...]]]) -> bool:
    """Return whether all parts of arrays are written, if each process writes copies.

    Of the copies of parts, numbered in the order of devices, a process writes those with the number
    that its first device's has: where devices of a process lie far apart in the mesh, that need not
    be all that it holds.

    Args:
        layouts: the sharding and the shape of each array.
    """
    for sharding, shape in layouts:
        copies: dict[str, int] = collections.Counter()
        firsts: dict[int, int] = {}
        written = set()
        for device, index in sharding.devices_indices_map(shape).items():
            part = str(index)
            copy = copies[part]
            copies[part] += 1
            if firsts.setdefault(device.process_index, copy) == copy:
                written.add(part)
        if len(written) < len(copies):
            return False
    return True


def writer_of(name: str) -> int:
    """The process that wrote a file of a step directory, by the names that Orbax gives.

    What Orbax merges is written by process 0.
    """
    found = re.match(r"arrays/ocdbt\.process_(\d+)/", name)
    if not found:
        return 0
    return int(found[1])


def quieten() -> None:
    """Leaves out messages of Orbax, whose errors are raised as ours."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_not_of_orbax)
    warnings.filterwarnings("ignore", _NOT_AWAITED, RuntimeWarning)
    if getattr(sys.unraisablehook, "__name__", "") != _without_late_writes.__name__:
        sys.unraisablehook = _without_late_writes(sys.unraisablehook)


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs, and what asyncio logs of Orbax's writes after one has failed.

    These are tracebacks of what is raised here.
    """
    where = record.pathname
    if record.name == "asyncio":
        where = record.getMessage()
    return "orbax" not in where


def _without_late_writes(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that nobody can catch, without those of writes that end too late.

    Writes that end after another one has failed report to Orbax's event loop, which is gone by
    then: a page of tracebacks beside the one message that counts.
    """

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return
        before(unraisable)

    hook.__name__ = _without_late_writes.__name__
    return hook
