"""The pool: what is slow or dead costs itself alone, and nothing stays behind."""

import math
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.rl.rewards import workers
from maxtrain.rl.rewards.workers import (
    CRASH,
    ERROR,
    OK,
    SKIPPED,
    TIMEOUT,
    RewardWorkers,
)

ROOT = Path(__file__).parents[3]
HERE = "tests.rl.rewards.functions"
# A call of C that takes for ever and holds Python's lock.
FOREVER = (9, 9**9)
POWER = "operator:pow"


def state(pid: int) -> str:
    """The kernel's letter for what a process does; X: there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_there(pid: int) -> bool:
    """Return True if a process runs; one that has ended and was not waited for does not."""
    return state(pid) not in "ZX"


def assert_gone(pids, seconds=20.0):
    """All processes end soon."""
    ends = time.monotonic() + seconds
    while any(map(is_there, pids)) and time.monotonic() < ends:
        time.sleep(0.02)
    assert not [pid for pid in pids if is_there(pid)]


@pytest.fixture(scope="module")
def pool():
    with RewardWorkers(2, seconds=0.2) as pool:
        pool.run(POWER, [(1, 1)])
        yield pool
        pids = [*pool.pids, pool.server_pid]
        assert all(map(is_there, pids))
    assert_gone(pids)


def outcomes(results):
    return [result.outcome for result in results]


def test_results_are_in_order(pool):
    results = pool.run(POWER, [(n, 2) for n in range(50)])
    assert [result.value for result in results] == [n * n for n in range(50)]
    assert set(outcomes(results)) == {OK}
    assert pool.run(POWER, []) == []


def test_items_that_hang_cost_themselves_alone_and_no_more_than_their_time(pool):
    items = [(2, 10), FOREVER, (2, 11), FOREVER, FOREVER, (2, 12)]
    began = time.monotonic()
    results = pool.run(POWER, items)
    seconds = time.monotonic() - began
    assert outcomes(results) == [OK, TIMEOUT, OK, TIMEOUT, TIMEOUT, OK]
    assert [result.value for result in results[::2]] == [1024, 2048, None]
    assert "took over 0.2 s" in results[1].detail
    assert seconds < 0.2 * math.ceil(3 / 2) + 2


def test_a_worker_that_is_killed_loses_its_item_only(pool):
    before = pool.pids
    killed = threading.Timer(0.3, os.kill, (before[0], signal.SIGKILL))
    killed.start()
    results = pool.run("time:sleep", [(0.1,)] * 16, seconds=5.0)
    killed.join()
    assert sorted(outcomes(results)) == [CRASH] + [OK] * 15
    assert len(pool.pids) == 2 and before[0] not in pool.pids and before[1] in pool.pids
    assert_gone(before[:1])


def test_a_worker_that_is_killed_while_it_waits_loses_nothing(pool):
    for pid in pool.pids:
        os.kill(pid, signal.SIGKILL)
    assert_gone(pool.pids)
    assert outcomes(pool.run(POWER, [(2, 2)] * 6)) == [OK] * 6


def test_a_worker_that_stands_still_is_replaced(pool):
    stopped = pool.pids[0]
    os.kill(stopped, signal.SIGSTOP)
    assert sorted(outcomes(pool.run(POWER, [(2, 2)] * 6))) == [OK] * 5 + [TIMEOUT]
    assert_gone([stopped])


def test_without_their_server_items_at_work_are_lost_and_no_others(pool):
    server = pool.server_pid
    killed = threading.Timer(0.15, os.kill, (server, signal.SIGKILL))
    killed.start()
    results = pool.run("time:sleep", [(0.1,)] * 12, seconds=5.0)
    killed.join()
    assert outcomes(results).count(OK) >= 10
    assert set(outcomes(results)) <= {OK, CRASH}
    assert pool.server_pid != server


def test_an_exit_is_a_crash_and_an_exception_is_an_error(pool):
    assert outcomes(pool.run("os:_exit", [(0,), (1,), (2,)])) == [CRASH] * 3
    (result,) = pool.run("operator:truediv", [(1, 0)])
    assert result.outcome == ERROR and "division by zero" in result.detail
    (result,) = pool.run("builtins:object", [()])
    assert result.outcome == ERROR and "not JSON serializable" in result.detail


def test_what_takes_too_much_memory_is_a_crash():
    with RewardWorkers(1, memory_bytes=1 << 29) as pool:
        results = pool.run("builtins:bytearray", [(1 << 30,)])
        assert outcomes(results) == [CRASH]
        assert outcomes(pool.run(POWER, [(2, 2)])) == [OK]


def test_what_has_not_begun_by_the_deadline_is_skipped(pool):
    began = time.monotonic()
    results = pool.run("time:sleep", [(0.15,)] * 40, deadline=0.5)
    assert time.monotonic() - began < 2.5
    assert set(outcomes(results)) <= {OK, TIMEOUT, SKIPPED}
    assert outcomes(results).count(SKIPPED) > 20
    assert "the batch's deadline" in results[-1].detail
    assert outcomes(pool.run(POWER, [(2, 2)])) == [OK]


def test_a_function_that_is_not_there_is_an_error_of_every_item(pool):
    for path, said in (
        ("no_such_module:f", "there is no module no_such_module"),
        ("os.no_such_function", "os has no function no_such_function"),
        ("nothing", "must name a module and a function"),
    ):
        results = pool.run(path, [(1,), (2,), (3,)])
        assert outcomes(results) == [ERROR] * 3
        assert all(said in result.detail for result in results)


def test_workers_are_replaced_after_their_items():
    with RewardWorkers(1, recycle=3) as pool:
        pids = [result.value for result in pool.run("os:getpid", [()] * 7)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


def test_processes_that_items_start_end_with_them(tmp_path):
    with RewardWorkers(1, seconds=0.5) as pool:
        (result,) = pool.run(f"{HERE}:start_and_hang", [(str(tmp_path / "pids"),)])
    assert result.outcome == TIMEOUT
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert_gone(pids)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.skipif(sys.platform != "linux", reason="other systems can't adopt orphans")
@pytest.mark.parametrize(
    ("hangs", "outcome"), [("hangs", TIMEOUT), ("dies", CRASH), ("returns", OK)]
)
def test_a_process_that_left_its_session_ends_with_its_worker(tmp_path, hangs, outcome):
    file = tmp_path / "pid"
    with RewardWorkers(1, seconds=5) as pool:
        (result,) = pool.run(f"{HERE}:start_daemon", [(str(file), hangs)])
        assert result.outcome == outcome
        if outcome != OK:
            assert_gone([int(file.read_text())])
        (result,) = pool.run(POWER, [(2, 3)])
        assert result.value == 8
    assert_gone([int(file.read_text())])


def test_workers_see_no_variable_that_was_not_named(monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("LANG", "C.UTF-8")
    with RewardWorkers(1, passed=["OPENAI_API_KEY"]) as pool:
        (result,) = pool.run(f"{HERE}:environment", [("OPENAI_API_KEY", "HF_TOKEN", "LANG")])
    assert result.value == ["secret", None, "C.UTF-8"]


WITH_A_POOL = """
import sys, threading
from maxtrain.rl.rewards.workers import RewardWorkers
pool = RewardWorkers(2, seconds=600)
pool.run("operator:pow", [(1, 1)])
print(pool.server_pid, *pool.pids, flush=True)
if sys.argv[1] == "busy":
    pool.run("operator:pow", [(9, 9**9)] * 2)
