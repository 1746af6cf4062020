"""A place in the bucket of a local server of s3://, or of gs://, that can inject faults."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data_pipeline.base.remote import RemotePath


@pytest.fixture
def url(store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemotePath]:
    """An empty place in the bucket of a server that works until faults are injected."""
    if store.url.startswith("gs://"):
        # gcsfs pauses for 2 ** tries seconds and a random part, or not at all if that is below 0.
        monkeypatch.setattr("gcsfs.retry.random", SimpleNamespace(random=lambda: -40.0))
    yield RemotePath(f"{store.url}/{tmp_path.parent.name}-{tmp_path.name}")
    store.begin([])
