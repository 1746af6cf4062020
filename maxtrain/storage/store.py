"""Storage of a run during training: its folder, or a URL with the folder as its copy.

A run reads and writes files of this host alone. Behind a URL, the store makes them like what is
there before the run begins, and brings there what must not be lost.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.base.errors import StorageError, TryAgainError
from data_pipeline.base.remote import RemoteFile, RemotePath
from maxtrain.checkpoint import at_url
from maxtrain.checkpoint.local import LocalSteps
from maxtrain.observe.lock import RunLock
from maxtrain.storage.lease import FOLDER as LEASES
from maxtrain.storage.lease import Lease
from maxtrain.storage.local import open_local
from maxtrain.storage.pulling import CHECKPOINTS, pull
from maxtrain.storage.records import Records

Tell = Callable[[str], object]


class Store:
    """The folder of a run on a disk of this machine, or one that all its hosts share.

    Attributes:
        folder: of the run, on this host.
        checkpoints: the URL of its checkpoints; None: they are in the folder.
        local: steps on the disk of this host that are not uploaded; None: all are.
    """

    checkpoints: RemotePath | None = None
    local: LocalSteps | None = None

    def __init__(self, folder: Path):
        self.folder = folder

    def hold(self, held: contextlib.ExitStack, tell: Tell) -> None:
        """Take the lease of the run. TryAgainError: another process has written there since this
        process looked.

        Raises:
            LockedError: another process writes there.
            StorageError: it can't be locked.
        """
        held.enter_context(RunLock(self.folder))

    def publish(self) -> None:
        """Upload all that is new, at once, on process 0."""


class StoreAtUrl(Store):
    """A run behind a URL. Use as `with StoreAtUrl(...) as store:`; at the end, what was written is
    uploaded.

    Raises:
        LockedError: another process of this host works in the folder.
        StorageError: the URL can't be read; or the folder is of something else.
    """

    def __init__(self, folder: Path, url: RemotePath):
        super().__init__(folder)
        self.checkpoints = url / CHECKPOINTS
        self._url = url
        self._lock = RunLock(folder, key="local_dir")
        self._lease: Lease | None = None
        self._records: Records | None = None
        self._listing: dict[str, str] = {}
        self._pulled = at_url.UncommittedSteps([], {})

    def __enter__(self) -> "StoreAtUrl":
        self._lock.__enter__()
        try:
            listing = self._url.tree()
            self._listing = _stamps(listing)
            self._pulled = pull(self._url, self.folder, listing)
        except BaseException:
            self._lock.__exit__()
            raise
        return self

    def hold(self, held: contextlib.ExitStack, tell: Tell) -> None:
        """Take the lease of the run. TryAgainError: another process has written there since this
        process looked.
        """
        self._lease = Lease(self._url, tell)
        if _stamps(self._url.tree()) != self._listing:
            raise TryAgainError(
                f"{self._url}: another process has written there meanwhile. "
                "Run the same command again."
            )
        self._tidy(tell)
        self._records = Records(self.folder, self._url, self._lease.require)

    def _tidy(self, tell: Tell) -> None:
        """Removes uploads that were killed, and puts steps aside that are not whole."""
        assert self.checkpoints is not None
        for name in self._pulled.unfinished:
            at_url.remove(self.checkpoints / name)
        for name, why in self._pulled.lacking.items():
            step = self.checkpoints / name
            aside = at_url.put_aside(step)
            tell(f"{step} is no checkpoint: {why}. It is put aside as {aside}.")

    def publish(self) -> None:
        """Upload all that is new, at once, on process 0.

        Raises:
            LockedError: another process has taken this one for dead.
            StorageError: it can't be uploaded.
        """
        if self._records is not None:
            self._records.push()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        try:
            if self._records is not None:
                self._records.close()
                self._push_at_end(is_failing=error is not None)
        finally:
            if self._lease is not None:
                self._lease.free()
            self._lock.__exit__()

    def _push_at_end(self, is_failing: bool) -> None:
        assert self._records is not None
        try:
            self._records.push()
        except StorageError as error:
            # The error that ended the run is the one to report.
            if not is_failing:
                raise
            print(f"WARNING: {error}", file=sys.stderr, flush=True)


def _stamps(listing: dict[str, RemoteFile]) -> dict[str, str]:
    """Return what changes when somebody writes to a run."""
    return {
        name: found.stamp for name, found in listing.items() if not name.startswith(f"{LEASES}/")
    }


@contextlib.contextmanager
def open_store(
    folder: Path, url: str | None, local: Path | None = None, local_keep: int = 2
) -> Iterator[Store]:
    """Return where a run is kept: at a URL, or (None) in its folder; errors as of `StoreAtUrl`.

    Args:
        local: where hosts keep steps that are not uploaded; None: nowhere.
        local_keep: how many of them.
    """
    if url is None:
        yield Store(folder)
        return
    with (
        StoreAtUrl(folder, RemotePath(url)) as store,
        open_local(local, local_keep, store.publish) as steps,
    ):
        store.local = steps
        yield store
