"""Makes the folder of a run on this host like the URL that the run is behind."""

from pathlib import Path

from data_pipeline.base.remote import RemoteFile, RemotePath
from maxtrain.checkpoint import at_url
from maxtrain.observe.lock import FILE_NAME as LOCK
from maxtrain.storage.records import pull_records, require_copy_of

CHECKPOINTS = "checkpoints"


def pull(url: RemotePath, folder: Path, listing: dict[str, RemoteFile]) -> at_url.UncommittedSteps:
    """Makes a folder of this host, which exists, like the run at a URL; arrays of checkpoints are
    fetched when they are read. StorageError: as of `StoreAtUrl`."""
    require_copy_of(folder, url, {LOCK})
    pull_records(folder, url, listing)
    start = f"{CHECKPOINTS}/"
    steps = {
        name.removeprefix(start): found for name, found in listing.items() if name.startswith(start)
    }
    return at_url.pull(url / CHECKPOINTS, folder / CHECKPOINTS, steps)
