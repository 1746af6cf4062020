"""A bucket of a local S3 server that can be told to fail."""

import os
from collections.abc import Iterator
from typing import Any

import pytest

from data_pipeline.remote import RemotePath
from tests.faulty_s3 import FaultyS3


@pytest.fixture(scope="session")
def s3() -> Iterator[FaultyS3]:
    """The server, named by the usual variables, for child processes too."""
    pytest.importorskip("s3fs", reason="needs maxtrain[s3]")
    server = FaultyS3()
    before = {name: os.environ.get(name) for name in server.environment}
    os.environ.update(server.environment)
    server.make_bucket("bucket")
    yield server
    server.stop()
    for name, value in before.items():
        if value is None:
            os.environ.pop(name)
        else:
            os.environ[name] = value


@pytest.fixture
def url(s3: FaultyS3, tmp_path: Any) -> Iterator[RemotePath]:
    """An empty place in the bucket of a server that works, until it is told to fail."""
    yield RemotePath(f"s3://bucket/{tmp_path.parent.name}-{tmp_path.name}")
    s3.faults.clear()
