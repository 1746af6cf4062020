"""Writing a step: room is made, files are hashed, and it comes to count at one instant.

All processes of a job call these methods, in the same order.
"""

import contextlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, PyTree, UInt32

import maxtrain
from data_pipeline.base.errors import StorageError, TryAgainError
from data_pipeline.base.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint import at_url, frozen_params
from maxtrain.checkpoint.finite import must_be_finite
from maxtrain.checkpoint.integrity import FORMAT, RECORD, Files, encode_commit, hash_files, sync
from maxtrain.checkpoint.integrity import put_aside as rename_aside
from maxtrain.checkpoint.listing import as_storage_error, complete
from maxtrain.checkpoint.orbax_files import writer_of
from maxtrain.checkpoint.zarr_reader import is_part_of_array
from maxtrain.ops.digest import by_name, digests, leaf_names
from maxtrain.ops.finite import begin_finite
from maxtrain.parallel.agreement import gather, raising_together, report

_VERSIONS = {
    "maxtrain": maxtrain.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "numpy": np.__version__,
}


def flatten(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Names such as `params.layers.0.mlp.up.kernel`, leaves, and the tree's definition."""
    leaves, treedef = jax.tree.flatten(tree)
    names = leaf_names(tree)
    assert len(set(names)) == len(names), "two leaves have the same name"
    return names, leaves, treedef


def described(names: list[str], leaves: list[Any]) -> dict[str, dict[str, Any]]:
    """The entry of each array in a commit record, as far as it is known before it is written."""
    entries = {}
    for name, leaf in zip(names, leaves, strict=True):
        entries[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    return entries


class ArrayChecks(NamedTuple):
    """Digests and finiteness of the saved arrays, in their order, as a device computes them."""

    digests: UInt32[Array, "leaves 2"]
    finite: Bool[Array, " leaves"]

    @classmethod
    def begin(cls, state: PyTree[jax.Array]) -> "ArrayChecks":
        """Starts computing; it waits only where that is necessary."""
        found = cls(digests(state), begin_finite(state))
        # On CPUs it must end before another program that talks to other processes; see `gather`.
        if jax.process_count() > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(found)
        return found


class StepSave(NamedTuple):
    """A step that is being saved.

    Attributes:
        number: of the step.
        record: what belongs beside the arrays, as JSON.
        arrays: their entries in the commit record, by name, without digests.
        constant: what the commit record calls the arrays that no step changes; None: there are
            none.
        found: of the arrays.
        save: counts the saves of this process.
    """

    number: int
    record: str
    arrays: dict[str, dict[str, Any]]
    constant: str | None
    found: ArrayChecks
    save: int


class StepFiles(NamedTuple):
    """Files of a step that this process has written.

    Attributes:
        finite: whether each array is, by name.
        entries: its files and folders.
        files: hashes of the files that the process is responsible for.
    """

    finite: dict[str, bool]
    entries: list[Path]
    files: Files


class Upload(NamedTuple):
    """Upload of a process to a URL: bytes, and how long it took."""

    num_bytes: int
    seconds: float


class StepWriter:
    """Makes steps below a directory, or at the URL that the directory is a copy of.

    `before_commit` is called on process 0 before a step counts at the URL.
    """

    def __init__(
        self,
        directory: Path,
        home: RemotePath | None = None,
        before_commit: Callable[[], object] | None = None,
    ):
        self.directory = directory
        self._home = home
        if home is not None:
            at_url.note_copy(directory, home)
        self._before_commit = before_commit
        # Whether all processes write to the same directory.
        self._is_shared = home is None
        # Of the last step of this process.
        self.uploaded = Upload(0, 0.0)

    def path(self, step: int) -> Path:
        """Return where a complete step is."""
        return self.directory / f"{step:08d}"

    def staging(self, step: int) -> Path:
        """Return where a step is prepared."""
        return self.directory / f".{step:08d}.partial"

    def saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        """Errors within are StorageErrors, and leave nothing of the step."""
        advice = (
            "Earlier checkpoints are untouched. "
            "Free space or permit writing there, then run the same command again."
        )
        doing = f"saving step {step} to {self.directory}"
        return as_storage_error(doing, advice, self.staging(step))

    def prepare(self, step: int) -> bool:
        """Return whether this step is to be saved, as process 0 sees it, which makes room for it.

        StorageError, in all processes: it can't make room.
        """
        there = False
        with raising_together(StorageError):
            if jax.process_index() == 0:
                with self.saving(step):
                    there = step in complete(self.directory)
                    if not there:
                        self._make_room(step)
        # A shared file system may show changes to other hosts late.
        primary, *_ = gather({"there": there})
        if primary["there"]:
            return False
        if self._home is not None:
            self._make_own_room(step)
        return True

    def _make_own_room(self, step: int) -> None:
        """Make room as `_make_room` does, in processes that share no directory with process 0."""
        with raising_together(StorageError):
            if jax.process_index() != 0:
                with self.saving(step):
                    self._make_room(step)

    def _make_room(self, step: int) -> None:
        # What is left of a process that was killed.
        for leftover in self.directory.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self._home is not None and jax.process_index() == 0:
            at_url.remove(self._home / f"{step:08d}")
        self.staging(step).mkdir(parents=True)

    def finish(self, step: StepSave) -> None:
        """Write the rest of a step after its arrays, and make it a checkpoint.

        Every process hashes the files that it wrote; process 0 makes it count.

        TryAgainError, in all processes: arrays that must be finite are not.
        """
        written = self._written(step)
        if self._home is not None:
            self._upload(step.number, list(written.files))
        said = report(f"checkpoint/{step.save}", json.dumps(written.files))
        if jax.process_index() != 0:
            if self._home is not None:
                shutil.rmtree(self.staging(step.number), ignore_errors=True)
            return
        sync(*written.entries)
        self._make_it_count(step.number, commit_record(step, written.finite, said))

    def _written(self, step: StepSave) -> StepFiles:
        """Hashes what was written here of a step, with the caller's record.

        TryAgainError, in all processes: arrays that must be finite are not.
        """
        failpoints.hit("during_save", step.number)
        staging = self.staging(step.number)
        are_finite = jax.device_get(step.found.finite).tolist()
        finite = dict(zip(step.arrays, are_finite, strict=True))
        self._refuse_non_finite(step.number, finite)
        if jax.process_index() == 0:
            (staging / RECORD).write_text(step.record, encoding="utf-8")
        entries = sorted(staging.rglob("*"))
        names = [entry.relative_to(staging).as_posix() for entry in entries if entry.is_file()]
        return StepFiles(finite, entries, hash_files(staging, self._written_here(names)))

    def _written_here(self, names: list[str]) -> list[str]:
        """Return the files of a step that this process is responsible for, of those that it sees.

        Where each process has a directory of its own, all write the small files, which are the
        same.
        """
        index = jax.process_index()
        if self._is_shared:
            return [name for name in names if writer_of(name) == index]
        if index == 0:
            return names
        return [name for name in names if is_part_of_array(name)]

    def _upload(self, step: int, names: list[str]) -> None:
        """Copies files of a step that does not count yet to its URL."""
        assert self._home is not None
        home = self._home / f"{step:08d}"
        staging = self.staging(step)
        began = time.monotonic()
        half = len(names) // 2
        at_url.upload(staging, home, names[:half])
        failpoints.hit("during_upload", step)
        at_url.upload(staging, home, names[half:])
        num_bytes = sum((staging / name).stat().st_size for name in names)
        self.uploaded = Upload(num_bytes, time.monotonic() - began)

    def _make_it_count_at_url(self, step: int, commit: dict[str, Any]) -> None:
        """Brings there what must be there before, then the commit record of the step."""
        assert self._home is not None
        home = self._home / f"{step:08d}"
        if self._before_commit:
            self._before_commit()
        failpoints.hit("before_upload_counts", step)
        (home / at_url.COMMIT).write_bytes(encode_commit(commit))
        failpoints.hit("after_upload", step)
        at_url.write_url(self.staging(step), home)

    def _make_it_count(self, step: int, commit: dict[str, Any]) -> None:
        """Writes the commit record of a step, and gives the step its name by one rename."""
        staging = self.staging(step)
        path = self.path(step)
        failpoints.hit("before_commit", step)
        if self._home is not None:
            self._make_it_count_at_url(step, commit)
        (staging / "commit.json").write_bytes(encode_commit(commit))
        sync(staging / "commit.json", staging)
        # What has the name is no complete checkpoint: `prepare` looked.
        if path.exists():
            rename_aside(path)
        os.rename(staging, path)
        sync(self.directory)
        failpoints.hit("after_commit", step, path)

    def _refuse_non_finite(self, step: int, finite: dict[str, bool]) -> None:
        """TryAgainError, in all processes, if arrays that must be finite are not.

        What is being written never counts.
        """
        bad = [name for name, is_finite in finite.items() if must_be_finite(name) and not is_finite]
        if not bad:
            return
        if jax.process_index() == 0:
            shutil.rmtree(self.staging(step), ignore_errors=True)
        listed = ", ".join(bad[:5])
        if len(bad) > 5:
            listed += f" and {len(bad) - 5:,} more"
        raise TryAgainError(
            f"step {step:,} is not saved: {listed} not finite, although every update was. "
            "That is a fault of memory or of a device. "
            "Run the same command again: it goes on from the last checkpoint. "
            "If it comes again, test this machine's memory."
        )


def commit_record(step: StepSave, finite: dict[str, bool], said: Sequence[str]) -> dict[str, Any]:
    """The commit record of a step; on process 0.

    Args:
        finite: whether each array is.
        said: from each process, the hashes of its files, as JSON.
    """
    files = {}
    for theirs in said:
        files.update(json.loads(theirs))
    arrays = step.arrays
    for name, digest in by_name(list(arrays), step.found.digests).items():
        arrays[name] |= {"digest": digest, "finite": finite[name]}
    commit: dict[str, Any] = {"format": FORMAT, "step": step.number, "versions": _VERSIONS}
    commit["arrays"] = arrays
    commit["files"] = dict(sorted(files.items()))
    if step.constant is not None:
        commit[frozen_params.KEY] = step.constant
    return commit
