"""Files behind URLs of the schemes that are listed in `SCHEMES`. The one file that knows fsspec;
nothing local comes here.

A `RemotePath` has those methods of pathlib's Path that are used for files behind URLs. A call that
fails for a reason that may pass (a connection, a server) is tried again with growing pauses. The
caller gets a FileNotFoundError for what is not there to be read, and a StorageError if access is
denied, a bucket to write to is not there, or all tries have failed.
"""

import base64
import contextlib
import dataclasses
import errno
import filecmp
import functools
import hashlib
import importlib.util
import io
import logging
import posixpath
import random
import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from data_pipeline.base.errors import DataError, StorageError, UsageError, UserError
from data_pipeline.base.extras import install_command, load_package
from data_pipeline.base.inner_names import why_outside
from data_pipeline.base.masking import is_masked, masked
from data_pipeline.base.new_files import open_beside

# `A::B://` chains file systems of fsspec.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*::)*[A-Za-z][A-Za-z0-9+.-]+://")
_CHAIN = re.compile(r"::[^/]*://")
# Other file systems of fsspec run programs, follow links that are in files, or read archives.
SCHEMES = ("file", "s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "http", "https")
_ONLY_READ = ("http", "https")
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
# Size and number of the blocks that are kept of a file that is read piece by piece.
_BLOCK_BYTES = 1 << 22
_BLOCKS_KEPT = 4
_TRIES = 5
# Seconds before the second try; the pause is doubled each time.
_PAUSE = 1.0
# These have no folders: an object is written, and its "folder" is there.
_OBJECT_STORES = frozenset(_EXTRAS)
# Reply of S3 about a bucket that is in another region than the request.
_OTHER_REGION = re.compile(r"region '.*' is wrong|must be addressed using the specified endpoint")
# How credentials are given, by extras.
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
    "gcs": "gcloud auth application-default login, or GOOGLE_APPLICATION_CREDENTIALS",
}
# gcsfs has no class for what is not allowed: this is what it says of one request, and, among the
# answers to several, what Google says.
_FORBIDDEN = re.compile(r"Forbidden: |\{.*\"code\": 40[13]\b", re.DOTALL)
_UNKNOWN_CALLER = "401"
# What stores say of an object that is there although it must not be.
_IS_THERE = re.compile(r"pre-?condition", re.I)
# Errors of the code itself: trying again can't help.
_BUGS = (TypeError, AttributeError, NameError, AssertionError, NotImplementedError, ImportError)


def is_url(path: object) -> bool:
    """Return whether a path names something behind a URL, not a file of this machine. `url_problem`
    checks whether it may be opened.
    """
    return isinstance(path, RemotePath) or (isinstance(path, str) and bool(_URL.match(path)))


def url_problem(url: str) -> str:
    """Why a URL is not opened, as a sentence that says what to do; empty if it may be."""
    scheme, _, rest = url.partition("://")
    shown = masked(url)
    if scheme not in SCHEMES or _CHAIN.search(url):
        known = ", ".join(f"{known}://" for known in SCHEMES)
        return f"{shown} must be a path or one plain URL. Use one of {known}."
    user, has_user, _ = rest.partition("/")[0].rpartition("@")
    if has_user and ":" in user and scheme not in _ONLY_READ:
        return (
            f"{shown} must not have a password. Give the credentials of {scheme}:// in the "
            "environment, or in the files of the service."
        )
    return ""


class RemoteFile(NamedTuple):
    """A remote file: `stamp` changes when it does (its ETag, generation or time of change)."""

    path: "RemotePath"
    size: int
    stamp: str


