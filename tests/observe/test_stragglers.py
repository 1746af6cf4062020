"""The host that the others wait for is named when it has been slow for a while, and only then."""

import pytest

from maxtrain.observe.metrics import Stopwatch
from maxtrain.observe.speed import SpeedMeter
from maxtrain.observe.stragglers import (
    HostTime,
    OwnTime,
    Stragglers,
    in_record,
    slowest_of,
)


def hosts(*seconds):
    return [HostTime(i, f"node{i}", OwnTime(own, own / 2)) for i, own in enumerate(seconds)]


def warnings(records, factor=2.0, step_seconds=1.0):
    """Return the warnings after each record, of 10 steps each."""
    stragglers = Stragglers(factor)
    return [stragglers.warning(slowest_of(hosts(*own)), 10, step_seconds) for own in records]


def test_a_record_names_the_slowest_and_the_median_of_the_others():
    assert in_record(slowest_of(hosts(1.0, 2.0, 30.0, 4.0)), 10) == {
        "slowest_process": 2,
        "slowest_host": "node2",
        "slowest_host_seconds": 3.0,
        "slowest_host_data_wait_seconds": 1.5,
        "other_hosts_seconds": 0.2,
    }
    # A median with the slowest in it would hide one of two.
    assert in_record(slowest_of(hosts(8.0, 1.0)), 10)["other_hosts_seconds"] == 0.1
    assert in_record(slowest_of(hosts(8.0)), 10) == {}


def test_who_is_slow_three_times_in_a_row_is_told_of_less_and_less_often():
    said = warnings([(0.1, 5.0, 0.3)] * 13)
    assert [i + 1 for i, line in enumerate(said) if line] == [3, 6, 12]
    assert said[2] == (
        "process 1 on node1 holds up the others, 3 records in a row: of each step it takes 0.5 s "
        "for itself, 0.25 s of them waiting for data, and the others 0.02 s "
        "(observe.slow_host_factor=2). Look at the disk and the load of that host."
    )


@pytest.mark.parametrize(
    ("records", "factor"),
    [
        # Another one each time, or one that was fast in between.
        ([(5.0, 0.1), (0.1, 5.0)] * 3, 2.0),
        ([(5.0, 0.1), (5.0, 0.1), (0.1, 0.1)] * 3, 2.0),
        # Not by the factor; not by a tenth of the time of steps; not configured.
        ([(5.0, 3.0)] * 5, 2.0),
        ([(0.9, 0.001)] * 5, 2.0),
        ([(9.0, 0.1)] * 5, 0.0),
        ([(9.0,)] * 5, 2.0),
    ],
)
def test_who_is_not_slow_is_not_named(records, factor):
    assert warnings(records, factor) == [""] * len(records)


def test_a_host_that_waits_for_devices_takes_no_time_for_itself(monkeypatch):
    now = [0.0]
    computed = [0.0]
    clock = Stopwatch(lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: computed[0])
    meter = SpeedMeter(clock, {}, 1)
    with clock.during("data_wait"):
        now[0] += 2
    # A dispatch that takes 5 s, of which it works for 1 s.
    with clock.waiting(computes=True):
        now[0] += 5
        computed[0] += 1
    # The devices' results.
    with clock.waiting():
        now[0] += 30
        computed[0] += 0.5
    with clock.during("eval"):
        now[0] += 100
    now[0] += 0.25
    assert meter.own() == OwnTime(seconds=3.25, data_wait=2)
    assert clock.lap() == 37.25
    meter.restart()
    now[0] += 1
    assert meter.own() == OwnTime(seconds=1, data_wait=0)
