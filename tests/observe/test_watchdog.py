"""A run that stands still ends, says where it stood, and names who did not answer; one that is only
slow goes on."""

import math
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from maxtrain.config.schema import WatchdogConfig
from maxtrain.observe import outer_watchdog, watchdog
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.watchdog import Watchdog
from maxtrain.parallel.agreement import Board

ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, functools, sys, time
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from maxtrain.config.schema import WatchdogConfig
from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe import watchdog
from maxtrain.observe.watchdog import Watchdog
from maxtrain.parallel.agreement import Board, require_agreement

if sys.argv[6] == "c":
    watchdog._PATIENCE = 1.0
folder, index, count = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
jax.config.update("jax_platforms", "cpu")
if count > 1:
    jax.distributed.initialize(sys.argv[4], count, index)
if sys.argv[6] == "collective":
    jax.config.update("jax_num_cpu_devices", 2)
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

def late(index, x):
    time.sleep(600 if index == 0 else 0)
    return x

clock = Stopwatch()
board = Board("watchdog") if count > 1 else None
with Watchdog(WatchdogConfig(save_seconds=float(sys.argv[5])), folder, clock, "rows {}".format, index, board) as dog:
    dog.begin(lambda: 7)
    require_agreement("launch", {})
    if board:
        while len(board.heard()) < count:
            time.sleep(0.01)
    print("ready", flush=True)
    with clock.during("save"):
        lock, libc = ctypes.create_string_buffer(64), ctypes.PyDLL(None)
        while sys.argv[6] == "python":
            time.sleep(600)
        if sys.argv[6] == "collective":  # one of two devices never joins it

            @jax.jit
            @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P(), check_vma=False)
            def total(x):
                x = jax.pure_callback(late, jax.ShapeDtypeStruct(x.shape, x.dtype), jax.lax.axis_index("data"), x)
                return jax.lax.psum(x, "data")

            total(jnp.ones(2)).block_until_ready()
        time.sleep(2.5)  # so that the outer watchdog knows the limit
        for _ in range(2):  # for ever, with Python's lock
            libc.pthread_mutex_lock(lock)
"""


def start(folder, index=0, count=1, address="", seconds=1.0, where="python"):
    words = [
        sys.executable,
        "-c",
        PROGRAM,
        str(folder),
        str(index),
        str(count),
        address,
        str(seconds),
        where,
    ]
    return subprocess.Popen(
        words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_each_cause_has_its_limit_and_steps_the_one_of_their_usual_time(tmp_path):
    clock = Stopwatch(iter((0, 8, 9, 10, 12, 112)).__next__)
    dog = Watchdog(WatchdogConfig(10, 15, 600, 50, 60, 40), tmp_path, clock, str)
    limits = {"compile": 600, "eval": 50, "rollout": 60, "save": 40, "restore": 40}
    assert {cause: dog.limit(cause) for cause in limits} == limits
    clock.lap()
    assert dog.limit("step") == dog.limit("data_wait") == 600, (
        "the first steps compile what is small"
    )
    clock.lap()
    clock.lap()
    assert dog.limit("step") == 15, "ten times one second is less than the least"
    clock.lap()
    clock.lap()
    assert dog.limit("step") == 10 * 2, (
        "one slow step among 8, 1, 1, 2 and 100 seconds changes nothing"
    )


def test_zero_is_no_limit(tmp_path):
    clock = Stopwatch()
    dog = Watchdog(WatchdogConfig(0, 15, 0, 0, 0, 0), tmp_path, clock, str)
    for _ in range(3):
        clock.lap()
    assert {dog.limit(cause) for cause in ("compile", "eval", "rollout", "save", "step")} == {
        math.inf
    }


def test_progress_and_sleep_are_no_stall(tmp_path, monkeypatch):
    """At first there is a batch between every two checks; then the whole process is stopped for an
    hour; then it really hangs."""
    times, ended = [0.0], []
    dog = Watchdog(WatchdogConfig(save_seconds=20), tmp_path, Stopwatch(), str)
    ticks = [*range(1, 101), *range(3701, 3716)]
    monkeypatch.setattr(watchdog.time, "monotonic", lambda: times[-1])
    monkeypatch.setattr(dog._clock, "doing", lambda: ("save", min(times[-1], 100)))
    monkeypatch.setattr(dog._ended, "wait", lambda seconds: not ticks or times.append(ticks.pop(0)))
    monkeypatch.setattr(dog, "_end", lambda cause, stood: ended.append((cause, stood)))
    dog._watch()
    assert not ended
    ticks += range(3716, 3724)
    dog._watch()
    assert not ended, "each look begins anew"
    times[:], ticks[:] = [100.0], list(range(101, 124))
    dog._watch()
    assert ended[0] == ("save", 21)


def test_the_beat_goes_on_when_nobody_can_hear_it(tmp_path, monkeypatch):
    """Process 0 is gone: who waits for it says so, and a traceback of this thread would only hide
    that."""

    class Gone(Board):
        said = 0

        def say(self, text):
            self.said += 1
            raise RuntimeError("UNAVAILABLE: connection refused")

    board, beats = Gone("watchdog"), [False, False, True]
    dog = Watchdog(WatchdogConfig(), tmp_path, Stopwatch(), str, 1, board)
    monkeypatch.setattr(dog._ended, "wait", lambda seconds: beats.pop(0))
    dog._beat()
    assert board.said == 2


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize(
    ("where", "stacks"),
    [
        ("python", ['File "<string>", line 38 in <module>']),
        pytest.param(
            "collective",
            ['File "<string>", line 23 in late', 'File "<string>", line 47 in <module>'],
            marks=pytest.mark.long,
        ),
    ],
)
def test_a_process_that_hangs_ends_with_exit_75_and_leaves_stacks_and_rows(tmp_path, where, stacks):
    """It may hang in a collective of a CPU's devices, for which XLA itself waits a day."""
    with start(tmp_path / "run", where=where) as process:
        try:
            out, err = process.communicate(timeout=700)
        finally:
            process.kill()
    assert (process.returncode, out) == (75, "ready\n"), err
    left = (tmp_path / "run" / "stalled-0.txt").read_text()
    for said in (left, err):
        assert (
            "process 0 has stood still for 1 s after 7 steps, in: save (limit: 1 s, section watchdog)"
            in said
        )
        assert "Run the same command again" in said
        assert all(stack in said for stack in stacks)
        assert "Step 7: rows 6\nStep 8: rows 7\n" in said


