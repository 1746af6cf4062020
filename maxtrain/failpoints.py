"""Faults on purpose, so that recovery from them is tested as a whole.

    MAXTRAIN_FAILPOINT=PLACE:ACTION[:STEP[:ATTEMPT[:PROCESS]]],...
    MAXTRAIN_FAILPOINT=before_commit:kill:40        dies when it has written all of checkpoint 40
                                                    but its commit record
    MAXTRAIN_FAILPOINT=data:delay=0.5,after_step:nan:7::1

An empty or missing part means any; an attempt is one of `maxtrain supervise`, from 1. Steps are
numbered from 1. Without the variable a place costs one look at an empty list.
"""

import dataclasses
import errno
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from data_pipeline.errors import UsageError
from maxtrain import ATTEMPT

VARIABLE = "MAXTRAIN_FAILPOINT"
PLACES = {
    "data": "while step STEP waits for its batch; nan (in the weight of a target) and bitflip change the batch",
    "before_step": "before step STEP; nan and bitflip change the parameters",
    "after_step": "when step STEP is on its way; nan and bitflip change the parameters",
    "eval": "in an evaluation after step STEP",
    "during_save": "arrays of checkpoint STEP are written, other files are not",
    "before_commit": "all of checkpoint STEP is written but its commit record",
    "after_commit": "checkpoint STEP counts; bitflip changes its largest file",
    "during_removal": "checkpoint STEP no longer counts, its files are still there",
    "during_copy": "checkpoint STEP is copied to checkpoint.copy_to but for its commit record",
    "after_copy": "the copy of checkpoint STEP counts, older ones are not removed yet",
    "rollback": "an anomaly at step STEP is in rollbacks.json, and nothing else is done about it yet",
    "restore": "before the arrays of checkpoint STEP are read",
}
ACTIONS = ("kill", "term", "raise", "hang", "delay", "nan", "enospc", "bitflip")
_CHANGES = {
    "nan": ("data", "before_step", "after_step"),
    "bitflip": ("data", "before_step", "after_step", "after_commit"),
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """What happens where; None: at any step, in any attempt, in any process."""

    place: str
    action: str
    seconds: float = 1.0  # of a delay
    step: int | None = None
    attempt: int | None = None
    process: int | None = None


_armed: list[Fault] = []


def arm() -> None:
    """Reads the environment; to be called when a job begins.

    Raises:
        UsageError: the variable is not understood.
    """
    attempt = int(os.environ.get(ATTEMPT) or 1)
    faults = [
        _parse(word.strip()) for word in os.environ.get(VARIABLE, "").split(",") if word.strip()
    ]
    _armed[:] = [fault for fault in faults if fault.attempt in (None, attempt)]


def hit(place: str, step: int, value: Any = None) -> Any:
    """Passes a place; the value as it came, or with a fault in it: a tree of arrays, or the
    directory of a checkpoint."""
    for fault in _armed:
        if (
            fault.place == place
            and fault.step in (None, step)
            and fault.process in (None, jax.process_index())
        ):
            print(
                f"{VARIABLE}: {fault.action} at {place} of step {step}", file=sys.stderr, flush=True
            )
            value = _act(fault, value)
    return value


def _parse(word: str) -> Fault:
    place, action, *numbers = [*word.split(":"), ""][: max(2, word.count(":") + 1)]
    action, _, seconds = action.partition("=")
    known = {"PLACE": (place, PLACES), "ACTION": (action, ACTIONS)}
    problems = [
        f"{name} {value!r} is none of {', '.join(names)}"
        for name, (value, names) in known.items()
        if value not in names
    ]
    if action in _CHANGES and place in PLACES and place not in _CHANGES[action]:
        problems.append(f"{action} is for {', '.join(_CHANGES[action])}")
    if len(numbers) > 3 or not all(number.isdecimal() or not number for number in numbers):
        problems.append("STEP, ATTEMPT and PROCESS are whole numbers")
    if seconds and (action != "delay" or not seconds.replace(".", "", 1).isdecimal()):
        problems.append("only delay has a number of seconds, such as delay=0.5")
    if problems:
        mend = f"Write PLACE:ACTION[:STEP[:ATTEMPT[:PROCESS]]], such as before_step:kill:7, or unset {VARIABLE}"
        raise UsageError(f"{VARIABLE}={word}: {'; '.join(problems)}. {mend}.")
    return Fault(
        place, action, float(seconds or 1), *(int(number) if number else None for number in numbers)
    )


def _act(fault: Fault, value: Any) -> Any:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "raise":
            raise RuntimeError(f"{VARIABLE}: raised at {fault.place}")
        case "enospc":
            raise OSError(
                errno.ENOSPC, f"{os.strerror(errno.ENOSPC)} ({VARIABLE} at {fault.place})"
            )
        case "delay":
            time.sleep(fault.seconds)
        case "hang":
            while True:
                time.sleep(3600)
    if fault.action not in _CHANGES:
        return value
    if isinstance(value, Path):
        _flip_file(value)
        return value
    leaves, treedef = jax.tree.flatten(value)
    chosen = next(
        i
        for i, x in enumerate(leaves)
        if fault.action == "bitflip" or jnp.issubdtype(x.dtype, jnp.floating)
    )
    leaves[chosen] = _changed(leaves[chosen], fault)
    return jax.tree.unflatten(treedef, leaves)


def _changed(array: jax.Array, fault: Fault) -> jax.Array:
    """The array with the first number on the first device of this process changed; copies on other
    devices are left alone.

    Of a batch it is the weight of a target; a batch without targets, as of a step that is left out,
    stays as it is.
    """
    parts = [shard.data for shard in array.addressable_shards]
    first = np.array(parts[0])
    if fault.action == "nan":
        weighs = np.flatnonzero(first)[:1] if fault.place == "data" else 0
        first.flat[weighs] = np.nan
    else:
        first.view(np.uint8).flat[0] ^= 1
    (device,) = parts[0].devices()
    parts[0] = jax.device_put(first, device)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _flip_file(folder: Path) -> None:
    """Changes a bit in the middle of the largest file below a directory."""
    path = max(
        (path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
