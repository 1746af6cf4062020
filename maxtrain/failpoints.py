"""Failpoints: deliberate faults that test recovery end to end.

    MAXTRAIN_FAILPOINT=PLACE:ACTION[:STEP[:ATTEMPT[:PROCESS]]],...
    MAXTRAIN_FAILPOINT=before_commit:kill:40        dies when it has written all of checkpoint 40
                                                    but its commit record
    MAXTRAIN_FAILPOINT=data:delay=0.5,after_step:nan:7::1

An empty or missing part means any; an attempt is one of `maxtrain supervise`, from 1. Steps are
numbered from 1. Without the variable a failpoint costs one look at an empty list.
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

from data_pipeline.base.errors import UsageError
from maxtrain import ATTEMPT

VARIABLE = "MAXTRAIN_FAILPOINT"
PLACES = {
    "data": "while step STEP waits for its batch; nan (in the weight of a target) and bitflip "
    "change the batch",
    "before_step": "before step STEP; nan and bitflip change the parameters",
    "after_step": "when step STEP is on its way; nan and bitflip change the parameters",
    "eval": "in an evaluation after step STEP",
    "during_save": "arrays of checkpoint STEP are written, other files are not",
    "before_commit": "all of checkpoint STEP is written but its commit record",
    "after_commit": "checkpoint STEP counts; bitflip changes its largest file",
    "during_upload": "half of the files of checkpoint STEP are at the URL of the run",
    "before_upload_counts": "all of checkpoint STEP is at the URL but its commit record",
    "after_upload": "checkpoint STEP counts at the URL, and not yet on this host",
    "during_removal": "checkpoint STEP no longer counts, its files are still there",
    "during_copy": "checkpoint STEP is copied to checkpoint.copy_to but for its commit record",
    "after_copy": "the copy of checkpoint STEP counts, older ones are not removed yet",
    "rollback": "an anomaly at step STEP is in rollbacks.json, "
    "and nothing else is done about it yet",
    "restore": "before the arrays of checkpoint STEP are read",
    "sampling": "between two chunks of completions for the rollout that step STEP is the first to "
    "read",
    "rewards": "rewards of that rollout are awaited",
    "scoring": "its rewards are there, its log-probabilities and its file are not",
    "stored": "its file is written, and no step has read it",
    "ahead": "what is sampled ahead for step STEP is written, and its rewards are being computed",
}
ACTIONS = ("kill", "term", "raise", "hang", "delay", "nan", "enospc", "bitflip")
_CHANGES = {
    "nan": ("data", "before_step", "after_step"),
    "bitflip": ("data", "before_step", "after_step", "after_commit"),
}


@dataclasses.dataclass(frozen=True)
class Failpoint:
    """A fault at a place; None for step, attempt or process means any."""

    place: str
    action: str
    # Duration of a delay.
    seconds: float = 1.0
    step: int | None = None
    attempt: int | None = None
    process: int | None = None


_armed: list[Failpoint] = []


def arm() -> None:
    """Read the environment variable; called when a job begins.

    Raises:
        UsageError: the variable is not understood.
    """
    attempt = int(os.environ.get(ATTEMPT) or 1)
    words = [word.strip() for word in os.environ.get(VARIABLE, "").split(",")]
    faults = [_parse(word) for word in words if word]
    _armed[:] = [fault for fault in faults if fault.attempt in (None, attempt)]


def hit(place: str, step: int, value: Any = None) -> Any:
    """Pass a place, where faults may be set.

    Args:
        value: a tree of arrays, or the directory of a checkpoint.

    Returns:
        The value, unchanged or with a fault in it.
    """
    for fault in _armed:
        if fault.place != place or fault.step not in (None, step):
            continue
        if fault.process not in (None, jax.process_index()):
            continue
        line = f"{VARIABLE}: {fault.action} at {place} of step {step}"
        print(line, file=sys.stderr, flush=True)
        value = _act(fault, value)
    return value


def _parse(word: str) -> Failpoint:
    """Parse a word of the variable. Raise UsageError if it is not valid."""
    place, _, rest = word.partition(":")
    does, *numbers = rest.split(":")
    action, _, seconds = does.partition("=")
    problems = []
    if place not in PLACES:
        problems.append(f"PLACE {place!r} is none of {', '.join(PLACES)}")
    if action not in ACTIONS:
        problems.append(f"ACTION {action!r} is none of {', '.join(ACTIONS)}")
    if action in _CHANGES and place in PLACES and place not in _CHANGES[action]:
        problems.append(f"{action} is for {', '.join(_CHANGES[action])}")
    if len(numbers) > 3 or not all(number.isdecimal() or not number for number in numbers):
        problems.append("STEP, ATTEMPT and PROCESS are whole numbers")
    if seconds and (action != "delay" or not seconds.replace(".", "", 1).isdecimal()):
        problems.append("only delay has a number of seconds, such as delay=0.5")
    if problems:
        advice = "Write PLACE:ACTION[:STEP[:ATTEMPT[:PROCESS]]], such as before_step:kill:7"
        what = "; ".join(problems)
        raise UsageError(f"{VARIABLE}={word}: {what}. {advice}, or unset {VARIABLE}.")
    given = [int(number) if number else None for number in numbers]
    missing = [None] * (3 - len(given))
    step, attempt, process = [*given, *missing]
    return Failpoint(place, action, float(seconds or 1), step, attempt, process)


def _act(fault: Failpoint, value: Any) -> Any:
    match fault.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "term":
            os.kill(os.getpid(), signal.SIGTERM)
        case "raise":
            raise RuntimeError(f"{VARIABLE}: raised at {fault.place}")
        case "enospc":
            what = f"{os.strerror(errno.ENOSPC)} ({VARIABLE} at {fault.place})"
            raise OSError(errno.ENOSPC, what)
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
    may_change = [
        i
        for i, leaf in enumerate(leaves)
        if fault.action == "bitflip" or jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    first = may_change[0]
    leaves[first] = _changed(leaves[first], fault)
    return jax.tree.unflatten(treedef, leaves)


def _changed(array: jax.Array, fault: Failpoint) -> jax.Array:
    """Return the array with the first number on the first device of this process changed.

    Copies on other devices are not changed. In a batch the number is the weight of a target; a
    batch without targets, as of a skipped step, is unchanged.
    """
    parts = [shard.data for shard in array.addressable_shards]
    first = np.array(parts[0])
    if fault.action == "nan":
        if fault.place == "data":
            first.flat[np.flatnonzero(first)[:1]] = np.nan
        else:
            first.flat[0] = np.nan
    else:
        first.view(np.uint8).flat[0] ^= 1
    (device,) = parts[0].devices()
    there = jax.sharding.SingleDeviceSharding(device, memory_kind=array.sharding.memory_kind)
    parts[0] = jax.device_put(first, there)
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def _flip_file(folder: Path) -> None:
    """Flip a bit in the middle of the largest file below a directory."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    path = max(files, key=lambda path: path.stat().st_size)
    with open(path, "r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
