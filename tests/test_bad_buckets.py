"""Runs at places that can't be: what is told, and that nothing was made of them."""

import os

import pytest

from benchmarks.faulty_s3 import Fault
from data_pipeline import remote
from maxtrain.config import load_config
from maxtrain.train import main

WRONG_REGION = {
    "status": 400,
    "code": "AuthorizationHeaderMalformed",
    "message": "the region 'us-east-1' is wrong; expecting 'eu-west-1'",
}
DENIED = {"status": 403, "code": "AccessDenied", "message": "no"}


@pytest.fixture(scope="module")
def config(tmp_path_factory, tiny_run):
    return tiny_run(tmp_path_factory.mktemp("tiny"), steps=2)


@pytest.mark.usefixtures("this_process")
@pytest.mark.parametrize(
    ("bucket", "fault", "said"),
    [
        (
            "abscent",
            None,
            "s3://abscent is not there. Make that bucket, or name another one.",
        ),
        (
            "faulty",
            Fault("PUT .*", **DENIED),
            "writing is not allowed (PermissionError: no). Give this machine credentials that may",
        ),
        (
            "faulty",
            Fault("GET .*", **DENIED),
            "listing is not allowed (PermissionError: no). Give this machine credentials that may",
        ),
        (
            "faulty",
            Fault(".*", **WRONG_REGION),
            "expecting 'eu-west-1'). Set AWS_DEFAULT_REGION, or AWS_ENDPOINT_URL, to those of the",
        ),
        (
            "faulty",
            Fault(".*", seconds=0.4),
            "which may pass. Check network and service, then run the same command again.",
        ),
        (
            "faulty",
            Fault("PUT .*/lock/.*", lose=True),
            "was written, but is not there. Set output_dir to a store that keeps what is written",
        ),
    ],
    ids=["no bucket", "read-only", "not readable", "region", "slow", "loses"],
)
def test_a_bucket_that_will_not_do_is_named_with_the_mend(
    s3, config, tmp_path, monkeypatch, capsys, bucket, fault, said
):
    monkeypatch.setattr(remote, "_PAUSE", 0.01)
    s3.begin([])
    if fault is not None:
        s3.begin([fault])
    if fault is not None and fault.seconds:
        _wait_little(monkeypatch)
    words = [f"config={config}", "run_name=nowhere", f"output_dir=s3://{bucket}/runs"]
    assert main(load_config([*words, f"local_dir={tmp_path}"])) == 74
    error = capsys.readouterr().err
    s3.begin([])
    assert f"s3://{bucket}/runs/nowhere" in error and said in error and "Traceback" not in error
    assert not any(name.startswith("runs/nowhere/") for name in s3.contents(""))


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
    assert "Give this machine credentials that may, or name another place." in error
