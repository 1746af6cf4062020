"""Processes that meet before jax connects them: threads stand for them."""

import concurrent.futures
import contextlib
import json
import socket
import time

import pytest

from data_pipeline.base.errors import ConfigError, TryAgainError, UserError
from maxtrain.parallel import lobby, rendezvous
from maxtrain.parallel.rendezvous import meet


@pytest.fixture
def address():
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return f"localhost:{free.getsockname()[1]}"


@pytest.fixture
def together(address):
    """Starts one of (count, index) each, a little after each other; what each raised, or which of
    how many it is then."""

    def start(*members, seconds=20.0, suffices=lambda count: False):
        with concurrent.futures.ThreadPoolExecutor(len(members)) as threads:
            jobs = []
            for count, index in members:
                jobs.append(threads.submit(meet, address, count, index, seconds, suffices))
                time.sleep(0.05)
        return [outcome(job) for job in jobs]

    return start


def outcome(job):
    """Return the number of processes and the rank of one, or the error that it raised."""
    if job.exception():
        return job.exception()
    count, index, _ = job.result()
    return count, index


@pytest.fixture
def places():
    """Addresses of three processes, of which the first that is there leads."""
    with contextlib.ExitStack() as held:
        taken = [held.enter_context(socket.socket()) for _ in range(3)]
        for one in taken:
            one.bind(("localhost", 0))
        return [f"localhost:{one.getsockname()[1]}" for one in taken]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_all_go_on_when_all_are_there_and_the_port_is_free_again(address, together, order):
    assert together(*((4, index) for index in order)) == [(4, index) for index in order]
    with socket.create_server(("", int(address.rpartition(":")[2]))):
        pass


def test_a_number_that_there_is_not_is_refused(address):
    with pytest.raises(
        ConfigError,
        match=r"mesh\.process_id=2 must be less than mesh\.num_processes=2\. It counts from 0\.",
    ):
        meet(address, 2, 2, 5)


def test_a_job_of_one_waits_for_nobody(together):
    assert together((1, 0)) == [(1, 0)]


@pytest.mark.parametrize(
    ("members", "rule", "advice"),
    [
        (
            [(2, 0), (3, 1)],
            "process 1 (",
            "Give all processes at mesh.coordinator={} the same number.",
        ),
        (
            [(3, 0), (3, 1), (3, 1)],
            "process 1 is there twice: ",
            "Give each process at mesh.coordinator={} a number of its own.",
        ),
    ],
)
def test_who_does_not_fit_is_named_by_all(address, together, members, rule, advice):
    errors = together(*members)
    assert (
        isinstance(errors[0], ConfigError)
        and rule in str(errors[0])
        and advice.format(address) in str(errors[0])
    )
    assert [(error.exit_code, str(error)) for error in errors] == [(78, str(errors[0]))] * len(
        members
    )


def test_who_does_not_come_is_named_by_all(monkeypatch, capsys, together):
    monkeypatch.setattr(rendezvous, "_NEWS", 0.2)
    errors = together((4, 0), (4, 2), seconds=0.8)
    assert all(
        "process 1, 3 did not come in time; 4 are expected. See their logs" in str(error)
        for error in errors
    )
    assert [error.exit_code for error in errors] == [75, 75]
    assert "waiting for process 1, 3 of 4, 0 s more\n" in capsys.readouterr().err


@pytest.mark.every_dose
@pytest.mark.long
def test_those_who_come_go_on_if_they_suffice(capsys, together):
    """They keep their order; of more than the job can use, the last ones end."""
    members = [(6, 5), (6, 0), (6, 3), (6, 2)]
    assert together(*members, seconds=0.5, suffices=lambda count: count >= 3) == [
        (4, 3),
        (4, 0),
        (4, 2),
        (4, 1),
    ]
    assert "process 1, 4 did not come in time; goes on with 4 of 6\n" in capsys.readouterr().err
    (*errors,) = together(*members, seconds=0.5, suffices=lambda count: count in (2, 3, 5))
    assert errors[1:] == [(3, 0), (3, 2), (3, 1)] and errors[0].exit_code == 75
    assert "the job goes on with 3 processes, without process 5." in str(errors[0])
    assert {
        error.exit_code
        for error in together(*members, seconds=0.5, suffices=lambda count: count > 4)
    } == {75}


