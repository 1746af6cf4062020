"""A place in the bucket of a local S3 server that can be told to fail."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.faulty_s3 import FaultyS3
from data_pipeline.remote import RemotePath


@pytest.fixture
def url(s3: FaultyS3, tmp_path: Path) -> Iterator[RemotePath]:
    """An empty place in the bucket of a server that works, until it is told to fail."""
    yield RemotePath(f"s3://faulty/{tmp_path.parent.name}-{tmp_path.name}")
    s3.faults.clear()
