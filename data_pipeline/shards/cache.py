"""A folder of this host for what was fetched from elsewhere, shared by its processes and kept below
a number of bytes.

Files are sparse, named by a digest of their content, and filled in place: whoever reads them
compares what is there with that digest, so half a write, a kill or a power cut does no harm, and
two processes that write one file write the same bytes. The files that were not opened or written to
for longest are removed first. One that is removed stays readable where it is mapped.
"""

import contextlib
import fcntl
import os
from pathlib import Path

from data_pipeline.base.errors import StorageError
from data_pipeline.config import CACHE, CACHE_BYTES

_SHARE = 64  # the limit is looked at each time a process has written this part of it
_KEPT = 0.9  # of the limit is left when files were removed


class Cache:
    """A cache folder; `limit` bytes are exceeded by each process by at most a 64th, or what it
    fetches at once. Picklable."""

    def __init__(self, folder: str | Path = CACHE, limit: int = CACHE_BYTES):
        self.folder, self.limit = Path(folder).expanduser(), limit
        self._written = limit  # the first write looks at once

    def __reduce__(self) -> tuple[type, tuple[Path, int]]:
        return Cache, (self.folder, self.limit)

    def path(self, name: str) -> Path:
        """Return the path of the file with this name; a name begins with two hex digits of a
        digest.
        """
        return self.folder / name[:2] / name

    def open(self, name: str, size: int) -> int:
        """A descriptor of a file of `size` bytes, with holes where nothing was written yet.
        StorageError: it can't be made."""
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            if os.fstat(descriptor).st_size != size:
                os.ftruncate(descriptor, size)
            os.utime(descriptor)
        except OSError as error:
            raise self._refused(path, error) from error
        return descriptor

    def write(self, descriptor: int, data: bytes | memoryview, start: int) -> None:
        """Fill a part of a file."""
        view, at = memoryview(data), 0
        try:
            while at < len(view):
                at += os.pwrite(descriptor, view[at:], start + at)
        except OSError as error:
            raise self._refused(self.folder, error) from error
        self._written += len(view)

    def trim(self) -> None:
        """Remove what was unused for longest, if there is too much; one process at a time does
        so."""
        if self._written < self.limit // _SHARE:
            return
        self._written = 0
        lock = os.open(self.folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            files = []
            for path in self.folder.glob("??/*"):
                with contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    files.append((status.st_mtime_ns, status.st_blocks * 512, path))
            used = sum(size for _, size, _ in files)
            if used > self.limit:
                for _, size, path in sorted(files):
                    path.unlink(missing_ok=True)
                    used -= size
                    if used <= self.limit * _KEPT:
                        break
                (self.folder / "removed").touch()
        except BlockingIOError:
            pass  # another process is at it
        finally:
            os.close(lock)

    def generation(self) -> int:
        """Changes when files were removed: those that are mapped should be let go of."""
        try:
            return os.stat(self.folder / "removed").st_mtime_ns
        except OSError:
            return 0

    def _refused(self, path: Path, error: OSError) -> StorageError:
        place = "data.cache (prepare: --cache) to a folder of a larger disk"
        fix = f"Free space, or set {place}, or data.cache_bytes lower"
        return StorageError(f"{path}: the cache can't be written ({error.strerror}). {fix}.")
