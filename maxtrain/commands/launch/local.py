"""`maxtrain launch local`: the processes of a job on this machine, with one output."""

import contextlib
import os
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from data_pipeline.base.errors import ConfigError, StorageError, UsageError
from maxtrain.commands.launch.plan import LaunchPlan
from maxtrain.commands.launch.processes import (
    SETTLE,
    Processes,
    addresses,
    for_child,
    passing_on_signals,
    start_process,
)
from maxtrain.parallel.cluster import ProcessInfo, local_gpus


def run_local(
    plan: LaunchPlan, processes: int, environment: Mapping[str, str], grace: float
) -> int:
    """Runs the processes of a job until all have ended; the exit code of the first that failed.

    Each line that they print begins with the number of its process. One that fails ends the others.
    SIGINT and SIGTERM are handed on to all; SIGHUP, from a terminal that is closed, as SIGTERM.

    Args:
        plan: what is started.
        processes: how many.
        environment: of each, beside ours.
        grace: seconds from a signal until they are killed.

    Raises:
        ConfigError: they can't share the accelerators of this machine.
    """
    extra = dict(environment)
    shares = device_shares(processes, os.environ | extra, plan.config.mesh.platform)
    job = _LocalJob(grace)
    with passing_on_signals(job.hand_on):
        try:
            for index, address in enumerate(addresses(processes)):
                job.start(index, plan.command, extra | address | shares[index])
            code = job.wait()
        finally:
            job.end()
    if code < 0:
        return 128 - code
    return code


class _LocalJob:
    """The processes, and those who pass on what they print."""

    def __init__(self, grace: float):
        self._processes = Processes()
        self._readers: list[threading.Thread] = []
        self._grace = grace
        self._deadline = float("inf")
        # The signal that came last; 0: none.
        self._asked = 0

    def start(self, index: int, command: Sequence[str], extra: Mapping[str, str]) -> None:
        child = start_process(command, extra, subprocess.PIPE)
        self._processes.add(index, child)
        # It was not yet there when the signal came.
        if self._asked:
            child.send_signal(self._asked)
        prefix = f"[{index}] "
        for source, sink in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
            reader = threading.Thread(target=_pass_lines, args=(source, sink, prefix), daemon=True)
            reader.start()
            self._readers.append(reader)

    def wait(self) -> int:
        """Wait until all processes have ended; return the exit code, negative for a signal."""
        ended = self._processes.wait(SETTLE, lambda: self._deadline)
        for index, code in ended.failed.items():
            # The terminal may be closed.
            with contextlib.suppress(OSError):
                print(f"launch: process {index} ended with {code}", file=sys.stderr, flush=True)
        return ended.code

    def end(self) -> None:
        """None of them lives on, and all that they have printed is passed on."""
        self._processes.end_all()
        for reader in self._readers:
            # What they started may have gone elsewhere with their output.
            reader.join(timeout=SETTLE)

    def hand_on(self, number: int, frame: FrameType | None) -> None:
        self._asked = for_child(number)
        self._deadline = min(self._deadline, time.monotonic() + self._grace)
        self._processes.tell(self._asked)


def _pass_lines(source: Any, sink: Any, prefix: str) -> None:
    """Passes on what a process prints, a stream of bytes, to one of text: each line with a prefix,
    in one write."""
    with source:
        for line in source:
            text = line.decode(errors="replace")
            if not text.endswith("\n"):
                text += "\n"
            # Nobody may read any more; the process is not to stand still for that.
            with contextlib.suppress(OSError, ValueError):
                sink.write(f"{prefix}{text}")
                sink.flush()


def device_shares(
    processes: int, environment: Mapping[str, str], platform: str, devices: str = "/dev"
) -> list[dict[str, str]]:
    """Return what each process finds in its environment so that it takes its share of the GPUs.

    Args:
        processes: how many there are.
        environment: theirs; CUDA_VISIBLE_DEVICES limits what is shared.
        platform: mesh.platform.
        devices: folder of device files.

    Raises:
        ConfigError: GPUs can't be shared evenly, or several processes would use one TPU.
    """
    shares: list[dict[str, str]] = [{} for _ in range(processes)]
    if processes == 1 or platform == "cpu" or environment.get("JAX_PLATFORMS") == "cpu":
        return shares
    if any(Path(devices).glob("accel*")) or any(Path(devices).glob("vfio/[0-9]*")):
        rule = f"--processes {processes}: one process drives all TPU chips of a host"
        raise ConfigError(f"{rule}. Use --processes 1, or set mesh.platform=cpu.")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    for index, share in enumerate(shares):
        place = ProcessInfo("local", "", processes, index, processes, index)
        taken = local_gpus(place, environment, devices)
        if taken is None:
            continue
        names = [str(number) for number in taken]
        if visible is not None:
            named = [name for name in visible.split(",") if name.strip()]
            names = [named[number] for number in taken]
        share["CUDA_VISIBLE_DEVICES"] = ",".join(names)
    return shares


def submit(command: Sequence[str], text: str) -> None:
    """Pass a rendered file to a scheduler, by its standard input.

    Raises:
        UsageError: there is no such program here.
        StorageError: the scheduler refused the file; it has printed the reason.
    """
    try:
        done = subprocess.run(command, input=text.encode(), check=False)
    except FileNotFoundError as error:
        rule = f"--submit needs `{command[0]}`, which is not on this machine"
        fix = "Submit from a machine that has it, or write the file by --output FILE"
        raise UsageError(f"{rule}. {fix}.") from error
    if done.returncode:
        rule = f"`{shlex.join(command)}` ended with {done.returncode}"
        raise StorageError(f"{rule}; nothing was started. See its message above.")
