"""Quarantine of steps that are damaged or incomplete: they are renamed, not deleted.

All processes of a job call these functions.
"""

import contextlib
import sys
from pathlib import Path

import jax

from data_pipeline.base.errors import DamagedError, StorageError
from maxtrain.checkpoint import at_url, frozen_params
from maxtrain.checkpoint.integrity import find_damage, read_commit, survey
from maxtrain.checkpoint.integrity import put_aside as rename_aside
from maxtrain.checkpoint.local import is_local
from maxtrain.parallel.agreement import gather, raise_together, raising_together


def put_aside(damage: DamagedError) -> None:
    """Renames a step that `restore` found damaged.

    For all processes together: when it returns, all may look for the step before it. StorageError:
    it can't be renamed.
    """
    path = damage.path
    if is_local(path):
        _put_aside_on_hosts(path, damage)
        return
    if at_url.url_of(path) is not None:
        _put_aside_at_url(path, damage)
        return
    with raising_together(StorageError):
        if jax.process_index() == 0:
            aside = rename_aside(path).name
            what = f"{path} is damaged: {damage.what}."
            then = f"It is put aside as {aside}; the run goes on from the checkpoint before it."
            if frozen_params.is_store(path):
                then = f"It is put aside as {aside}; the run goes on if there is a copy of it."
            print(f"WARNING: {what}\n{then}", file=sys.stderr, flush=True)


def _put_aside_on_hosts(path: Path, damage: DamagedError) -> None:
    """Put aside a step that is on the disks of hosts alone; see `put_aside`.

    Those whose files are damaged put aside theirs; all do so, if nobody's are.
    """
    hosts = [said["damaged"] for said in gather({"damaged": _is_damaged_here(path)})]
    with raising_together(StorageError):
        if hosts[jax.process_index()] or not any(hosts):
            rename_aside(path)
    if jax.process_index() == 0:
        what = f"{path} is damaged: {damage.what}."
        then = "It is put aside; the run goes on without it."
        print(f"WARNING: {what}\n{then}", file=sys.stderr, flush=True)


def _put_aside_at_url(path: Path, damage: DamagedError) -> None:
    """Put aside a step that is at a URL; see `put_aside`.

    If files are damaged on the disk of a host, all are fetched once more; else what is at the URL
    is put aside.
    """
    url = at_url.url_of(path)
    assert url is not None
    hosts = [said["damaged"] for said in gather({"damaged": _is_damaged_here(path)})]
    error = None
    if jax.process_index() == 0:
        then = f"Its files on the disk of a host are not those at {url}, and are fetched again."
        try:
            if not any(hosts):
                aside = at_url.put_aside(url)
                then = f"At {url} it is put aside as {aside}; the run goes on without it."
            what = f"{path} is damaged: {damage.what}."
            print(f"WARNING: {what}\n{then}", file=sys.stderr, flush=True)
        except StorageError as problem:
            error = problem
    at_url.drop_arrays(path)
    raise_together(error)


def _is_damaged_here(path: Path) -> bool:
    """Return whether files that this host has of a step are not what was saved, or can't be
    read.
    """
    try:
        files = read_commit(path)["files"]
        here = {name: entry for name, entry in files.items() if (path / name).exists()}
        return bool(find_damage(path, here))
    except (OSError, ValueError):
        return True


def put_aside_incomplete(directory: Path) -> list[str]:
    """Rename the incomplete steps below a directory, on process 0, so that everybody sees it.

    Returns:
        A line about each.
    """
    if jax.process_index() != 0:
        return []
    lines = []
    for step, why in survey(directory).items():
        if not why:
            continue
        path = directory / f"{step:08d}"
        # One that can't be renamed does not count either.
        with contextlib.suppress(StorageError):
            rename_aside(path)
        lines.append(f"{path} is no checkpoint: {why}. It is put aside; nothing goes on from it.")
    return lines
