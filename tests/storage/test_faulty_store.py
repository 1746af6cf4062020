"""What a store may do to a run: deny, fail, be slow, lose bytes, be somewhere else or nowhere."""

import pytest

from benchmarks.faulty_s3 import Fault
from data_pipeline import remote
from data_pipeline.errors import StorageError
from data_pipeline.remote import RemotePath


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)


def test_an_object_is_created_by_one_alone(url):
    place = url / "lock"
    assert place.create(b"first") and not place.create(b"second")
    assert place.read_bytes() == b"first"
    assert place.write_bytes(b"third").size == 5 and not place.create(b"fourth")


def test_a_file_gets_another_name(url):
    before = (url / "a").write_bytes(b"bytes")
    before.path.move(url / "b" / "c")
    assert not (url / "a").exists() and (url / "b" / "c").read_bytes() == b"bytes"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            Fault("PUT .*", status=403, code="AccessDenied", message="read-only"),
            r"writing is not allowed \(PermissionError: read-only\). Give this machine credentials",
        ),
        (
            Fault("PUT .*", status=400, code="InvalidToken", message="what"),
            r"writing failed 5 times \(OSError: .*what\), which may pass. Check network and service",
        ),
        (
            Fault(
                "PUT .*",
                status=400,
                code="AuthorizationHeaderMalformed",
                message="the region 'us-east-1' is wrong; expecting 'eu-west-1'",
            ),
            r"writing failed, since the bucket is in another region .*expecting 'eu-west-1'.*Set AWS_DEFAULT_REGION",
        ),
    ],
    ids=["denied", "fails", "region"],
)
def test_what_a_store_refuses_is_told_with_its_mend(s3, url, fault, message):
    s3.faults.append(fault)
    with pytest.raises(StorageError, match=f"{url}/x: {message}"):
        (url / "x").write_bytes(b"x")


def test_a_bucket_that_is_not_there_is_not_made(s3):
    place = RemotePath("s3://abscent/runs/x")
    for write in (place.write_bytes, place.create):
        with pytest.raises(StorageError, match=r"s3://abscent is not there. Make that bucket"):
            write(b"x")
    assert "PUT /abscent" not in s3.seen


def test_what_may_pass_is_tried_again(s3, url):
    s3.faults.append(Fault("PUT .*", status=500, code="InternalError", times=6))
    (url / "x").write_bytes(b"x")
    assert (url / "x").read_bytes() == b"x"
    s3.faults[:] = [Fault("PUT .*", seconds=0.3)]
    (url / "x").write_bytes(b"slow")
    s3.faults[:] = [Fault("GET .*/x", status=503, code="SlowDown", times=1)]
    assert (url / "x").read_bytes() == b"slow"


def test_an_upload_that_lost_bytes_is_noticed(s3, url, tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    s3.faults.append(Fault("PUT .*", keep=4))
    with pytest.raises(StorageError, match="10 bytes were written, but 4 are there"):
        (url / "x").upload(tmp_path / "file")


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(s3, url):
    (url / "a" / "b" / "x").write_bytes(b"x")
    listings = (
        lambda: (url / "a" / "b").files(depth=1),
        lambda: remote.find(f"{url}/*/b/*"),
        lambda: remote.find(f"{url}/**/x"),
        url.tree,
    )
    for listing in listings:
        s3.begin([Fault("GET /faulty/?", status=400, code="Odd", times=1)])
        assert len(listing()) == 1
        s3.begin([Fault("GET /faulty/?", status=400, code="Odd")])
        with pytest.raises(StorageError, match=f"{url.parent}/.* listing failed 5 times"):
            listing()
    # Two folders down, behind one that can be listed.
    s3.begin([Fault("GET /faulty/?", status=400, code="Odd", skip=2, times=1)])
    assert len(remote.find(f"{url}/*/*/x")) == 1


def test_what_is_deleted_is_gone_and_what_is_written_is_there_or_it_is_told(s3, url):
    (url / "a" / "x").write_bytes(b"x")
    # The answer says of no object that it is deleted.
    s3.begin([Fault("POST .*", lose=True, times=1)])
    (url / "a").remove()
    assert not url.tree()
    (url / "x").write_bytes(b"x")
    s3.begin([Fault("(POST|DELETE) .*", status=403, code="AccessDenied", message="keep")])
    with pytest.raises(StorageError, match=rf"{url}/x: deleting is not allowed \(.*keep\)"):
        (url / "x").remove()
    s3.begin([Fault("PUT .*", lose=True, times=1)])
    (url / "y").write_bytes(b"yyy")
    assert (url / "y").read_bytes() == b"yyy"
    s3.begin([Fault("PUT .*", lose=True)])
    with pytest.raises(StorageError, match=r"/z: writing failed 5 times .*but nothing is there"):
        (url / "z").write_bytes(b"z")


@pytest.mark.parametrize("has_checksums", [True, False])
def test_bytes_that_changed_on_their_way_are_read_again(s3, url, tmp_path, has_checksums):
    if has_checksums:
        (url / "x").write_bytes(b"0123")
    else:
        s3.fill(url.url.removeprefix("s3://faulty/"), {"/x": b"0123"})
    for fault in ({"flip": True}, {"cut": True}, {"drop": True}):
        s3.begin([Fault("GET .*/x", times=1, **fault)])
        (url / "x").download_exactly(tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == b"0123"
        assert s3.requests().count(f"GET {url.url.removeprefix('s3:/')}/x") > 1


def test_what_only_looks_like_an_md5_stops_nobody(s3, url, tmp_path, monkeypatch):
    """As of an object that is encrypted with a key of its own."""
    monkeypatch.setattr(remote, "_md5", lambda info: "0" * 32)
    (url / "x").write_bytes(b"0123")
    (url / "x").download_exactly(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"0123"
