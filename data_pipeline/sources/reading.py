"""Input files, here or behind a URL, opened so that what a disk or a network does is never taken
for a document that is bad."""

import io
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from data_pipeline.base.errors import blame_storage
from data_pipeline.base.remote import RemotePath, is_url


class _LocalFile(io.FileIO):
    """A local file. StorageError where it can't be read for a reason that is not in it."""

    def __init__(self, path: str):
        self._path = path
        self._blaming(super().__init__, path)

    def readinto(self, buffer: Any) -> int:
        return self._blaming(super().readinto, buffer)

    def readall(self) -> bytes:
        return self._blaming(super().readall)

    def _blaming(self, call: Callable[..., Any], *args: Any) -> Any:
        try:
            return call(*args)
        except OSError as error:
            blame_storage(self._path, error)
            raise


def open_file(path: str, stamp: str = "") -> BinaryIO:
    """A file of this machine or behind a URL, for reading bytes; for `stamp` see `RemotePath.open`.

    StorageError, then or later: it can't be read now.
    """
    if is_url(path):
        return cast(BinaryIO, RemotePath(path).open(stamp))
    return cast(BinaryIO, io.BufferedReader(_LocalFile(path)))
