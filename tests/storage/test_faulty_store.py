"""What a store may do to a run: deny, fail, be slow, lose bytes, be somewhere else or nowhere."""

import pytest

from data_pipeline import remote
from data_pipeline.errors import StorageError
from data_pipeline.remote import RemotePath
from tests.faulty_s3 import Fault


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
