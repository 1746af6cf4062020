"""What `maxtrain doctor` tries in a bucket, against a local server of S3: what is wrong is named, and
nothing is left there."""

import json

import pytest
import yaml

from benchmarks.faulty_s3 import Fault, flipped
from data_pipeline import remote
from data_pipeline.remote import RemotePath
from maxtrain.doctor import command, devices
from maxtrain.doctor.bucket import bucket

URL = "s3://faulty/deep/runs"
DENIED = {"status": 403, "code": "AccessDenied", "message": "no"}
WRONG_REGION = {
    "status": 400,
    "code": "AuthorizationHeaderMalformed",
    "message": "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
}


@pytest.fixture(autouse=True)
def in_no_time(s3, monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    yield
    s3.begin([])
    s3.fill("deep/", {})


def test_a_bucket_that_works_is_timed_and_left_as_it_was(s3):
    s3.fill("deep/", {"runs/it/run.json": b"{}"})
    s3.begin([])
    found = bucket(URL + "/", 2)
    assert found["url"] == URL + "/" and "error" not in found
    assert found["uploaded_bytes_per_second"] > 0 and found["downloaded_bytes_per_second"] > 0
    assert s3.contents("deep/") == {"runs/it/run.json": b"{}"}
    written = [seen for seen in s3.requests() if seen.startswith("PUT")]
    # It is created once, refused, and another one is timed.
    assert len(written) == 3
    assert all(seen.startswith("PUT /faulty/deep/runs/.doctor-") for seen in written)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault("PUT .*", **DENIED),
            "/lock: writing is not allowed (PermissionError: no). Give this machine credentials",
        ),
        (
            Fault("GET .*/lock", **DENIED),
            "/lock: reading is not allowed (PermissionError: no). Give this machine credentials",
        ),
        (Fault(".*", **WRONG_REGION), "expecting 'eu-west-1'). Set AWS_DEFAULT_REGION, or"),
        (Fault("PUT .*/lock", lose=True), "/lock: was written, but is not there. Set output_dir"),
        (Fault("GET .*/bytes", flip=True), "/bytes: reading failed 5 times (FlexibleChecksumError"),
        (Fault("PUT .*/bytes", keep=9), "bytes were written, but 9 are there), which may pass."),
        (Fault("PUT .*", status=400, code="Odd", message="x"), "which may pass. Check network"),
    ],
    ids=["read-only", "not readable", "region", "loses", "flips", "truncates", "fails"],
)
def test_what_a_bucket_refuses_or_spoils_is_told_and_nothing_is_left(s3, fault, said):
    s3.begin([fault])
    found = bucket(URL, 1)
    assert found["error"].startswith(f"{URL}/.doctor-") and said in found["error"]
    assert "may be left" not in found["error"] and s3.contents("deep/") == {}


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("(POST|DELETE) .*", "deleting is not allowed (PermissionError: no). Give this machine"),
        ("GET /faulty/?", "listing is not allowed (PermissionError: no). Give this machine"),
    ],
)
def test_what_can_not_be_removed_is_named(s3, pattern, said):
    s3.begin([Fault(pattern, **DENIED)])
    found = bucket(URL, 1)
    assert said in found["error"] and found["uploaded_bytes_per_second"] > 0
    left = {name.split("/")[1] for name in s3.contents("deep/")}
    assert f"it may be left in {URL}/{left.pop()}." in found["error"] and not left


def test_a_lost_answer_is_no_fault_of_the_lock(s3):
    s3.begin([Fault("PUT .*/lock", done=True, drop=True, times=1)])
    assert "error" not in bucket(URL, 1) and s3.contents("deep/") == {}


def test_a_store_without_locks_or_with_late_listings_is_told(s3, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "create", lambda path, data: bool(path.write_bytes(data)))
        assert (
            "/lock: this store writes over what is there although it is asked not to"
            in (bucket(URL, 1)["error"])
        )
    assert s3.contents("deep/") == {}
    with monkeypatch.context() as patch:
        patch.setattr(RemotePath, "files", lambda path, depth: [])
        assert "were written, and a listing has []. Set output_dir" in bucket(URL, 1)["error"]
    assert s3.contents("deep/") == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lock", "/lock: was written, but other bytes are read. Set output_dir to a store that"),
        ("bytes", "/bytes: other bytes are read than were written. Check network and service."),
    ],
)
def test_a_store_whose_bytes_no_checksum_vouches_for_is_read_back(s3, monkeypatch, name, said):
    read = RemotePath.read_bytes

    def spoil(path: RemotePath) -> bytes:
        content = read(path)
        if path.name == name:
            return flipped(content)
        return content

    monkeypatch.setattr(RemotePath, "read_bytes", spoil)
    assert said in bucket(URL, 1)["error"] and s3.contents("deep/") == {}


def test_a_bucket_that_is_not_there_is_not_made(s3):
    assert "s3://abscent is not there. Make that bucket" in bucket("s3://abscent/x", 1)["error"]
    assert "PUT /abscent" not in s3.requests()


def test_a_folder_by_a_url_that_is_not_there_is_not_made(tmp_path):
    found = bucket(f"file://{tmp_path}/not/yet", 1)
    assert "error" not in found and list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_a_job_behind_a_url_is_examined_and_ends_with_70_if_the_bucket_will_not_do(
    s3, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(devices, "_SIZE", {"cpu": 64})
    values = {
        "output_dir": URL,
        "local_dir": str(tmp_path / "work"),
        "data": {"sources": {"a": {"path": str(tmp_path / "no")}}},
        "mesh": {"fsdp": 8},
        "observe": {"compilation_cache": None},
    }
    (tmp_path / "it.yaml").write_text(yaml.safe_dump(values))
    words = ["--seconds", "0.01", f"config={tmp_path / 'it.yaml'}"]
    assert command.main(words, "maxtrain doctor") == 70
    out = capsys.readouterr().out
    assert "uploaded MB/s" in out and URL in out and "can't keep a run" not in out
    s3.begin([Fault("PUT .*", **DENIED)])
    assert command.main([*words, "--json"], "maxtrain doctor") == 70
    data, problem = json.loads(capsys.readouterr().out)["problems"]
    assert "can't read data.sources.a.path" in data
    assert f"can't keep a run in {URL}: {URL}/.doctor-" in problem
    assert "writing is not allowed (PermissionError: no). Give this machine" in problem
    assert s3.contents("deep/") == {}