@dataclasses.dataclass(frozen=True)
class RemotePath:
    """A file or folder behind a URL. Picklable; the connection is fsspec's and is made when first
    used."""

    url: str

    def __post_init__(self) -> None:
        problem = url_problem(self.url)
        if not problem and is_masked(self.url):
            problem = (
                f"{self.url} comes from a record, where its secret was masked. "
                "Give the whole URL again, on the command line for example."
            )
        if problem:
            raise UsageError(problem)

    def __str__(self) -> str:
        """The URL for messages and records, without secrets; `url` is the one that is opened."""
        return masked(self.url)

    def __repr__(self) -> str:
        return f"RemotePath({str(self)!r})"

    def __truediv__(self, name: str) -> "RemotePath":
        if not name:
            return self
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

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

    def write_bytes(self, data: bytes) -> "RemoteFile":
        """Write an object as a whole, and check that all of it arrived."""

        def write(fs: Any, path: str) -> RemoteFile:
            self._make_folder(fs, path)
            fs.pipe_file(path, data)
            return self._arrived(fs, path, len(data))

        return self._write(write)

    def create(self, data: bytes) -> bool:
        """Write an object that must not be there yet: of several who do so, one succeeds.

        Returns:
            False if it is there. If an answer of the server was lost, that may be by this very
            call: who has to know reads what is there.
        """

        def write(fs: Any, path: str) -> bool:
            self._make_folder(fs, path)
            try:
                if self._is_local():
                    # fsspec would look first and write then.
                    with open(path, "xb") as file:
                        file.write(data)
                else:
                    fs.pipe_file(path, data, mode="create")
            except FileExistsError:
                return False
            except OSError as error:
                if _IS_THERE.search(str(error)):
                    return False
                raise
            return True

        return self._write(write)

    def upload(self, file: Path) -> "RemoteFile":
        """Copy a local file here as a whole, and check that all of it arrived."""

        def write(fs: Any, path: str) -> RemoteFile:
            self._make_folder(fs, path)
            fs.put_file(str(file), path)
            return self._arrived(fs, path, file.stat().st_size)

        return self._write(write)

    def move(self, target: "RemotePath") -> None:
        """Give a file another name in the same bucket. Object stores copy it and delete the
        original."""

        def write(fs: Any, path: str) -> None:
            there = fs._strip_protocol(target.url)
            # The answer to an earlier try may have been lost.
            if not fs.exists(path) and fs.exists(there):
                return
            self._make_folder(fs, there)
            fs.mv(path, there)

        self._write(write)

    def _is_local(self) -> bool:
        """Return whether the URL is that of a file on this machine."""
        return self.url.startswith("file://")

    def _make_folder(self, fs: Any, path: str) -> None:
        """Make the folder of a file, where files are in folders.

        s3fs would create a missing bucket, for example one with a typo in its name.
        """
        protocol, _, _ = self.url.partition("://")
        if protocol not in _OBJECT_STORES:
            fs.makedirs(fs._parent(path), exist_ok=True)

    def _write(self, call: Callable[[Any, str], Any]) -> Any:
        """The result of `call`, which writes; StorageError: there is no such bucket."""
        scheme, _, _ = self.url.partition("://")
        if scheme in _ONLY_READ:
            raise UsageError(
                f"{self}: files behind {scheme}:// are only read. Name a path, or an s3:// or "
                "gs:// URL."
            )
        try:
            return _persist(self, "writing", call)
        except FileNotFoundError as error:
            bucket = "/".join(str(self).split("/")[:3])
            raise StorageError(
                f"{self}: can't be written, since {bucket} is not there. "
                "Make that bucket, or name another one."
            ) from error

    def download(self, file: Path) -> None:
        """Copy this to a local file, which appears once it is complete."""
        with open_beside(file) as opened:
            part = Path(str(opened.name))

        def read(fs: Any, path: str) -> None:
            fs.get_file(path, str(part))
            expected = _found(self, fs.info(path)).size
            arrived = part.stat().st_size
            if arrived != expected:
                raise OSError(f"{arrived} of {expected} bytes arrived")

        try:
            _persist(self, "reading", read)
            part.replace(file)
        finally:
            part.unlink(missing_ok=True)

    def download_exactly(self, file: Path) -> None:
        """Download a file that no checksum of ours covers, and compare it with the MD5 of the
        store, if the store has one.

        Raises:
            StorageError: other bytes are read each time; there is no local file then.
        """
        for _ in range(_TRIES):
            self.download(file)
            held = self.md5()
            read = _md5_of(file)
            if held in ("", read):
                return
        file.unlink()
        raise self._misread(f"its MD5 there is {held}, that of what is read {read}")

    def require_like(self, file: Path) -> None:
        """Check a downloaded file that differs from what was once written: its reading was right,
        so the stored file is damaged. If the store has no MD5, the file is read again.

        Raises:
            StorageError: the file is not like what is there.
            FileNotFoundError: nothing is there.
        """
        held = self.md5()
        if held:
            read = _md5_of(file)
            if read != held:
                raise self._misread(f"its MD5 there is {held}, that of what is read {read}")
            return
        again = file.with_name(f".{file.name}.again")
        try:
            self.download(again)
            if not filecmp.cmp(file, again, shallow=False):
                raise self._misread("they differ from one time to the next")
        finally:
            again.unlink(missing_ok=True)

    def _misread(self, why: str) -> StorageError:
        return StorageError(
            f"{self}: other bytes are read than the store holds ({why}). "
            "Check network and service, then run the same command again."
        )

    def md5(self) -> str:
        """The MD5 of its bytes in hexadecimal digits, as the store has it; empty: it has none.
        FileNotFoundError: it is not there."""
        protocol, _, _ = self.url.partition("://")
        if protocol in ("s3", "s3a"):
            return _persist(self, "looking at", _md5_of_s3)
        return _persist(self, "looking at", _md5_of_others)

    def _arrived(self, fs: Any, path: str, size: int) -> "RemoteFile":
        """Return the file that was written; OSError if its size differs from what was written."""
        try:
            found = _found(self, fs.info(path))
        except FileNotFoundError as error:
            raise OSError(f"{size} bytes were written, but nothing is there") from error
        if found.size != size:
            raise OSError(f"{size} bytes were written, but {found.size} are there")
        return found

    def found(self) -> RemoteFile:
        """Size and stamp; FileNotFoundError: it is not there."""
        return _found(self, _persist(self, "looking at", lambda fs, path: fs.info(path)))

    def exists(self) -> bool:
        try:
            return bool(self.found())
        except FileNotFoundError:
            return False

    def is_dir(self) -> bool:
        return _persist(self, "looking at", lambda fs, path: fs.isdir(path))

    def files(self, depth: int | None = None) -> list[RemoteFile]:
        """The files of this folder, and of those below it down to `depth` (None: all); none if
        there is no such folder."""
        try:
            listing = _persist(self, "listing", lambda fs, path: self._files_below(fs, path, depth))
        except FileNotFoundError:
            return []
        return [_found(_at(self, name), info) for name, info in sorted(listing.items())]

    def tree(self) -> dict[str, RemoteFile]:
        """All files of this folder and of those below it, by their names from here.

        StorageError: a name would lead out of a folder that it is copied to.
        """

        def look(fs: Any, path: str) -> tuple[str, dict[str, dict[str, Any]]]:
            return f"{path.rstrip('/')}/", self._files_below(fs, path, None)

        try:
            start, listing = _persist(self, "listing", look)
        except FileNotFoundError:
            return {}
        found = {}
        for name, info in sorted(listing.items()):
            inner = name.removeprefix(start)
            why = why_outside(inner)
            if inner == name:
                why = "is not below it"
            if why:
                raise StorageError(
                    f"{self}: the listing has the name {inner!r:.120}, which {why}, so it can't "
                    "be a file of this folder. Remove that object, or name another place."
                )
            found[inner] = _found(_at(self, name), info)
        return found

    def _files_below(self, fs: Any, path: str, depth: int | None) -> dict[str, dict[str, Any]]:
        """Return what the file system reports about the files in a folder and below, by name.

        fsspec's own search takes a folder that can't be listed just now for an empty one.
        """
        protocol, _, _ = self.url.partition("://")
        if depth is None and protocol in _OBJECT_STORES:
            return fs.find(path, detail=True)
        found = {}
        for info in fs.ls(path, detail=True):
            name = info["name"].rstrip("/")
            if info["type"] != "directory":
                found[name] = info
            elif depth is None:
                found |= self._files_below(fs, name, None)
            elif depth > 1 and name != path.rstrip("/"):
                found |= self._files_below(fs, name, depth - 1)
        return found

    def glob(self, pattern: str) -> list["RemotePath"]:
        """Return the paths below this folder that match, sorted."""
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
        """Delete a file, or a folder with all that is in it. Nothing happens if it is not there."""

        def delete(fs: Any, path: str) -> None:
            with contextlib.suppress(FileNotFoundError):
                fs.rm(path, recursive=True)
            # s3fs does not report the files that S3 refuses to delete in a bulk request.
            for left in self._left(fs, path):
                fs.rm_file(left)

        with contextlib.suppress(FileNotFoundError):
            _persist(self, "deleting", delete)

    def _left(self, fs: Any, path: str) -> list[str]:
        """The files of a folder, or this file, if they are there."""
        try:
            return list(self._files_below(fs, path, None))
        except FileNotFoundError:
            return []

    def open(self, stamp: str = "") -> io.BufferedReader:
        """The file, opened for reading, with random access.

        DataError: the file was changed since it had this `stamp` ("": it is not checked).
        """
        found = self.found()
        if stamp not in ("", found.stamp):
            raise DataError(
                f"{self}: has changed since it was found. Let nobody write to the input, and start "
                "again with --overwrite."
            )
        return io.BufferedReader(_RemoteReader(found), _BLOCK_BYTES)


