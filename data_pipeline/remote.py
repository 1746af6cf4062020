"""Files behind URLs: s3://, gs:// and whatever fsspec knows. The one file that knows fsspec;
nothing local comes here.

A `RemotePath` has of pathlib's Path what the data pipeline uses. What fails for a reason that may
pass (a connection, a server) is tried again with growing pauses. FileNotFoundError is left to the
caller; no access, and no success in the end, are StorageErrors.
"""

import contextlib
import dataclasses
import errno
import functools
import hashlib
import io
import posixpath
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.errors import DataError, StorageError, UsageError
from data_pipeline.extras import load_package

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_BLOCK_BYTES, _KEPT = 1 << 22, 4  # of a file that is read piece by piece
_TRIES, _PAUSE = 5, 1.0  # seconds before the second try; then twice as long each time
_BUGS = (TypeError, AttributeError, NameError, AssertionError, NotImplementedError, ImportError)


def is_url(path: object) -> bool:
    """Whether this names something behind a URL, not a file of this machine."""
    return isinstance(path, RemotePath) or (isinstance(path, str) and bool(_URL.match(path)))


class Found(NamedTuple):
    """A remote file: `stamp` changes when it does (its ETag, generation or time of change)."""

    path: "RemotePath"
    size: int
    stamp: str


@dataclasses.dataclass(frozen=True)
class RemotePath:
    """A file or folder behind a URL. Picklable; the connection is fsspec's and is made when first
    used."""

    url: str

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(f"{self.url.rstrip('/')}/{name}") if name else self

    @property
    def name(self) -> str:
        return posixpath.basename(self.url.rstrip("/"))

    @property
    def stem(self) -> str:
        return posixpath.splitext(self.name)[0]

    @property
    def parent(self) -> "RemotePath":
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> "RemotePath":
        return self.parent / name

    def with_suffix(self, suffix: str) -> "RemotePath":
        return self.with_name(self.stem + suffix)

    def read_bytes(self) -> bytes:
        return _persist(self, "reading", lambda fs, path: fs.cat_file(path))

    def write_bytes(self, data: bytes) -> None:
        """Write an object whole, and look whether it arrived."""
        _persist(
            self,
            "writing",
            lambda fs, path: (
                fs.makedirs(fs._parent(path), exist_ok=True),
                fs.pipe_file(path, data),
            ),
        )
        self._arrived(len(data))

    def upload(self, file: Path) -> None:
        """Copy a local file here, whole, and look whether it arrived."""
        _persist(
            self,
            "writing",
            lambda fs, path: (
                fs.makedirs(fs._parent(path), exist_ok=True),
                fs.put_file(str(file), path),
            ),
        )
        self._arrived(file.stat().st_size)

    def download(self, file: Path) -> None:
        """Copy this to a local file, which is there when all of it is."""
        part = file.with_name(f".{file.name}.tmp")
        _persist(self, "reading", lambda fs, path: fs.get_file(path, str(part)))
        if (expected := self.found().size) != part.stat().st_size:
            raise StorageError(
                f"{self}: {part.stat().st_size} of {expected} bytes arrived. Run the same command again."
            )
        part.replace(file)

    def _arrived(self, size: int) -> None:
        if (found := self.found().size) != size:
            raise StorageError(
                f"{self}: {size} bytes were written, but {found} are there. Run the same command again."
            )

    def found(self) -> Found:
        """Size and stamp; FileNotFoundError: it is not there."""
        return _found(self, _persist(self, "looking at", lambda fs, path: fs.info(path)))

    def exists(self) -> bool:
        try:
            return bool(self.found())
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        return _persist(self, "looking at", lambda fs, path: fs.isdir(path))

    def files(self, depth: int | None = None) -> list[Found]:
        """The files of this folder, and of those below it down to `depth` (None: all); none if
        there is no such folder."""
        try:
            listing = _persist(
                self, "listing", lambda fs, path: fs.find(path, maxdepth=depth, detail=True)
            )
        except FileNotFoundError:
            return []
        return [_found(_at(self, name), info) for name, info in sorted(listing.items())]

    def glob(self, pattern: str) -> list["RemotePath"]:
        """What matches below this folder, sorted."""
        return [found.path for found in find(f"{self.url.rstrip('/')}/{pattern}")]

    def iterdir(self) -> list["RemotePath"]:
        """The files and folders of this folder, sorted; none if there is no such folder."""
        try:
            listing = _persist(self, "listing", lambda fs, path: fs.ls(path, detail=False))
        except FileNotFoundError:
            return []
        return [self / posixpath.basename(name.rstrip("/")) for name in sorted(listing)]

    def mkdir(self, **_: bool) -> None:
        """Nothing: a folder is there when something is in it."""

    def remove(self) -> None:
        """Delete a file, or a folder with all that is in it; no matter if it is not there."""
        with contextlib.suppress(FileNotFoundError):
            _persist(self, "deleting", lambda fs, path: fs.rm(path, recursive=True))

    def open(self, stamp: str = "") -> io.BufferedReader:
        """The file, to read from anywhere in. DataError: it is not the one that had this `stamp`
        ("": whichever it is)."""
        found = self.found()
        if stamp not in ("", found.stamp):
            raise DataError(
                f"{self}: was changed since it was found. Let nobody write to the input, and begin with --overwrite."
            )
        return io.BufferedReader(_Reader(found), _BLOCK_BYTES)


