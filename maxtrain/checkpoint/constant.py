"""The arrays that no step changes, as a run saves and restores them: see frozen.py for the files.

All processes of a job call these methods, in the same order.
"""

import contextlib
from pathlib import Path
from typing import Any

import jax
from jaxtyping import PyTree

from data_pipeline.base.errors import StorageError, TryAgainError
from maxtrain.checkpoint import frozen_params
from maxtrain.checkpoint.copying import remove_here_and_at_url
from maxtrain.checkpoint.integrity import read_commit
from maxtrain.checkpoint.listing import as_storage_error, complete
from maxtrain.checkpoint.writing import described, flatten
from maxtrain.ops.digest import by_name, digests
from maxtrain.parallel.agreement import gather, raising_together


class ConstantArrays:
    """State of the arrays that no step of a run changes, as this process knows it."""

    def __init__(self, directory: Path):
        self._directory = directory
        # What steps call them, once they were restored or saved.
        self._name: str | None = None
        # Whether every byte of what is on the disk was read, or written, by this process.
        self._is_sound = False

    def is_there(self, name: str, is_sound: bool) -> None:
        """Record that the arrays were restored or saved.

        Args:
            name: what steps call them.
            is_sound: whether all of what this directory has was read or written here.
        """
        self._name = name
        self._is_sound = is_sound

    def name_of(self, constant: PyTree[jax.Array]) -> str:
        """Return what steps call these arrays.

        TryAgainError: they have changed in memory.
        """
        names, leaves, _ = flatten(constant)
        arrays: dict[str, dict[str, Any]] = described(names, leaves)
        for name, digest in by_name(names, digests(leaves)).items():
            arrays[name]["digest"] = digest
        found = frozen_params.identity(arrays)
        if self._name not in (None, found):
            raise _changed(found, self._name, "this run was restored or saved with")
        return found

    def lacks(self, wanted: str) -> bool:
        """Return whether the arrays of this name are still to be written, as process 0 sees it.

        TryAgainError, in all processes: the steps there were saved with others.
        """
        lacks = False
        doing = f"looking at {self._directory / frozen_params.FOLDER}"
        advice = "Permit that, then run the same command again."
        with raising_together(StorageError, TryAgainError):
            if jax.process_index() == 0:
                with as_storage_error(doing, advice):
                    lacks = self._look_for(wanted)
        primary, *_ = gather({"lacks": lacks})
        return primary["lacks"]

    def _look_for(self, wanted: str) -> bool:
        """Check for the arrays as `lacks` does, on this process; removes arrays that no step refers
        to.
        """
        if self._is_sound and not frozen_params.lack(self._directory, wanted):
            return False
        for step, path in complete(self._directory).items():
            before = read_commit(path).get(frozen_params.KEY)
            if before != wanted:
                raise _changed(wanted, before, f"step {step:,} was saved with")
        for path in frozen_params.stores(self._directory):
            if path.parent.name != wanted:
                remove_here_and_at_url(path)
                # Where something was put aside, it stays.
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        if not frozen_params.lack(self._directory, wanted, read=True):
            return False
        damaged = frozen_params.place_of(self._directory, wanted)
        if damaged.exists():
            remove_here_and_at_url(damaged)
        return True


def _changed(found: str, before: str | None, whose: str) -> TryAgainError:
    return TryAgainError(
        f"the frozen parameters (hash {found}) are not those that {whose} (hash {before}), "
        "although nothing changes them. That is a fault of memory or of a device. Nothing of it is "
        "saved. Run the same command again: it goes on from the last checkpoint. If it comes "
        "again, test this machine's memory."
    )