@pytest.mark.long
@pytest.mark.processes
def test_a_process_that_keeps_pythons_lock_is_ended_from_outside_with_its_stacks(tmp_path):
    with start(tmp_path, seconds=4, where="c") as process:
        try:
            out, err = process.communicate(timeout=700)
        finally:
            process.kill()
    assert (process.returncode, out) == (-signal.SIGABRT, "ready\n"), err
    assert (
        f"process {process.pid} has not run Python for 6 s: something keeps the interpreter's lock."
        in err
    )
    assert 'File "<string>", line 50 in <module>' in err


@pytest.mark.parametrize(
    ("events", "killed", "parent"),
    [
        (["0", "tick", "tick", "tick", "tick"], False, 7),
        (["3", "tick", "tick", "tick", "3", "tick", "tick", "tick"], False, 7),
        (["2", "tick", "tick", "tick"], True, 7),
        (["2", "tick", "tick", "tick"], False, 1),
        (["9", "tick", "2 3 2", "tick", "tick", "tick"], True, 7),
        (["2", "tick", "0", "tick", "tick", "tick"], False, 7),
    ],
)
def test_the_judge_waits_as_long_as_it_was_told_last(monkeypatch, events, killed, parent):
    """A second without a line is a tick; at the end of the events the pipe is closed. The parent is
    1 when 7 has gone."""
    events, kills = list(events), []

    def ready(*_):
        return ([], [], []) if events and events[0] == "tick" and events.pop(0) else ([0], [], [])

    monkeypatch.setattr(outer_watchdog.select, "select", ready)
    monkeypatch.setattr(
        outer_watchdog.os, "read", lambda *_: events.pop(0).encode() if events else b""
    )
    monkeypatch.setattr(outer_watchdog.os, "kill", lambda *what: kills.append(what))
    monkeypatch.setattr(outer_watchdog.os, "getppid", lambda: parent)
    outer_watchdog.end_when_stuck(7)
    assert kills == ([(7, signal.SIGABRT)] if killed else []) and not events


@pytest.mark.long
@pytest.mark.processes
def test_a_stopped_process_is_named_by_the_others(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    processes = [start(tmp_path, index, 3, address, seconds=4) for index in range(3)]
    try:
        for process in processes:
            assert process.stdout and process.stdout.readline() == "ready\n", process.communicate()
        os.kill(processes[2].pid, signal.SIGSTOP)
        said = [process.communicate(timeout=700) for process in processes[:2]]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes[:2]] == [75, 75], said
    for index in range(2):
        left = (tmp_path / f"stalled-{index}.txt").read_text()
        assert "process 2 IS SILENT: stopped, gone or cut off; it was after" in left
        assert (
            "process 0 is alive; it was after 7 steps, in: save" in left
            and "process 1 is alive" in left
        )
    assert not (tmp_path / "stalled-2.txt").exists()
