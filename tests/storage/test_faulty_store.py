"""Faults of a store during a run: it denies, fails, is slow, loses bytes, or is somewhere else or
nowhere."""

import pytest

from benchmarks.faulty_s3 import RequestFault
from data_pipeline.base import remote
from data_pipeline.base.errors import StorageError
from data_pipeline.base.remote import RemotePath

# What a store says of objects whose ETag is no MD5: encrypted with other keys, or written in parts.
NO_MD5 = (
    {"x-amz-server-side-encryption": "aws:kms"},
    {"x-amz-server-side-encryption-customer-algorithm": "AES256"},
    {"ETag": f'"{"0" * 32}-2"'},
)


@pytest.fixture(autouse=True)
def in_no_time(monkeypatch):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)


def test_an_object_is_created_by_one_alone(url):
    place = url / "lock"
    assert place.create(b"first") and not place.create(b"second")
    assert place.read_bytes() == b"first"
    assert place.write_bytes(b"third").size == 5 and not place.create(b"fourth")


@pytest.mark.parametrize("last", [b"\r", b"\n", b"\r\n", b"--"])
def test_the_last_bytes_of_an_object_are_kept_whatever_they_are(url, last):
    place = url / "odd"
    place.write_bytes(b"content" + last)
    assert place.read_bytes() == b"content" + last


def test_a_file_gets_another_name(url):
    before = (url / "a").write_bytes(b"bytes")
    before.path.move(url / "b" / "c")
    assert not (url / "a").exists() and (url / "b" / "c").read_bytes() == b"bytes"


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            RequestFault("PUT .*", status=403, code="AccessDenied", message="read-only"),
            r"writing is not allowed \((PermissionError|Forbidden): read-only\). Give this machine",
        ),
        (
            RequestFault("PUT .*", status=400, code="InvalidToken", message="what"),
            r"writing failed 5 times \(\w+: .*what.*\), which may pass. Check network and service",
        ),
    ],
    ids=["denied", "fails"],
)
def test_what_a_store_refuses_is_told_with_its_mend(store, url, fault, message):
    store.faults.append(fault)
    with pytest.raises(StorageError, match=f"{url}/x: {message}"):
        (url / "x").write_bytes(b"x")


@pytest.mark.parametrize("store", ["s3"], indirect=True)
def test_a_bucket_in_another_region_is_told_so(store, url):
    message = "the region 'us-east-1' is wrong; expecting 'eu-west-1'"
    malformed = {"code": "AuthorizationHeaderMalformed", "message": message}
    store.begin([RequestFault("PUT .*", status=400, **malformed)])
    said = r"the bucket is in another region .*expecting 'eu-west-1'.*Set AWS_DEFAULT_REGION"
    with pytest.raises(StorageError, match=f"{url}/x: writing failed, since {said}"):
        (url / "x").write_bytes(b"x")


@pytest.mark.long
@pytest.mark.parametrize("store", ["gs_server"], indirect=True)
def test_a_caller_without_credentials_is_told_so_by_google(store, url, capfd):
    """Without any, gcsfs sends anonymous requests."""
    said = "Anonymous caller does not have storage.objects.create access"
    store.begin([RequestFault("PUT .*", status=401, message=said)])
    message = rf"writing is not allowed \(HttpError: {said}.*\). Give this .*\(gcloud auth appl"
    with pytest.raises(StorageError, match=message):
        (url / "x").write_bytes(b"x")
    assert len(store.requests()) == 1 and "Traceback" not in capfd.readouterr().err


def test_a_bucket_that_is_not_there_is_not_made(store):
    bucket = store.url.replace("faulty", "abscent")
    place = RemotePath(f"{bucket}/runs/x")
    for write in (place.write_bytes, place.create):
        with pytest.raises(StorageError, match=rf"{bucket} is not there. Make that bucket"):
            write(b"x")
    assert "PUT /abscent" not in store.seen
    assert not any(seen.startswith("POST") for seen in store.seen)


