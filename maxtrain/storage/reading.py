"""A run, or another directory of a model, for those who only read it: a folder, or a URL, of which
they get a copy."""

import atexit
import functools
import re
import shutil
import tempfile
from pathlib import Path

from data_pipeline.base.errors import UsageError
from data_pipeline.base.remote import RemoteFile, RemotePath, is_url
from maxtrain.storage.pulling import pull

# A run, or its checkpoints or one of them.
_IN_RUN = re.compile(r"(?P<run>.*?)(?P<below>/checkpoints(/(?P<step>\d+))?)?")


def readable(run: str | Path) -> Path:
    """The folder of a run, with `~` as the home directory; of one behind a URL a copy on this host,
    which goes when the process ends.

    The copy has the records and the small files of checkpoints. Arrays come when they are read.

    Raises:
        UsageError: there is nothing at the URL.
        StorageError: it can't be read.
    """
    if not is_url(run):
        return Path(run).expanduser()
    url = RemotePath(str(run).rstrip("/"))
    listing = url.tree()
    if not listing:
        raise UsageError(f"{url}: nothing is there. Name the URL of a run, s3://BUCKET/.../NAME.")
    return _copied(url, listing)


def split_run(place: str) -> tuple[str, int | None, str]:
    """Divide the path or the URL of a run, of its folder of checkpoints or of one of these.

    Returns:
        The run; the step of the checkpoint, or None; and the path below the run, which may be
        empty.
    """
    parts = _IN_RUN.fullmatch(place.rstrip("/"))
    assert parts is not None
    below = (parts["below"] or "").strip("/")
    step = None
    if parts["step"]:
        step = int(parts["step"])
    return parts["run"], step, below


def readable_model(place: str | Path) -> Path:
    """The folder of a model that a run begins with or learns from: of a run, its folder of
    checkpoints or one of these, or of Hugging Face, with `~` as the home directory; of one behind a
    URL a copy on this host as of `readable`, one for this process. Weights of Hugging Face are
    copied whole.

    Errors as of `readable`.
    """
    if not is_url(place):
        return Path(place).expanduser()
    run, _, below = split_run(str(place))
    return _one_copy(run) / below


@functools.cache
def _one_copy(url: str) -> Path:
    return readable(url)


def readable_or_new(folder: Path, url: str | None) -> Path:
    """Return the folder of a run as `readable` does, for a run that may not have begun, at a URL or
    (None) in its folder.
    """
    if url is None:
        return folder
    return _copied(RemotePath(url), RemotePath(url).tree())


def _copied(url: RemotePath, listing: dict[str, RemoteFile]) -> Path:
    """A copy of what is at a URL, which goes when the process ends."""
    temporary = tempfile.mkdtemp(prefix="maxtrain-")
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    folder = Path(temporary, url.name)
    folder.mkdir()
    pull(url, folder, listing)
    return folder


def require_no_url(path: str | Path, argument: str, instead: str = "") -> None:
    """UsageError: a place to write to is a URL, where the command can't write. `instead`: what
    else can be done, as a sentence without its full stop."""
    # A Path has one of the slashes.
    if is_url(str(path)) or is_url(str(path).replace(":/", "://", 1)):
        raise UsageError(
            f"{argument}={path}: is a URL, and this command writes to disks only. "
            f"Name a path, and copy what is written.{f' {instead}.' if instead else ''}"
        )