class _RemoteReader(io.RawIOBase):
    """A remote file, read in blocks, of which a few are kept. If reading fails it raises a
    StorageError, since a plain OSError would be taken for a damaged file."""

    def __init__(self, found: RemoteFile):
        self._found = found
        self._at = 0
        self._block = functools.lru_cache(_BLOCKS_KEPT)(self._read_block)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origins = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._found.size}
        self._at = origins[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        if self._at >= self._found.size:
            return 0
        number, start = divmod(self._at, _BLOCK_BYTES)
        data = self._block(number)[start : start + len(buffer)]
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def _read_block(self, number: int) -> bytes:
        start = number * _BLOCK_BYTES
        stop = min(start + _BLOCK_BYTES, self._found.size)
        try:
            (data,) = read_ranges([(self._found.path, start, stop)])
        except FileNotFoundError as error:
            fix = "Restore it, then run it again"
            raise StorageError(
                f"{self._found.path}: was deleted while it was read. {fix}."
            ) from error
        if len(data) != stop - start:
            fix = "Restore it, then run it again"
            raise StorageError(f"{self._found.path}: was cut short while it was read. {fix}.")
        return data


def place(path: "str | Path | RemotePath") -> "Path | RemotePath":
    """A path of this machine, or one behind a URL."""
    if isinstance(path, Path | RemotePath):
        return path
    if is_url(path):
        return RemotePath(path.rstrip("/"))
    return Path(path)


def address(path: Path | RemotePath) -> str:
    """The text by which `place` finds a path again; `str` of a URL is for messages."""
    if isinstance(path, RemotePath):
        return path.url
    return str(path)


def find(pattern: str) -> list[RemoteFile]:
    """The files that match a URL with *, ?, [] or **, sorted."""
    path = RemotePath(pattern)
    glob_translate = load_package("fsspec.utils", "remote", str(path)).glob_translate

    def search(fs: Any, inner: str) -> dict[str, dict[str, Any]]:
        magic = re.search(r"[*?\[]", inner)
        if magic is None:
            return {inner: fs.info(inner)}
        root, slash, _ = inner[: magic.start()].rpartition("/")
        rest = inner[len(root) + len(slash) :]
        depth = rest.count("/") + 1
        if "**" in rest:
            depth = None
        matches = re.compile(glob_translate(inner)).match
        listing = path._files_below(fs, root or slash, depth)
        return {name: info for name, info in listing.items() if matches(name)}

    try:
        listing = _persist(path, "listing", search)
    except FileNotFoundError:
        return []
    return [
        _found(_at(path, name), info)
        for name, info in sorted(listing.items())
        if info.get("type") == "file"
    ]


def read_ranges(ranges: Sequence[tuple[RemotePath, int, int | None]]) -> list[bytes]:
    """Bytes from `start` to before `stop` (None: the end) of each of these files, which are all in
    one file system and are read at the same time."""
    results: dict[int, bytes] = {}

    def read(fs: Any, _: str) -> None:
        # What an earlier try has read is not read again.
        todo = [number for number in range(len(ranges)) if number not in results]
        paths = []
        starts = []
        stops = []
        for number in todo:
            path, start, stop = ranges[number]
            paths.append(fs._strip_protocol(path.url))
            starts.append(start)
            stops.append(stop)
        found = fs.cat_ranges(paths, starts, stops, on_error="return")
        for number, data in zip(todo, found):
            if not isinstance(data, Exception):
                results[number] = bytes(data)
        for data in found:
            if isinstance(data, Exception):
                raise data

    if ranges:
        _persist(ranges[0][0], "reading", read)
    return [results[number] for number in range(len(ranges))]


def _at(base: RemotePath, name: str) -> RemotePath:
    """A path inside the file system of `base`, as a URL."""
    return RemotePath(f"{base.url.partition('://')[0]}://{name}")


def _found(path: RemotePath, info: dict[str, Any]) -> RemoteFile:
    names = ("ETag", "etag", "generation", "md5Hash", "LastModified", "updated", "mtime", "created")
    stamp = repr([info.get("size"), *(str(info[name]) for name in names if info.get(name))])
    short = hashlib.sha256(stamp.encode()).hexdigest()[:16]
    return RemoteFile(path, info.get("size") or 0, short)


def _md5_of(file: Path) -> str:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, lambda: hashlib.md5(usedforsecurity=False))
    return digest.hexdigest()


