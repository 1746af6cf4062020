"""Stores for tests of URLs: a folder behind fsspec's file://, and buckets of local servers of s3://
and gs:// where they are installed."""

import logging
import os

import pytest


@pytest.fixture(scope="session")
def s3_server():
    """A local S3 server with a bucket, named by the usual variables, for child processes too."""
    pytest.importorskip("s3fs", reason="needs maxtrain[s3]")
    server = pytest.importorskip(
        "moto.server", reason="needs moto[s3], flask and flask-cors"
    ).ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    names = {
        "AWS_ENDPOINT_URL": "http://{}:{}".format(*server.get_host_and_port()),
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    names |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    fsspec = pytest.importorskip("fsspec")

    fsspec.filesystem("s3").mkdir("bucket")
    yield
    server.stop()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


@pytest.fixture(params=["file", "s3", pytest.param("gs", marks=pytest.mark.long)])
def url(request, tmp_path):
    """An empty place behind a URL."""
    if request.param == "file":
        return f"file://{tmp_path}/remote"
    request.getfixturevalue(f"{request.param}_server")
    return f"{request.param}://bucket/{tmp_path.parent.name}-{tmp_path.name}"
