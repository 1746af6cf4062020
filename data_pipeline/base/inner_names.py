"""Names that come from files and listings of others, and that must stay inside their folder.

A manifest, a commit record, an index of weights, a `state.json` or the listing of a bucket names
files. Whoever wrote it may be a stranger, so each such name is checked before it is joined to a
folder. The text of a name may not lead out of the folder; see `why_outside`. Symbolic links are a
second way out: `require_no_way_out` checks them where files are written, copied or fetched. Links
are not refused where a model is read, since the cache of Hugging Face consists of them.
"""

import os
import re
from pathlib import Path

from data_pipeline.base.errors import DataError, StorageError

# Limits of the usual file systems, and of the keys of object stores.
_MOST_BYTES_OF_PART = 255
_MOST_BYTES = 1024
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_DRIVE = re.compile(r"[A-Za-z]:")


def why_outside(name: object) -> str:
    """Why a relative name, with `/` between its parts, is not safe to join to a folder.

    Returns:
        The end of a sentence that begins with the name, or an empty text for a safe name. Unicode,
        spaces and dots inside a part are safe.
    """
    if not isinstance(name, str):
        return f"is {type(name).__name__}, not a text"
    if not name:
        return "is empty"
    if name.startswith("/"):
        return "is absolute"
    if _DRIVE.match(name):
        return "begins with a drive"
    if "\\" in name:
        return "has a backslash"
    if _CONTROL.search(name):
        return "has a control character"
    for part in name.split("/"):
        if part in ("", ".", ".."):
            return f"has the part {part!r}"
    try:
        sizes = [len(part.encode()) for part in name.split("/")]
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if max(sizes) > _MOST_BYTES_OF_PART or len(name.encode()) > _MOST_BYTES:
        return f"is longer than {_MOST_BYTES_OF_PART} bytes in a part, or {_MOST_BYTES} in all"
    return ""


def is_file_name(name: object) -> bool:
    """Return whether a name is that of a file directly in a folder: a safe name of one part."""
    return not why_outside(name) and "/" not in str(name)


def require_inside(name: object, where: str, fix: str) -> str:
    """Return a name that is safe to join to a folder.

    Args:
        where: the file or place that the name was read from, for the message.
        fix: what to do about it, as a sentence without its full stop.

    Raises:
        DataError: the name is not safe.
    """
    why = why_outside(name)
    if why:
        raise DataError(
            f"{where}: the name {str(name)!r:.120} {why}, and must stay inside its folder. {fix}."
        )
    assert isinstance(name, str)
    return name


def leads_out(folder: Path, name: str) -> bool:
    """Return whether symbolic links below a folder make a safe name lead out of that folder.

    The folder itself may be a link, or be reached through one. Parts that do not exist yet lead
    nowhere.
    """
    path = os.fspath(folder)
    for part in name.split("/"):
        path = os.path.join(path, part)
        if os.path.islink(path):
            home = os.path.realpath(folder)
            end = os.path.realpath(os.path.join(home, name))
            return os.path.commonpath([home, end]) != home
    return False


def require_no_way_out(folder: Path, name: str) -> Path:
    """Return the path of a safe name in a folder, for a file that is written, copied or fetched.

    Raises:
        StorageError: a symbolic link leads out of the folder.
    """
    if leads_out(folder, name):
        raise StorageError(
            f"{folder / name} leads out of {folder} through a symbolic link, and must stay inside. "
            "Replace the link by what it points to, or remove it."
        )
    return folder / name