def _md5_of_s3(fs: Any, path: str) -> str:
    """The MD5 of an object of S3, which is its ETag if it was written at once; empty: it is not.

    The ETag is another number of objects that are encrypted with a key of KMS or of the customer,
    and in directory buckets.
    """
    bucket, key, _ = fs.split_path(path)
    head = fs.call_s3("head_object", Bucket=bucket, Key=key)
    is_sealed = str(head.get("ServerSideEncryption", "")).startswith("aws:")
    if is_sealed or head.get("SSECustomerAlgorithm") or bucket.endswith("--x-s3"):
        return ""
    etag = str(head.get("ETag", "")).strip('"')
    if not re.fullmatch("[0-9a-f]{32}", etag):
        return ""
    return etag


def _md5_of_others(fs: Any, path: str) -> str:
    """Return the MD5 of a file as `_md5_of_s3` does, for GCS, which has it in base64, and for
    stores without one.
    """
    return base64.b64decode(str(fs.info(path).get("md5Hash", ""))).hex()


def _persist(path: RemotePath, what: str, call: Callable[[Any, str], Any]) -> Any:
    """The result of `call`, given the file system of a path and the path inside it. It is tried
    again where that may help."""
    protocol = path.url.partition("://")[0]
    if _EXTRAS.get(protocol) == "gcs":
        _silence_gcsfs()
    for number in range(_TRIES):
        try:
            fs, inner = _file_system(path.url)
            return call(fs, inner)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise FileNotFoundError(
                errno.ENOENT, "there is no such file, folder or bucket", str(path)
            ) from error
        except ImportError as error:
            extra = _EXTRAS.get(protocol, "remote")
            fix = f"Install it: {install_command(extra)}"
            if protocol not in _EXTRAS and importlib.util.find_spec("fsspec"):
                # fsspec names the package of a store that no extra of ours brings.
                fix = "Install the package that is named here"
            raise UsageError(
                f"{path}: needs a package for {protocol}:// ({error}). {fix}"
            ) from error
        except _BUGS:
            raise
        except Exception as error:
            lasting = _lasting(path, what, error)
            if lasting is not None:
                raise lasting from error
            if number == _TRIES - 1:
                fix = "Check network and service, then run the same command again"
                raise StorageError(
                    f"{path}: {what} failed {_TRIES} times ({_reason(error)}), which may pass. "
                    f"{fix}."
                ) from error
            time.sleep(_PAUSE * 2**number * random.uniform(0.5, 1))


