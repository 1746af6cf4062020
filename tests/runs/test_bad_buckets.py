"""Runs at places that can't exist: the messages, and that nothing was created."""

import os
import re

import pytest

from benchmarks.faulty_s3 import RequestFault
from data_pipeline.base import remote
from maxtrain.config import load_config
from maxtrain.trainer.loop import main

WRONG_REGION = {
    "status": 400,
    "code": "AuthorizationHeaderMalformed",
    "message": "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
}
DENIED = {"status": 403, "code": "AccessDenied", "message": "no"}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    return tiny_run(tmp_path_factory.mktemp("tiny"), steps=2)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize(
    ("bucket", "fault", "said"),
    [
        (
            "abscent",
            None,
            r"://abscent is not there. Make that bucket, or name another one\.",
        ),
        (
            "faulty",
            RequestFault("PUT .*", **DENIED),
            r"writing is not allowed \((PermissionError|Forbidden): no\). Give this machine cred",
        ),
        (
            "faulty",
            RequestFault("GET .*", **DENIED),
            r"listing is not allowed \((PermissionError|Forbidden): no\). Give this machine cred",
        ),
        (
            "faulty",
            RequestFault("PUT .*", status=400, code="Odd", message="x"),
            r"writing failed 5 times \(.*x.*\), which may pass. Check network and service, then",
        ),
        (
            "faulty",
            RequestFault("PUT .*/lock/.*", lose=True),
            "was written, but is not there. Set output_dir to a store that keeps what is written",
        ),
    ],
    ids=["no bucket", "read-only", "not readable", "fails", "loses"],
)
def test_a_bucket_that_will_not_do_is_named_with_the_mend(
    store, config, tmp_path, monkeypatch, capfd, bucket, fault, said
):
    faults = [fault] if fault is not None else []
    assert_told(store, faults, config, tmp_path, monkeypatch, capfd, bucket, said)


@pytest.mark.every_dose
@pytest.mark.long
@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            RequestFault(".*", **WRONG_REGION),
            r"expecting 'eu-west-1'\). Set AWS_DEFAULT_REGION, or AWS_ENDPOINT_URL, to those of",
        ),
        (
            RequestFault(".*", seconds=0.4),
            r"which may pass. Check network and service, then run the same command again\.",
        ),
    ],
    ids=["region", "slow"],
)
def test_a_bucket_that_is_elsewhere_or_too_slow_is_named(
    s3, config, tmp_path, monkeypatch, capfd, fault, said
):
    if fault.seconds:
        _wait_little(monkeypatch)
    assert_told(s3, [fault], config, tmp_path, monkeypatch, capfd, "faulty", said)


def assert_told(store, faults, config, folder, monkeypatch, capfd, bucket, said):
    """A run in a bucket ends with 74, says this, and has left nothing there."""
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    store.begin(faults)
    url = f"{store.url.replace('faulty', bucket)}/runs"
    words = [f"config={config}", "run_name=nowhere", f"output_dir={url}"]
    assert main(load_config([*words, f"local_dir={folder}"])) == 74
    error = capfd.readouterr().err
    store.begin([])
    assert f"{url}/nowhere" in error and re.search(said, error) and "Traceback" not in error
    assert not any(name.startswith("runs/nowhere/") for name in store.contents(""))


def _wait_little(monkeypatch):
    """Clients that wait for a moment, and try once."""
    fsspec = remote.load_package("fsspec", "remote", "")
    s3fs = remote.load_package("s3fs", "s3", "")
    client = {"read_timeout": 0.1, "retries": {"max_attempts": 0}}
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": client})
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)


@pytest.mark.usefixtures("this_process")
def test_a_machine_without_credentials_is_told_so(s3, config, tmp_path, monkeypatch, capsys):
    for name in list(os.environ):
        if name.startswith("AWS_") and name != "AWS_ENDPOINT_URL":
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    s3fs = remote.load_package("s3fs", "s3", "")
    s3fs.S3FileSystem.clear_instance_cache()
    words = [f"config={config}", "run_name=x", "output_dir=s3://faulty/runs"]
    assert main(load_config([*words, f"local_dir={tmp_path}"])) == 74
    s3fs.S3FileSystem.clear_instance_cache()
    error = capsys.readouterr().err
    assert "s3://faulty/runs/x: listing is not allowed (NoCredentialsError" in error
    assert "Give this machine credentials that may (AWS_ACCESS_KEY_ID and" in error


@pytest.mark.long
@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize("store", ["gs_server"], indirect=True)
def test_a_machine_without_credentials_is_told_so_by_google(
    store, config, tmp_path, monkeypatch, capfd
):
    """It is asked as nobody in particular then, and refuses."""
    refusal = "Anonymous caller does not have storage.objects.list access"
    said = rf"listing is not allowed \(HttpError: {refusal}.*\(gcloud auth application-default log"
    faults = [RequestFault(".*", status=401, message=refusal)]
    assert_told(store, faults, config, tmp_path, monkeypatch, capfd, "faulty", said)
