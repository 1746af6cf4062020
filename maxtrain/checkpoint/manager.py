"""Checkpoints of a run: one directory for each step, which counts only when it is whole.

    DIRECTORY/00001000/arrays/       every leaf of the state as a global array (Orbax's files),
                                     readable onto any mesh
    DIRECTORY/00001000/record.json   what the caller saves beside it: data cursor, fingerprints,
                                     config
    DIRECTORY/00001000/commit.json   format, versions, shape, dtype and digest of every array, size
                                     and hashes of every file: written last
    DIRECTORY/frozen/                what no step changes, saved once: see frozen.py

A step is prepared in `.00001000.partial`, gets its commit record when everything else is on the
disk, and then its name by one rename: a process killed at any instant leaves a whole step or none.
Of a run behind a URL, DIRECTORY has what this host needs of the steps there; see at_url.py. Each
process uploads the files that it has written, and the commit record there comes last.
A directory that came to its name some other way (empty, half copied, half removed) lacks the commit
record or a file listed there, and is passed over. Restoring checks the hashes of files while plain
ones are read, and before Orbax reads others, which itself checks none of this; then, on the device
and on any mesh, the digests of the arrays. All processes of a job call every method, in the same
order.
"""

import concurrent.futures
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jaxtyping import PyTree

from data_pipeline.base.errors import StorageError
from data_pipeline.base.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint import at_url, frozen_params
from maxtrain.checkpoint.constant import ConstantArrays
from maxtrain.checkpoint.copying import remove_here_and_at_url
from maxtrain.checkpoint.integrity import FORMAT, defect, read_commit, survey
from maxtrain.checkpoint.listing import as_storage_error, complete, read_step
from maxtrain.checkpoint.local import LocalSteps, is_local, saves_since_upload
from maxtrain.checkpoint.mirror import SecondDirectory
from maxtrain.checkpoint.orbax_files import copies_are_complete, new_checkpointer, quieten
from maxtrain.checkpoint.reading import ArrayDirectory, read_parts, require_same
from maxtrain.checkpoint.retention import SpaceRequirement, StepFacts, require_space, superfluous
from maxtrain.checkpoint.run_state import best_steps
from maxtrain.checkpoint.writing import (
    ArrayChecks,
    StepSave,
    StepWriter,
    Upload,
    described,
    flatten,
)
from maxtrain.config.schema import CheckpointConfig
from maxtrain.parallel.agreement import await_first, gather, raising_together

# Seconds that training may wait for an upload before a warning.
_LONG_WAIT = 10.0