def _file_system(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it.

    fsspec's own `url_to_fs` would follow a chain of file systems in the name of an object.
    """
    fsspec = load_package("fsspec", "remote", masked(url))
    kind = fsspec.get_filesystem_class(url.partition("://")[0])
    options = kind._get_kwargs_from_urls(url)
    return kind(**options, use_listings_cache=False), kind._strip_protocol(url)


@functools.cache
def _silence_gcsfs() -> None:
    """Silence gcsfs's log: it logs errors with a traceback before it raises them, and we report
    what it raises.
    """
    logging.getLogger("gcsfs").setLevel(logging.CRITICAL)


def _reason(error: Exception) -> str:
    """An error in one line."""
    first, _, rest = str(error).partition("\n")
    if rest and first.startswith("Forbidden: "):
        # Of gcsfs: the address of the request, and then why.
        first, _, _ = f"Forbidden: {rest}".partition("\n")
        return first
    return f"{type(error).__name__}: {first}"


def _is_denied(error: Exception) -> bool:
    """Return whether a store denies access, or does not know the credentials."""
    if isinstance(error, PermissionError):
        return True
    # NonRetryableError is what gcsfs makes of credentials that lack something.
    if re.search(r"Credentials|RefreshError|NonRetryableError", type(error).__name__):
        return True
    if isinstance(error, OSError) and _FORBIDDEN.match(str(error)):
        return True
    # "Invalid Credentials" is what gcsfs says where it could not renew them, which may pass.
    is_unknown = str(getattr(error, "code", "")) == _UNKNOWN_CALLER
    return is_unknown and "Invalid Credentials" not in str(error)


def _lasting(path: RemotePath, what: str, error: Exception) -> UserError | None:
    """Return the error for the user if another attempt would not help; None if the failure may
    pass.
    """
    protocol = path.url.partition("://")[0]
    reason = _reason(error)
    if _OTHER_REGION.search(str(error)):
        fix = "Set AWS_DEFAULT_REGION, or AWS_ENDPOINT_URL, to those of the bucket"
        return StorageError(
            f"{path}: {what} failed, since the bucket is in another region ({reason}). {fix}."
        )
    if _is_denied(error):
        ways = _CREDENTIALS.get(_EXTRAS.get(protocol, ""), "")
        if ways:
            ways = f" ({ways})"
        fix = f"Give this machine credentials that may{ways}, or name another place"
        return StorageError(f"{path}: {what} is not allowed ({reason}). {fix}.")
    return None