def test_process_0_that_does_not_come_or_is_something_else_is_said(monkeypatch, capsys, address):
    monkeypatch.setattr(rendezvous, "_NEWS", 0.2)
    with pytest.raises(
        TryAgainError,
        match=r"process 0 did not come in time for process 1 on .* \(Connection refused\)\. See its",
    ):
        meet(address, 2, 1, 0.5)
    assert (
        f"waiting for process 0 at {address} (Connection refused), 0 s more\n"
        in capsys.readouterr().err
    )
    port = int(address.rpartition(":")[2])
    with (
        socket.create_server(("localhost", port)) as other,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        job = threads.submit(meet, address, 2, 1, 0.5)
        other.settimeout(0.02)
        while not job.done():
            with contextlib.suppress(TimeoutError), other.accept()[0] as guest:
                guest.recv(4096)
                guest.sendall(b"\x00\x00\x12\x04")
        assert "(something else answers). See its log" in str(job.exception())


def test_a_port_that_is_taken_is_said(address):
    with (
        socket.create_server(("", int(address.rpartition(":")[2]))),
        pytest.raises(
            TryAgainError,
            match=r"can't listen there \(Address already in use\)\. End what uses that port",
        ),
    ):
        meet(address, 2, 0, 5)


def test_one_that_is_started_again_takes_its_own_place(address, together):
    """It was killed while it waited; nobody waits for what is left of it, and none takes it for a
    second one."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        first = threads.submit(meet, address, 3, 0, 20)
        place = ("localhost", int(address.rpartition(":")[2]))
        for said in (
            b"GET / HTTP/1.1\r\n",
            json.dumps({"index": 1, "count": 3, "who": "killed"}).encode() + b"\n",
        ):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection(place) as guest:
                        guest.sendall(said)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.01)
        assert together((3, 2), (3, 1)) == [(3, 2), (3, 1)] and outcome(first) == (3, 0)


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize(
    ("present", "leader"), [([4, 1, 2, 3], 1), ([3, 2, 4], 2), ([3, 4], None), ([4, 2, 1], 1)]
)
def test_the_first_that_is_there_leads_if_process_0_is_missing(places, present, leader):
    """There are five, of which two suffice; one of the first three must be present."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        jobs = {}
        for index in present:
            jobs[index] = threads.submit(
                meet, ",".join(places), 5, index, 1.5, lambda count: count >= 2
            )
            time.sleep(0.05)
    if leader is None:
        assert all(job.exception().exit_code == 75 for job in jobs.values())
        return
    for number, index in enumerate(sorted(present)):
        assert jobs[index].result() == (len(present), number, places[leader])


@pytest.mark.every_dose
@pytest.mark.long
def test_those_who_came_to_another_one_find_process_0_when_it_comes(places):
    """From then on nobody waits for the time limit."""
    suffices = lambda count: count >= 2  # noqa: E731
    begin = time.monotonic()
    with concurrent.futures.ThreadPoolExecutor() as threads:
        jobs = {}
        for index, pause in ((3, 0.1), (2, 0.6), (1, 1.2), (0, 0)):
            jobs[index] = threads.submit(meet, ",".join(places), 4, index, 60, suffices)
            time.sleep(pause)
    assert time.monotonic() - begin < 30
    assert [jobs[index].result() for index in range(4)] == [(4, i, places[0]) for i in range(4)]


def test_where_all_must_be_there_process_0_must(places):
    with concurrent.futures.ThreadPoolExecutor() as threads:
        jobs = [threads.submit(meet, ",".join(places), 3, index, 0.5) for index in (1, 2)]
    assert all("process 0 did not come in time" in str(job.exception()) for job in jobs)


@pytest.mark.parametrize("address", ["host", "a:1,b", "", "a:1,,b:2"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(ConfigError, match=r"Set mesh\.coordinator=10\.0\.0\.1:8476, for example"):
        meet(address, 2, 0, 1)


def test_more_addresses_than_processes_are_refused():
    with pytest.raises(ConfigError, match=r"has 3 addresses, and the job has mesh\.num_proc"):
        meet("a:1,b:2,c:3", 2, 0, 1)


def test_codes_and_texts_of_any_error_are_passed_on(monkeypatch, together):
    monkeypatch.setattr(lobby, "_misfit", lambda *args: UserError("some rule. Some advice."))
    assert [str(error) for error in together((2, 0), (2, 1))] == ["some rule. Some advice."] * 2
