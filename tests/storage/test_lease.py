"""The lock of a run behind a URL: one has it, the dead lose it, and who lost it writes nothing."""

import concurrent.futures
import json
import time

import pytest

from benchmarks.faulty_s3 import RequestFault, names_below
from data_pipeline.base.errors import LockedError, StorageError
from data_pipeline.base.remote import RemotePath
from maxtrain.storage import lease
from maxtrain.storage.lease import Lease


@pytest.fixture
def told(monkeypatch) -> list[str]:
    """Lines about waiting. The wait is short."""
    monkeypatch.setattr(lease, "LEASE", 2.4)
    return []


def held_by(place: RemotePath, number: int, **changes: object) -> None:
    """A lock of somebody else, who gives no sign of life."""
    identity = {"state": "held", "token": "theirs", "who": "process 5 on far", "system": "another"}
    content = json.dumps(identity | changes).encode()
    assert (place / "lock" / f"{number:08d}").create(content)


@pytest.mark.every_dose
@pytest.mark.long
def test_the_lock_goes_from_one_to_the_next(url, told):
    first = Lease(url, told.append)
    first.require()
    with pytest.raises(LockedError, match=r"is being written by process \d+ on .*run_name"):
        Lease(url, told.append)
    assert "for its heartbeat" in told[0]
    first.free()
    second = Lease(url, told.append)
    assert len(told) == 1 and names_below(url) == ["lock/00000002"]
    second.free()


def test_one_of_many_gets_it(url, told):
    def take(_: int) -> Lease | None:
        try:
            return Lease(url, told.append)
        except LockedError:
            return None

    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        taken = [one for one in threads.map(take, range(4)) if one]
    assert len(taken) == 1
    taken[0].require()
    taken[0].free()


def test_a_process_that_has_ended_here_is_not_waited_for(url, told):
    identity = lease._identity()
    held_by(url, 7, **identity | {"start": "before this one", "who": "a process of before"})
    taken = Lease(url, told.append)
    assert not told and names_below(url) == ["lock/00000008"]
    taken.free()


@pytest.mark.every_dose
@pytest.mark.long
def test_a_silent_host_loses_it_and_notices(url, told):
    held_by(url, 1)
    begin = time.monotonic()
    taken = Lease(url, told.append)
    assert time.monotonic() - begin > 2 and "process 5 on far" in told[0]
    # Another one takes this one for dead.
    held_by(url, 3)
    with pytest.raises(LockedError, match=r"process 5 on far has taken the lock.*Let that one go"):
        taken.require()
    taken.free()
    assert json.loads((url / "lock" / "00000003").read_bytes())["token"] == "theirs"


def test_a_store_without_conditions_is_refused(url, told, monkeypatch):
    def overwrite(self: RemotePath, data: bytes) -> bool:
        self.write_bytes(data)
        return True

    monkeypatch.setattr(RemotePath, "create", overwrite)
    with pytest.raises(StorageError, match=r"writes over what is there.*Set output_dir to"):
        Lease(url, told.append)


def test_a_lock_that_cannot_be_looked_at_just_now_is_not_lost(store, url, told, monkeypatch):
    monkeypatch.setattr("data_pipeline.base.remote._PAUSE", 0.01)
    taken = Lease(url, told.append)
    store.begin([RequestFault("GET /faulty/?", status=400, code="Odd", times=1)])
    taken.require()
    store.begin([RequestFault("GET /faulty/?", status=400, code="Odd")])
    with pytest.raises(StorageError, match="listing failed 5 times"):
        taken.require()
    store.begin([])
    taken.require()
    taken.free()


# Its client checks what it reads; with gs://, a bit that is no part of the token does not matter.
@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_store_that_reads_other_bytes_is_refused_if_it_always_does(store, url, told, monkeypatch):
    monkeypatch.setattr("data_pipeline.base.remote._PAUSE", 0.01)
    lock = {"pattern": "GET .*/lock/.*", "flip": True}
    store.begin([RequestFault(**lock, times=2)])
    Lease(url, told.append).free()
    store.begin([RequestFault(**lock)])
    with pytest.raises(StorageError, match=r"but other bytes are read. Set output_dir"):
        Lease(url, told.append)


def test_a_store_that_loses_what_is_written_is_refused(store, url, told):
    store.begin([RequestFault("PUT .*/lock/.*", lose=True)])
    with pytest.raises(StorageError, match=r"lock/00000001: was written, but is not there. Set"):
        Lease(url, told.append)