"""


@pytest.mark.processes
@pytest.mark.parametrize("end", ["busy", "at its end"])
def test_nothing_is_left_of_a_process_that_was_killed_or_did_not_close_its_pool(end):
    command = [sys.executable, "-c", WITH_A_POOL, end]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 3
        if end == "busy":
            while "R" not in (state(pids[1]), state(pids[2])):
                time.sleep(0.01)
            process.kill()
        assert process.wait(60) == (-signal.SIGKILL if end == "busy" else 0)
    assert_gone(pids)


def test_where_no_process_can_be_started_every_item_is_skipped(monkeypatch):
    monkeypatch.setattr(workers.sys, "executable", "/no/such/python")
    with RewardWorkers(1) as pool:
        for _ in range(5):
            (result,) = pool.run(POWER, [(2, 2)])
            assert result.outcome == SKIPPED and "no process can be started" in result.detail
    monkeypatch.setattr(workers.sys, "executable", "/bin/false")
    with RewardWorkers(1) as pool:
        (result,) = pool.run(POWER, [(2, 2)])
        assert result.outcome == SKIPPED and "server of workers" in result.detail


def test_a_pool_that_was_closed_starts_again():
    pool = RewardWorkers(1)
    assert outcomes(pool.run(POWER, [(2, 2)])) == [OK]
    pids = [*pool.pids, pool.server_pid]
    pool.close()
    assert_gone(pids)
    assert outcomes(pool.run(POWER, [(2, 2)])) == [OK]
    pool.close()


def test_a_pool_that_is_closed_does_not_wait_for_the_batch_of_another_thread():
    pool = RewardWorkers(1, seconds=600.0, deadline=600.0)
    results = []
    thread = threading.Thread(
        target=lambda: results.extend(pool.run("time:sleep", [(600,), (600,)]))
    )
    thread.start()
    limit = time.monotonic() + 60
    while not any(worker.item is not None for worker in pool._workers):
        assert time.monotonic() < limit
        time.sleep(0.01)
    began = time.monotonic()
    pool.close()
    thread.join(60)
    assert not thread.is_alive()
    assert time.monotonic() - began < 60
    assert OK not in [result.outcome for result in results]
    assert len(results) == 2
    assert pool.server_pid is None


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"workers": 0}, "Set workers=1 or more"),
        ({"recycle": 0}, "Set recycle=1 or more"),
        ({"seconds": 0.0}, "Set seconds=5"),
        ({"deadline": -1.0}, "Set deadline=5"),
    ],
)
def test_limits_that_make_no_sense_are_refused(options, advice):
    with pytest.raises(ConfigError, match=advice):
        RewardWorkers(**options)


def test_a_module_in_the_current_folder_is_found_as_by_python_m(tmp_path, monkeypatch):
    """A console script has no current folder among the places where it looks for modules."""
    (tmp_path / "rewards_beside_the_data.py").write_text("def one(): return 1\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    with RewardWorkers(1) as pool:
        (result,) = pool.run("rewards_beside_the_data:one", [()])
    assert (result.outcome, result.value) == (OK, 1)
