"""Bucket checks of `maxtrain doctor`, against a local server of s3:// or gs://: the faults are
named, and nothing is left in the bucket."""

import json
import re

import pytest
import yaml

from benchmarks.faulty_s3 import RequestFault, flipped
from data_pipeline.base import remote
from data_pipeline.base.remote import RemotePath
from maxtrain.commands.doctor import command, devices
from maxtrain.commands.doctor.bucket import bucket

DENIED = {"status": 403, "code": "AccessDenied", "message": "no"}
WRONG_REGION = {
    "status": 400,
    "code": "AuthorizationHeaderMalformed",
    "message": "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
}


# Of aiohttp, since gcsfs hands it bytes and no file.
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture
def url(store, monkeypatch):
    """A place in a bucket that is to be left empty."""
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    store.begin([])
    yield f"{store.url}/deep/runs"
    store.begin([])
    store.fill("deep/", {})


def test_a_bucket_that_works_is_timed_and_left_as_it_was(store, url):
    store.fill("deep/", {"runs/it/run.json": b"{}"})
    store.begin([])
    found = bucket(url + "/", 2)
    assert found["url"] == url + "/" and "error" not in found
    assert found["uploaded_bytes_per_second"] > 0 and found["downloaded_bytes_per_second"] > 0
    assert store.contents("deep/") == {"runs/it/run.json": b"{}"}
    written = [seen for seen in store.requests() if seen.startswith("PUT")]
    # It is created once, refused, and another one is timed.
    assert len(written) == 3
    assert all(seen.startswith("PUT /faulty/deep/runs/.doctor-") for seen in written)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            RequestFault("PUT .*", **DENIED),
            r"/lock: writing is not allowed \((PermissionError|Forbidden): no\). Give this machine",
        ),
        (
            RequestFault("GET .*/lock", **DENIED),
            r"/lock: reading is not allowed \((PermissionError|Forbidden): no\). Give this machine",
        ),
        (
            RequestFault("PUT .*/lock", lose=True),
            "/lock: was written, but is not there. Set output_dir",
        ),
        (
            RequestFault("GET .*/bytes", flip=True),
            r"/bytes: (reading failed 5 times \(FlexibleChecksumError|other bytes are read than)",
        ),
        (
            RequestFault("PUT .*/bytes", keep=9),
            r"bytes were written, but 9 are there\), which may pass\.",
        ),
        (
            RequestFault("PUT .*", status=400, code="Odd", message="x"),
            "which may pass. Check network",
        ),
    ],
    ids=["read-only", "not readable", "loses", "flips", "truncates", "fails"],
)
def test_what_a_bucket_refuses_or_spoils_is_told_and_nothing_is_left(store, url, fault, said):
    store.begin([fault])
    found = bucket(url, 1)
    assert re.match(rf"{url}/\.doctor-[0-9a-f]+.*{said}", found["error"])
    assert "may be left" not in found["error"] and store.contents("deep/") == {}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (
            "(POST|DELETE) .*",
            r"deleting is not allowed \((PermissionError|Forbidden): no\). Give this machine",
        ),
        (
            "GET /faulty/?",
            r"listing is not allowed \((PermissionError|Forbidden): no\). Give this machine",
        ),
    ],
)
def test_what_can_not_be_removed_is_named(store, url, pattern, said):
    store.begin([RequestFault(pattern, **DENIED)])
    found = bucket(url, 1)
    assert re.search(said, found["error"]) and found["uploaded_bytes_per_second"] > 0
    left = {name.split("/")[1] for name in store.contents("deep/")}
    assert f"it may be left in {url}/{left.pop()}." in found["error"] and not left


def test_a_lost_answer_is_no_fault_of_the_lock(store, url):
    store.begin([RequestFault("PUT .*/lock", done=True, drop=True, times=1)])
    assert "error" not in bucket(url, 1) and store.contents("deep/") == {}


def test_a_store_without_locks_or_with_late_listings_is_told(store, url, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "create", lambda path, data: bool(path.write_bytes(data)))
        assert (
            "/lock: this store writes over what is there despite a conditional request"
            in (bucket(url, 1)["error"])
        )
    assert store.contents("deep/") == {}
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "files", lambda path, depth: [])
        assert "were written, and a listing has []. Set output_dir" in bucket(url, 1)["error"]
    assert store.contents("deep/") == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lock", "/lock: was written, but other bytes are read. Set output_dir to a store that"),
        ("bytes", "/bytes: other bytes are read than were written. Check network and service."),
    ],
)
def test_a_store_whose_bytes_no_checksum_vouches_for_is_read_back(
    store, url, monkeypatch, name, said
):
    read = RemotePath.read_bytes

    def spoil(path: RemotePath) -> bytes:
        content = read(path)
        if path.name == name:
            return flipped(content)
        return content

    monkeypatch.setattr(RemotePath, "read_bytes", spoil)
    assert said in bucket(url, 1)["error"] and store.contents("deep/") == {}


def test_a_bucket_that_is_not_there_is_not_made(store, url):
    absent = store.url.replace("faulty", "abscent")
    assert f"{absent} is not there. Make that bucket" in bucket(f"{absent}/x", 1)["error"]
    assert "PUT /abscent" not in store.requests()


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_bucket_in_another_region_is_told_so(store, url):
    store.begin([RequestFault(".*", **WRONG_REGION)])
    assert "expecting 'eu-west-1'). Set AWS_DEFAULT_REGION, or" in bucket(url, 1)["error"]


def test_a_folder_by_a_url_that_is_not_there_is_not_made(tmp_path):
    found = bucket(f"file://{tmp_path}/not/yet", 1)
    assert "error" not in found and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_job_behind_a_url_is_examined_and_ends_with_70_if_the_bucket_will_not_do(
    store, url, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(devices, "_SIZE", {"cpu": 64})
    values = {
        "output_dir": url,
        "local_dir": str(tmp_path / "work"),
        "data": {"sources": {"a": {"path": str(tmp_path / "no")}}},
        "mesh": {"fsdp": 8},
        "observe": {"compilation_cache": None},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(values))
    words = ["--seconds", "0.01", f"config={tmp_path / 'it.yaml'}"]
    assert command.main(words, "maxtrain doctor") == 70
    out = capsys.readouterr().out
    assert "uploaded MB/s" in out and url in out and "can't keep a run" not in out
    store.begin([RequestFault("PUT .*", **DENIED)])
    assert command.main([*words, "--json"], "maxtrain doctor") == 70
    data, problem = json.loads(capsys.readouterr().out)["problems"]
    assert "can't read data.sources.a.path" in data
    assert f"can't keep a run in {url}: {url}/.doctor-" in problem
    assert re.search(
        r"writing is not allowed \((PermissionError|Forbidden): no\). Give this", problem
    )
    assert store.contents("deep/") == {}
