"""Every second between the first launch and the last belongs to one cause, and steps that were made
again do not count."""

import pytest

from data_pipeline.base.errors import StorageError
from maxtrain.observe.goodput import Ledger, goodput, read_clock
from maxtrain.observe.metrics import Stopwatch


def launch(start, first, done, **seconds):
    return {"start": start, "first": first, "step": done, "seconds": seconds}


def test_seconds_sum_to_the_wall_time_and_what_was_made_again_is_lost():
    launches = [
        launch(
            100, 0, 10, compile=5.0, step=30.0, data_wait=10.0
        ),  # killed after 10 steps, of which 4 were saved
        launch(160, 4, 10, restore=1.0, step=12.0),
        launch(175, 10, 10, step=0.5),  # nothing to do
    ]
    seconds = goodput(launches)
    assert seconds == {
        "lost": 24.0,
        "step": 24.5,
        "down": 17.0,
        "data_wait": 4.0,
        "compile": 5.0,
        "restore": 1.0,
    }
    assert list(seconds.values()) == sorted(seconds.values(), reverse=True)
    assert sum(seconds.values()) == 175.5 - 100


def test_no_launch_and_one_that_made_no_step():
    assert goodput([]) == {}
    assert goodput([launch(0, 0, 0, step=2.0), launch(3, 0, 5, step=1.0)]) == {
        "step": 3.0,
        "down": 1.0,
    }


def test_each_launch_has_a_line_that_it_writes_anew(tmp_path, monkeypatch):
    monkeypatch.setattr("time.time", lambda: 1000.0)
    now = [0.0]
    for first in (0, 7):
        clock = Stopwatch(lambda: now[0])
        now[0] += 5
        ledger = Ledger(tmp_path / "run", clock, first)
        for step in (first + 1, first + 2):
            ledger.write(step)
            now[0] += 1
    expected = [launch(995.0, 0, 2, step=6.0), launch(995.0, 7, 9, step=6.0)]
    assert read_clock(tmp_path / "run") == expected and read_clock(tmp_path) == []


def test_a_line_that_a_full_disk_refuses_is_written_the_next_time(tmp_path, monkeypatch):
    ledger = Ledger(tmp_path, Stopwatch(lambda: 0.0), 0)
    with monkeypatch.context() as full:

        def no_space(path, content):
            raise StorageError(f"{path}: can't be written (No space left on device)")

        full.setattr("maxtrain.observe.goodput.write_atomic", no_space)
        ledger.write(1)
    assert read_clock(tmp_path) == []
    ledger.write(2)
    assert [line["step"] for line in read_clock(tmp_path)] == [2]


def test_reading_the_clock_changes_nothing_and_sums_to_all_time():
    now = [0.0]
    clock = Stopwatch(lambda: now[0])
    with clock.during("save"):
        now[0] = 3.0
        assert clock.seconds() == clock.seconds() == {"save": 3.0, "step": 0.0}
        assert clock.doing() == ("save", 0.0)
    now[0] = 4.0
    assert clock.seconds() == pytest.approx({"save": 3.0, "step": 1.0}) and clock.doing() == (
        "step",
        3.0,
    )