class _Reader(io.RawIOBase):
    """A remote file: read by blocks, of which a few are kept. StorageError: it can't be; never a
    mere OSError, which would be taken for a file that is damaged."""

    def __init__(self, found: Found):
        self._found, self._at = found, 0
        self._block = functools.lru_cache(_KEPT)(self._read_block)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = (
            offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._found.size}[whence]
        )
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        number, start = divmod(self._at, _BLOCK_BYTES)
        data = (
            self._block(number)[start : start + len(buffer)] if self._at < self._found.size else b""
        )
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read_block(self, number: int) -> bytes:
        start = number * _BLOCK_BYTES
        stop = min(start + _BLOCK_BYTES, self._found.size)
        try:
            (data,) = read_ranges([(self._found.path, start, stop)])
        except FileNotFoundError as error:
            raise StorageError(
                f"{self._found.path}: was deleted while it was read. Restore it, then run it again."
            ) from error
        if len(data) != stop - start:
            raise StorageError(
                f"{self._found.path}: was cut short while it was read. Restore it, then run it again."
            )
        return data


def place(path: "str | Path | RemotePath") -> "Path | RemotePath":
    """A path of this machine, or one behind a URL."""
    if isinstance(path, Path | RemotePath):
        return path
    return RemotePath(path.rstrip("/")) if is_url(path) else Path(path)


def find(pattern: str) -> list[Found]:
    """The files that match a URL with *, ?, [] or **, sorted."""
    path = RemotePath(pattern)
    try:
        listing = _persist(path, "listing", lambda fs, inner: fs.glob(inner, detail=True))
    except FileNotFoundError:
        return []
    return [
        _found(_at(path, name), info)
        for name, info in sorted(listing.items())
        if info.get("type") == "file"
    ]


def read_ranges(ranges: Sequence[tuple[RemotePath, int, int | None]]) -> list[bytes]:
    """Bytes from `start` to before `stop` (None: the end) of each of these files, of one file
    system, read at the same time."""
    results: dict[int, bytes] = {}

    def read(fs: Any, _: str) -> None:
        todo = [number for number in range(len(ranges)) if number not in results]
        paths = [fs._strip_protocol(ranges[number][0].url) for number in todo]
        starts, stops = ([ranges[number][at] for number in todo] for at in (1, 2))
        found = fs.cat_ranges(paths, starts, stops, on_error="return")
        results.update(
            {
                number: bytes(data)
                for number, data in zip(todo, found)
                if not isinstance(data, Exception)
            }
        )
        for data in found:
            if isinstance(data, Exception):
                raise data

    if ranges:
        _persist(ranges[0][0], "reading", read)
    return [results[number] for number in range(len(ranges))]


def _at(base: RemotePath, name: str) -> RemotePath:
    return RemotePath(f"{base.url.partition('://')[0]}://{name}")


def _found(path: RemotePath, info: dict[str, Any]) -> Found:
    names = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated", "mtime", "created")
    stamp = repr([info.get("size"), *(str(info[name]) for name in names if info.get(name))])
    return Found(path, info.get("size") or 0, hashlib.sha256(stamp.encode()).hexdigest()[:16])


def _persist(path: RemotePath, what: str, call: Callable[[Any, str], Any]) -> Any:
    """What `call` gives for the file system of a path and the path in it; tried again where that
    may help."""
    protocol = path.url.partition("://")[0]
    fsspec = load_package("fsspec", "remote", path.url)
    for number in range(_TRIES):
        try:
            fs, inner = fsspec.core.url_to_fs(path.url, use_listings_cache=False)
            return call(fs, inner)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                errno.ENOENT, "there is no such file, folder or bucket", path.url
            ) from error
        except ImportError as error:
            extra = _EXTRAS.get(protocol, "remote")
            raise UsageError(
                f"{path}: needs a package for {protocol}:// ({error}). Install it: pip install 'maxtrain[{extra}]'"
            ) from error
        except _BUGS:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            if isinstance(error, ValueError) and "rotocol" in str(error):
                raise UsageError(
                    f"{path}: {protocol}:// is not known ({error}). Name an s3://, gs:// or other URL of fsspec."
                ) from error
            if isinstance(error, PermissionError) or re.search(
                r"Credentials|RefreshError", type(error).__name__
            ):
                mend = "Give this machine credentials that may, or name another place"
                raise StorageError(f"{path}: {what} is not allowed ({reason}). {mend}.") from error
            if number == _TRIES - 1:
                mend = "Check network and service, then run the same command again"
                raise StorageError(
                    f"{path}: {what} failed {_TRIES} times ({reason}), which may pass. {mend}."
                ) from error
            time.sleep(_PAUSE * 2**number * random.uniform(0.5, 1))