@pytest.mark.long
@pytest.mark.every_dose
def test_what_may_pass_is_tried_again(store, url):
    store.faults.append(RequestFault("PUT .*", status=500, code="InternalError", times=6))
    (url / "x").write_bytes(b"x")
    assert (url / "x").read_bytes() == b"x"
    store.faults[:] = [RequestFault("PUT .*", seconds=0.3)]
    (url / "x").write_bytes(b"slow")
    store.faults[:] = [RequestFault("GET .*/x", status=503, code="SlowDown", times=1)]
    assert (url / "x").read_bytes() == b"slow"


def test_an_upload_that_lost_bytes_is_noticed(store, url, tmp_path):
    (tmp_path / "file").write_bytes(b"0123456789")
    store.faults.append(RequestFault("PUT .*", keep=4))
    with pytest.raises(StorageError, match="10 bytes were written, but 4 are there"):
        (url / "x").upload(tmp_path / "file")


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(store, url):
    (url / "a" / "b" / "x").write_bytes(b"x")
    listings = (
        lambda: (url / "a" / "b").files(depth=1),
        lambda: remote.find(f"{url}/*/b/*"),
        lambda: remote.find(f"{url}/**/x"),
        url.tree,
    )
    for listing in listings:
        store.begin([RequestFault("GET /faulty/?", status=400, code="Odd", times=1)])
        assert len(listing()) == 1
        store.begin([RequestFault("GET /faulty/?", status=400, code="Odd")])
        with pytest.raises(StorageError, match=f"{url.parent}/.* listing failed 5 times"):
            listing()
    # Two folders down, behind one that can be listed.
    store.begin([RequestFault("GET /faulty/?", status=400, code="Odd", skip=2, times=1)])
    assert len(remote.find(f"{url}/*/*/x")) == 1


def test_what_is_deleted_is_gone_and_what_is_written_is_there_or_it_is_told(store, url):
    (url / "a" / "x").write_bytes(b"x")
    # The answer says of no object that it is deleted.
    store.begin([RequestFault("(POST|DELETE) .*", lose=True, times=1)])
    (url / "a").remove()
    assert not url.tree()
    (url / "x").write_bytes(b"x")
    store.begin([RequestFault("(POST|DELETE) .*", status=403, code="AccessDenied", message="keep")])
    with pytest.raises(StorageError, match=rf"{url}/x: deleting is not allowed \(.*keep\)"):
        (url / "x").remove()
    store.begin([RequestFault("PUT .*", lose=True, times=1)])
    (url / "y").write_bytes(b"yyy")
    assert (url / "y").read_bytes() == b"yyy"
    store.begin([RequestFault("PUT .*", lose=True)])
    with pytest.raises(StorageError, match=r"/z: writing failed 5 times .*but nothing is there"):
        (url / "z").write_bytes(b"z")


@pytest.mark.parametrize("has_checksums", [True, False])
def test_bytes_that_changed_on_their_way_are_read_again(store, url, tmp_path, has_checksums):
    if has_checksums:
        (url / "x").write_bytes(b"0123")
    else:
        store.fill(url.url.removeprefix(f"{store.url}/"), {"/x": b"0123"})
    for fault in ({"flip": True}, {"cut": True}, {"drop": True}):
        store.begin([RequestFault("GET .*/x", times=1, **fault)])
        (url / "x").download_exactly(tmp_path / "x")
        assert (tmp_path / "x").read_bytes() == b"0123"
        assert store.requests().count(f"GET /faulty{url.url.removeprefix(store.url)}/x") > 1


def test_a_file_that_is_always_read_wrong_is_refused(store, url, tmp_path):
    store.fill(url.url.removeprefix(f"{store.url}/"), {"/x": b"0123"})
    store.begin([RequestFault("GET .*/x", flip=True)])
    message = (
        r"/x: other bytes are read than the store holds \(its MD5 there is eb62f6.*same command"
    )
    with pytest.raises(StorageError, match=message):
        (url / "x").download_exactly(tmp_path / "x")
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize("store", ["s3"], indirect=True)
@pytest.mark.parametrize("headers", NO_MD5)
def test_what_only_looks_like_an_md5_stops_nobody(store, url, tmp_path, headers):
    (url / "x").write_bytes(b"0123")
    store.begin([RequestFault("HEAD .*/x", headers={"ETag": f'"{"0" * 32}"'} | headers)])
    assert (url / "x").md5() == ""
    (url / "x").download_exactly(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == b"0123"