class Checkpoints:
    """Saving, finding, restoring and removing the checkpoints below one directory.

    The first checkpoint makes the directory. Those below a second directory are found and restored
    as well, and new ones are copied there. `on_commit` is called on process 0 with each step that
    has come to count, and whether it is where the run is kept, or on the disks of hosts alone: as
    soon as it does, in the background, or for the latter when all hosts have confirmed it. With a
    `home`, the steps are those at that URL, each process has a directory of its own, and
    `before_commit` is called on process 0 before a step counts there. Steps that are saved without
    an upload are on the disks of hosts, as `local` has them; None: there are none.
    """

    # Of the saves of this process, below any directory.
    _numbers = itertools.count()

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        second: Path | None = None,
        on_commit: Callable[[int, bool], object] | None = None,
        home: RemotePath | None = None,
        before_commit: Callable[[], object] | None = None,
        local: LocalSteps | None = None,
    ):
        self.directory = Path(directory).expanduser().absolute()
        self.local = local
        self._config = config
        self._on_commit = on_commit
        self._home = home
        self._writer = StepWriter(self.directory, home, before_commit)
        self._orbax = new_checkpointer(shares_directory=home is None)
        # Of steps on the disks of hosts alone; None: none was saved yet.
        self._of_hosts: ocp.AsyncCheckpointer | None = None
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future | None = None
        # The step that is being saved on the disks of hosts alone; None: none is.
        self._saving_locally: int | None = None
        # Saves in a row without an upload.
        self._since_upload = 0
        self._abandoned = False
        self.second = second
        self._second: SecondDirectory | None = None
        if second:
            self._second = SecondDirectory(self.directory, second, config.copy_keep)
        # Warning about an upload for which the last call of `save` waited long; else empty.
        self.slow_upload = ""
        # When the last save, or this process, began.
        self._last = time.monotonic()
        # The last step that this process began to save.
        self._newest = -1
        # Up to this step, checkpoints are known to be good by the steps after them.
        self._confirmed = -1
        # The steps of the best evaluations, by the newest record.
        self._best: set[int] = set()
        self._constant = ConstantArrays(self.directory)
        quieten()

    def steps(self) -> list[int]:
        """All complete steps in ascending order, read from the disk."""
        return list(complete(self.directory))

    def on_hosts(self) -> dict[int, Path]:
        """The steps that are on the disks of hosts alone, by number."""
        if self.local is None:
            return {}
        return self.local.whole

    def place(self, step: int) -> Path:
        """The directory that a complete step is read from."""
        return complete(self.directory, self.second, self.on_hosts())[step].parent

    def latest(self) -> int | None:
        """The newest complete step, read from the disk; None if there is none."""
        return max([*self.steps(), *self.on_hosts()], default=None)

    def due(self) -> bool:
        """Return whether checkpoint.minutes, if set, have passed since the last save, by this
        process's clock.
        """
        if self._config.minutes is None:
            return False
        return time.monotonic() - self._last >= 60 * self._config.minutes

    def uploads(self, step: int, record: dict[str, Any]) -> bool:
        """Return whether the next save, of this step, is to be uploaded, where not all are."""
        if self.local is None or self._since_upload + 1 >= self._config.upload_every:
            return True
        every = self._config.keep_every
        if every is not None and step % every == 0:
            return True
        return self._config.keep_best and step in best_steps(record).values()

    def save(
        self,
        step: int,
        state: PyTree[jax.Array],
        record: dict[str, Any],
        constant: PyTree[jax.Array] = None,
        uploaded: bool = True,
    ) -> bool:
        """Save one step, after any save under way.

        If `asynchronous`, it returns as soon as the state may be changed or donated.

        Args:
            state: what steps change.
            record: what belongs beside the arrays, as strict JSON.
            constant: what no step changes. It is written by the first save of a run, which waits
                for that; later ones refer to it.
            uploaded: False: to the disks of hosts alone.

        Returns:
            False if that step is complete on the disk already; it is left alone.

        Raises:
            StorageError: this save, or the one before it, failed. Earlier checkpoints are
                untouched.
            TryAgainError: this save, or the one before it, failed because weights are not
                finite, or constant arrays have changed.
        """
        self.slow_upload = ""
        self.wait()
        self._last = time.monotonic()
        writer = self._writer
        if not uploaded:
            assert self.local is not None
            writer = self.local.writer
        if not writer.prepare(step):
            return False
        refers = self._save_constant(constant)
        text = json.dumps(record | {"format": FORMAT}, indent=1, sort_keys=True, allow_nan=False)
        names, leaves, _ = flatten(state)
        arrays = described(names, leaves)
        with writer.saving(step):
            # An accelerator's arrays are on the host when this returns. A CPU's are read in place
            # meanwhile, which is as good: jax does not reuse the buffer of a donated array that
            # somebody still reads.
            what = ocp.args.PyTreeSave(dict(zip(names, leaves)))
            orbax = self._orbax
            if not uploaded:
                orbax = self._orbax_of_hosts(leaves)
            orbax.save(writer.staging(step) / "arrays", args=what)
        # Computed while files are written. A process whose save failed has raised by now: here it
        # would wait for its peers, who wait for it in Orbax.
        found = ArrayChecks.begin(state)
        saved = StepSave(step, text, arrays, refers, found, next(self._numbers))
        if uploaded:
            self._newest = step
            self._since_upload = 0
            self._pending = self._thread.submit(self._commit, saved)
        else:
            assert self.local is not None
            self._since_upload += 1
            self.local.writer.since_upload = self._since_upload
            self._saving_locally = step
            self._pending = self._thread.submit(self._commit_locally, saved)
        if not self._config.asynchronous:
            self.wait()
        return True

    def _orbax_of_hosts(self, leaves: Sequence[jax.Array]) -> ocp.AsyncCheckpointer:
        """Return what writes arrays on the disks of hosts alone."""
        if self._of_hosts is None:
            self._of_hosts = self._orbax
            # Where several hosts have the same, one of them may be lost.
            layouts = {(leaf.sharding, leaf.shape) for leaf in leaves}
            if jax.process_count() > 1 and copies_are_complete(layouts):
                self._of_hosts = new_checkpointer(shares_directory=False, with_copies=True)
        return self._of_hosts

    def _save_constant(self, constant: PyTree[jax.Array]) -> str | None:
        """Sees to it that arrays that no step changes are on the disk, and are what they were.

        Returns:
            What the commit records of steps call them; None: there are none.

        Raises:
            StorageError: they can't be written.
            TryAgainError: they have changed in memory.
        """
        if not jax.tree.leaves(constant):
            return None
        name = self._constant.name_of(constant)
        if self._constant.lacks(name):
            folder = self.directory / frozen_params.FOLDER / name
            home = None
            if self._home is not None:
                home = self._home / frozen_params.FOLDER / name
            config = CheckpointConfig(asynchronous=False)
            checkpoints = Checkpoints(folder, config, home=home)
            try:
                checkpoints.save(0, constant, {})
            finally:
                checkpoints.close()
        self._constant.is_there(name, is_sound=True)
        return name

    def _commit(self, step: StepSave) -> None:
        """Make the step a checkpoint when its arrays are written, and retire old steps; runs in the
        background.
        """
        self._retire_on_hosts()
        with self._writer.saving(step.number):
            self._orbax.wait_until_finished()
            self._writer.finish(step)
        if jax.process_index() != 0:
            return
        if self._on_commit:
            self._on_commit(step.number, True)
        self._best = set(best_steps(json.loads(step.record)).values())
        self._retire()
        self.copy_newest()

    def _commit_locally(self, step: StepSave) -> None:
        """Commit a step as `_commit` does, on the disks of hosts alone."""
        assert self.local is not None and self._of_hosts is not None
        self._retire_on_hosts()
        with self.local.writer.saving(step.number):
            self._of_hosts.wait_until_finished()
            self.local.writer.finish(step)

    def _retire_on_hosts(self) -> None:
        """Remove the steps on this host's disk that are not kept.

        The last save counts in all processes: `wait` has checked that.
        """
        if self.local is not None:
            self.local.retire()

    def restore(
        self,
        abstract_state: PyTree,
        step: int | None = None,
        partial: bool = False,
        check: bool = True,
    ) -> tuple[PyTree, dict[str, Any]]:
        """Return the arrays of a step, bit for bit as saved, in the requested layout; and its
        record.

        Args:
            abstract_state: ShapeDtypeStructs or arrays with the tree, shapes and dtypes of the
                saved state and shardings of any mesh. A leaf without a sharding is put on this
                process's first device.
            step: None for the newest complete one.
            partial: the checkpoint may hold more leaves than requested (say, the optimizer's); they
                are not read.
            check: hold the arrays against their digests; False is for a caller who does so.

        Raises:
            ConfigError: the state differs from the saved one; the message has a table. Nothing is
                padded, truncated or cast.
            DamagedError: files or arrays are not what was saved, or weights are not finite; in all
                processes.
            StorageError: there is no such checkpoint, it is not whole, unreadable, or written by a
                newer version.
        """
        path, commit, record = self._open(step)
        parts = [ArrayDirectory(path, commit)]
        constant = frozen_params.frozen_of(path, commit, self._directories())
        if constant is not None:
            parts.append(ArrayDirectory(*constant))
            is_own = constant.path.is_relative_to(self.directory)
            self._constant.is_there(commit[frozen_params.KEY], is_sound=is_own and check)
        names, leaves, treedef = flatten(abstract_state)
        require_same(parts, names, leaves, partial)
        home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        targets = {}
        for name, leaf in zip(names, leaves):
            sharding = getattr(leaf, "sharding", None) or home
            targets[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        arrays = read_parts(parts, targets, check, self._orbax, self.directory)
        self._since_upload = 0
        if is_local(path):
            self._since_upload = saves_since_upload(path)
        return jax.tree.unflatten(treedef, [arrays[name] for name in names]), record

    def frozen_names(self, step: int | None = None) -> set[str]:
        """The names of the arrays of a complete step (None: the newest) that no step changes.

        StorageError: there is no such step, or these arrays are missing.
        """
        path, commit, _ = self._open(step)
        constant = frozen_params.frozen_of(path, commit, self._directories())
        if constant is None:
            return set()
        return set(constant.commit["arrays"])

    def _directories(self) -> list[Path]:
        """Return the directories that have steps of the run."""
        if self.second is None:
            return [self.directory]
        return [self.directory, self.second]

    def require_space(self, abstract_state: PyTree, constant: PyTree = None) -> str:
        """A warning if the disk has no space for all checkpoints that are kept at once.

        Args:
            abstract_state: what each of them holds.
            constant: what is saved once, by the first of them.

        Returns:
            Empty if it has the space.

        Raises:
            StorageError: in all processes, if it has no space for one.
        """
        size = _num_bytes
        if self._home is not None:
            # Each process writes the parts that its devices hold, and sends them.
            size = _num_bytes_here
        once = size(constant)
        if any(not defect(path) for path in frozen_params.stores(self.directory)):
            once = 0
        key = "output_dir"
        why = f"checkpoint.keep={self._config.keep}"
        kept = self._config.keep
        # Steps are kept at a URL: here are the newest and the one that is being saved.
        if self._home is not None:
            key = "local_dir"
            why = "the newest, which stays on this host,"
            kept = 1
        more = max(1, kept + 1 - len(self.steps()))
        needed = SpaceRequirement(size(abstract_state), once, more, key, why)
        with raising_together(StorageError):
            warning = require_space(self.directory, needed)
            if self.local is not None:
                warning = warning or self._require_local_space(self.local, abstract_state)
        return warning

    def _require_local_space(self, local: LocalSteps, abstract_state: PyTree) -> str:
        """Check the space as `require_space` does, for the steps that this process keeps without
        upload.
        """
        more = max(1, local.keep + 1 - len(local.whole))
        why = f"checkpoint.local_keep={local.keep}"
        each = _num_bytes_here(abstract_state)
        return require_space(
            local.directory, SpaceRequirement(each, 0, more, "checkpoint.local", why)
        )

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps: the run goes on from this one on another way.

        StorageError, in all processes: one can't be removed.
        """
        self.wait()
        # This also waits until process 0 is done.
        with raising_together(StorageError):
            if jax.process_index() == 0:
                self._remove_after(step)
            if self.local is not None:
                doing = f"removing steps after {step} of {self.local.directory}"
                with as_storage_error(doing, "Permit that, then run the same command again."):
                    self.local.discard_after(step)
        self.refresh()
        if self._second and jax.process_index() == 0:
            self._second.discard_after(step)

    def _remove_after(self, step: int) -> None:
        doing = f"removing steps after {step} of {self.directory}"
        with as_storage_error(doing, "Permit that, then run the same command again."):
            for later in self.steps():
                if later > step:
                    self._remove(later)

    def _remove(self, step: int) -> None:
        path = self._writer.path(step)
        remove_here_and_at_url(path, lambda: failpoints.hit("during_removal", step))

    def copy_newest(self) -> None:
        """Has the second directory, if there is one, look for a step that it lacks.

        It returns at once.
        """
        if self._second and jax.process_index() == 0:
            self._second.offer()

    def settle(self, seconds: float) -> str:
        """Waits so long for copies under way.

        Returns:
            On process 0, a warning if the newest step is not in the second directory then.
        """
        if not self._second:
            return ""
        settled = jax.process_index() != 0 or self._second.settle(seconds)
        # If others ended while process 0 waits, they would end it as well.
        await_first(f"settled/{next(self._numbers)}", seconds + 60)
        if settled:
            return ""
        target = self._second.target
        command = f"maxtrain checkpoint copy {self._writer.path(self.latest() or 0)} {target}"
        return f"{target} lacks the newest checkpoint. `{command}` copies it."

    def wait(self) -> None:
        """Returns when the last save is complete on the disk, for all processes.

        Raises:
            StorageError: it failed, here or in another process (noticed after Orbax's limit of 20
                minutes).
        """
        pending = self._take_pending()
        if not pending:
            return
        locally = self._saving_locally
        self._saving_locally = None
        began = time.monotonic()
        failure = pending.exception()
        waited = time.monotonic() - began
        said = gather({"failed": failure is not None, "uploaded": self._writer.uploaded})
        if self._home is not None and locally is None and waited > _LONG_WAIT:
            uploads = [Upload(*theirs["uploaded"]) for theirs in said]
            # Else it was a slow disk, say.
            if max(upload.seconds for upload in uploads) > _LONG_WAIT:
                self.slow_upload = _slow_upload(self._newest, waited, uploads)
        if jax.process_count() > 1:
            failed = [process for process, theirs in enumerate(said) if theirs["failed"]]
            if failed and failure is None:
                where = f"saving to {self.directory} failed in process {failed[0]}"
                failure = StorageError(f"{where}. See its message there.")
        if failure:
            raise failure
        if locally is None:
            self.refresh()
        else:
            assert self.local is not None
            self.local.note_saved(locally)
            if self._on_commit and jax.process_index() == 0:
                self._on_commit(locally, False)

    def drop_local(self) -> None:
        """Removes the steps on the disk of this host that are not newer than what is uploaded: the
        run is at its end."""
        self.wait()
        if self.local is not None:
            self.local.clear(max(self.steps(), default=-1))

    def refresh(self) -> None:
        """Sees the steps that process 0 has made count, or removed, at a URL.

        On a disk that is shared, all processes see them anyway.
        """
        if self._home is not None and jax.process_index() != 0:
            at_url.pull(self._home, self.directory)

    def _take_pending(self) -> concurrent.futures.Future | None:
        """The save under way, if there is one, which is waited for once."""
        pending = self._pending
        self._pending = None
        return pending

    def abandon(self, seconds: float = 1.0) -> None:
        """Waits so long for the last save, and then leaves it and its copy as they are.

        It may be waiting for a lost process.
        """
        pending = self._take_pending()
        if pending:
            concurrent.futures.wait([pending], seconds)
        self._abandoned = True

    def close(self) -> None:
        """Finishes this process's part of the last save, and ends the background thread.

        StorageError: the save failed here.
        """
        pending = self._take_pending()
        try:
            if pending:
                pending.result()
        finally:
            self._thread.shutdown(wait=not self._abandoned)
            if not self._abandoned:
                self._orbax.close()
                if self._of_hosts is not None and self._of_hosts is not self._orbax:
                    self._of_hosts.close()
                if self._second:
                    self._second.close()

    def _open(self, step: int | None) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """Path, commit record and caller's record of a complete step of a format that we know.

        None is the newest step.
        """
        self.wait()
        found = survey(self.directory)
        whole = complete(self.directory, self.second, self.on_hosts())
        if not whole:
            lines = "".join(f"\n  {self._writer.path(bad)}: {why}." for bad, why in found.items())
            raise StorageError(
                f"{self.directory} has no complete checkpoint.{lines} "
                "Check the path, or train from the start."
            )
        if step is None:
            step = max(whole)
        path = whole.get(step)
        if path is None:
            why = found.get(step, "there is no such step")
            known = ", ".join(map(str, whole))
            problem = f"{self._writer.path(step)} is not a complete checkpoint: {why}"
            raise StorageError(f"{problem}. Complete steps: {known}. Ask for one of these.")
        commit = read_commit(path)
        if commit["format"] > FORMAT:
            raise StorageError(
                f"{path} has format {commit['format']}, written by {commit.get('versions')}; "
                f"this version reads up to {FORMAT}. "
                "Upgrade maxtrain, or remove that step to go on from the one before it."
            )
        migrated, record = read_step(path)
        return path, migrated, record

    def confirm(self, step: int) -> None:
        """Record that a step after the checkpoint of this step was good.

        A checkpoint can only be judged by the step after it. Until then the one before it is kept,
        whatever `checkpoint.keep` says.
        """
        newly = self._confirmed < self._newest <= step
        self._confirmed = max(self._confirmed, step)
        if newly and self._config.keep == 1 and jax.process_index() == 0:
            self._thread.submit(self._retire)

    def _retire(self) -> None:
        """Remove the steps that the config does not keep.

        A step that can't be removed stays, and is reported.
        """
        try:
            copying = None
            if self._second:
                copying = self._second.copying
            judged = StepFacts(self._confirmed, self._best, copying)
            for step in superfluous(self.steps(), judged, self._config):
                self._remove(step)
            # What is at a URL need not be here but for the newest, which a rollback may want.
            for step in self.steps()[:-1]:
                at_url.drop_arrays(self._writer.path(step))
        except (OSError, RuntimeError, StorageError) as error:
            what = f"removing old checkpoints from {self.directory} failed ({error})"
            fix = "Training goes on; they take space until they are removed"
            print(f"WARNING: {what}. {fix}.", file=sys.stderr, flush=True)


def _slow_upload(step: int, waited: float, uploads: Sequence[Upload]) -> str:
    """Describe a long wait for the upload of a step, with the process that ended last.

    Args:
        waited: seconds.
        uploads: of each process, in their order.
    """
    slowest = max(range(len(uploads)), key=lambda process: uploads[process].seconds)
    num_bytes, seconds = uploads[slowest]
    rate = num_bytes / 1e6 / max(seconds, 1e-9)
    return (
        f"checkpoint: training waited {waited:,.0f} s for the upload of step {step:,}. Process "
        f"{slowest} took longest: {num_bytes / 1e6:,.1f} MB at {rate:,.1f} MB/s. Look at its "
        "network and the region of the bucket (`maxtrain doctor`), or upload less often: raise "
        "checkpoint_interval, or set checkpoint.local and checkpoint.upload_every."
    )


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _num_bytes_here(tree: PyTree) -> int:
    """Return the bytes of array parts on devices of this process, each part counted once."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        count = leaf.size * leaf.dtype.itemsize
        sharding = getattr(leaf, "sharding", None)
        if sharding is not None:
            parts = set(map(str, sharding.devices_indices_map(leaf.shape).values()))
            here = sharding.addressable_devices_indices_map(leaf.shape).values()
            count = count * len(set(map(str, here))) // len(parts)
        total += count
    return total
