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
import contextlib
import functools
import itertools
import json
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jaxtyping import Array, Bool, PyTree, UInt32

import maxtrain
from data_pipeline.errors import ConfigError, DamagedError, StorageError, TryAgainError
from data_pipeline.remote import RemotePath
from maxtrain import failpoints
from maxtrain.checkpoint import at_url, frozen
from maxtrain.checkpoint.copying import remove_step
from maxtrain.checkpoint.finite import must_be_finite
from maxtrain.checkpoint.integrity import (
    FORMAT,
    defect,
    encode_commit,
    find_damage,
    hash_files,
    read_commit,
    survey,
    sync,
)
from maxtrain.checkpoint.integrity import put_aside as rename_aside
from maxtrain.checkpoint.listing import aligned, as_storage_error, complete, read_step
from maxtrain.checkpoint.plain import Arrived, is_part_of_array, read_plain
from maxtrain.checkpoint.second import SecondDirectory
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import Digester, by_name, digests, leaf_names
from maxtrain.ops.finite import begin_finite, non_finite_names
from maxtrain.parallel.agreement import await_first, gather, raise_together, report
from maxtrain.run_state import best_steps

_VERSIONS = {
    "maxtrain": maxtrain.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "numpy": np.__version__,
}


class Checkpoints:
    """Saving, finding, restoring and removing the checkpoints below one directory.

    The first checkpoint makes the directory. Those below a second directory are found and restored
    as well, and new ones are copied there. `on_commit` is called on process 0, in the background,
    with each step that has come to count. With a `home`, the steps are those at that URL, each
    process has a directory of its own, and `before_commit` is called on process 0 before a step
    counts there.
    """

    # Of the saves of this process, below any directory.
    _numbers = itertools.count()

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        second: Path | None = None,
        on_commit: Callable[[int], object] | None = None,
        home: RemotePath | None = None,
        before_commit: Callable[[], object] | None = None,
    ):
        self.directory = Path(directory).expanduser().absolute()
        self._config = config
        self._on_commit = on_commit
        self._home = home
        self._before_commit = before_commit
        # All processes, by name: they then wait for each other at the coordinator. Left to itself,
        # Orbax has all devices take part, and fails where processes have different numbers of them.
        together = None
        if jax.process_count() > 1:
            together = set(range(jax.process_count()))
        # Each process makes its own directories, where they share none.
        first = 0 if home is None else None
        options = ocp.options.MultiprocessingOptions(primary_host=first, active_processes=together)
        # Compressing noise, which weights mostly are, took four times as long as writing it.
        # Many processes write few files each, to be merged; one writes a file a shard, which can be
        # read in one pass. Nothing can be merged that is on disks of several hosts.
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            use_ocdbt=jax.process_count() > 1 and home is None,
            multiprocessing_options=options,
        )
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future | None = None
        self._abandoned = False
        self.second = second
        self._second: SecondDirectory | None = None
        if second:
            self._second = SecondDirectory(self.directory, second, config.copy_keep)
        # When the last save, or this process, began.
        self._last = time.monotonic()
        # The last step that this process began to save.
        self._newest = -1
        # Up to this step, checkpoints are known to be good by the steps after them.
        self._confirmed = -1
        # The steps of the best evaluations, by the newest record.
        self._best: set[int] = set()
        # What steps call the arrays that no step changes, once these were restored or saved; and
        # whether every byte of what is on the disk of them was read, or written, by this process.
        self._constant: str | None = None
        self._constant_is_sound = False
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_not_of_orbax)
        if getattr(sys.unraisablehook, "__name__", "") != _without_late_writes.__name__:
            sys.unraisablehook = _without_late_writes(sys.unraisablehook)

    def steps(self) -> list[int]:
        """All complete steps in ascending order, read from the disk."""
        return list(complete(self.directory))

    def place(self, step: int) -> Path:
        """The directory, of the two, that a complete step is read from."""
        return complete(self.directory, self.second)[step].parent

    def latest(self) -> int | None:
        """The newest complete step, read from the disk; None if there is none."""
        return max(self.steps(), default=None)

    def due(self) -> bool:
        """Whether checkpoint.minutes, if set, have passed since the last save, by this process's
        clock."""
        if self._config.minutes is None:
            return False
        return time.monotonic() - self._last >= 60 * self._config.minutes

    def save(
        self,
        step: int,
        state: PyTree[jax.Array],
        record: dict[str, Any],
        constant: PyTree[jax.Array] = None,
    ) -> bool:
        """Saves one step, after any save under way.

        If `asynchronous`, it returns as soon as the state may be changed or donated.

        Args:
            state: what steps change.
            record: what belongs beside the arrays, as strict JSON.
            constant: what no step changes. It is written by the first save of a run, which waits
                for that; later ones refer to it.

        Returns:
            False if that step is complete on the disk already; it is left alone.

        Raises:
            StorageError: this save, or the one before it, failed. Earlier checkpoints are
                untouched.
            TryAgainError: likewise, because weights are not finite, or constant arrays have
                changed.
        """
        self.wait()
        self._last = time.monotonic()
        if not self._prepare(step):
            return False
        refers = self._save_constant(constant)
        text = json.dumps(record | {"format": FORMAT}, indent=1, sort_keys=True, allow_nan=False)
        names, leaves, _ = _flatten(state)
        arrays = _described(names, leaves)
        with self._saving(step):
            # An accelerator's arrays are on the host when this returns. A CPU's are read in place
            # meanwhile, which is as good: jax does not reuse the buffer of a donated array that
            # somebody still reads.
            what = ocp.args.PyTreeSave(dict(zip(names, leaves)))
            self._orbax.save(self._staging(step) / "arrays", args=what)
        # Computed while files are written. A process whose save failed has raised by now: here it
        # would wait for its peers, who wait for it in Orbax.
        found = _Found(digests(state), begin_finite(state))
        # On CPUs it must end before another program that talks to other processes; see `gather`.
        if jax.process_count() > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(found)
        self._newest = step
        number = next(self._numbers)
        self._pending = self._thread.submit(self._commit, step, text, arrays, refers, found, number)
        if not self._config.asynchronous:
            self.wait()
        return True

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
        names, leaves, _ = _flatten(constant)
        arrays = _described(names, leaves)
        for name, digest in by_name(names, digests(leaves)).items():
            arrays[name]["digest"] = digest
        wanted = frozen.identity(arrays)
        if self._constant not in (None, wanted):
            raise _changed_constant(wanted, self._constant, "this run was restored or saved with")
        if self._lacks_constant(wanted):
            folder = self.directory / frozen.FOLDER / wanted
            home = None
            if self._home is not None:
                home = self._home / frozen.FOLDER / wanted
            config = CheckpointConfig(asynchronous=False)
            checkpoints = Checkpoints(folder, config, home=home)
            try:
                checkpoints.save(0, constant, {})
            finally:
                checkpoints.close()
        self._constant = wanted
        self._constant_is_sound = True
        return wanted

    def _lacks_constant(self, wanted: str) -> bool:
        """Whether arrays that no step changes are still to be written, as process 0 sees it.

        TryAgainError, in all processes: the steps there were saved with others.
        """
        lacks = False
        error = None
        if jax.process_index() == 0:
            doing = f"looking at {self.directory / frozen.FOLDER}"
            advice = "Permit that, then run the same command again."
            try:
                with as_storage_error(doing, advice):
                    lacks = self._looks_for_constant(wanted)
            except (StorageError, TryAgainError) as problem:
                error = problem
        raise_together(error)
        primary, *_ = gather({"lacks": lacks})
        return primary["lacks"]

    def _looks_for_constant(self, wanted: str) -> bool:
        """As `_lacks_constant`, on this process; removes what no step refers to."""
        if self._constant_is_sound and not frozen.lack(self.directory, wanted):
            return False
        for step in self.steps():
            before = read_commit(self._path(step)).get(frozen.KEY)
            if before != wanted:
                raise _changed_constant(wanted, before, f"step {step:,} was saved with")
        for path in frozen.stores(self.directory):
            if path.parent.name != wanted:
                self._remove_path(path)
                # Where something was put aside, it stays.
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        if not frozen.lack(self.directory, wanted, read=True):
            return False
        damaged = frozen.place_of(self.directory, wanted)
        if damaged.exists():
            self._remove_path(damaged)
        return True

    def restore(
        self,
        abstract_state: PyTree,
        step: int | None = None,
        partial: bool = False,
        check: bool = True,
    ) -> tuple[PyTree, dict[str, Any]]:
        """The arrays of a step, bit for bit as saved, laid out as asked for; and its record.

        Args:
            abstract_state: ShapeDtypeStructs or arrays with the tree, shapes and dtypes of the
                saved state and shardings of any mesh. A leaf without a sharding is put on this
                process's first device.
            step: None for the newest complete one.
            partial: the checkpoint may hold more leaves than asked for (say, the optimizer's); they
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
        names, leaves, treedef = _flatten(abstract_state)
        parts = [_Part(path, commit)]
        constant = frozen.frozen_of(path, commit, self._directories())
        if constant is not None:
            parts.append(_Part(*constant))
            self._constant = commit[frozen.KEY]
            is_own = constant.path.is_relative_to(self.directory)
            self._constant_is_sound = is_own and check
        there = {}
        for part in parts:
            there |= part.commit["arrays"]
        differences = _differences(there, dict(zip(names, leaves)), partial)
        if differences:
            mend = (
                f"Set the config back to that of {path / 'record.json'}, "
                "or set run_name to a new name to start afresh."
            )
            raise ConfigError(
                f"{path} holds another state than this config makes:\n{differences}\n{mend}"
            )
        home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = [getattr(leaf, "sharding", None) or home for leaf in leaves]
        targets = {}
        for name, leaf, sharding in zip(names, leaves, shardings):
            targets[name] = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
        arrays = {}
        for part in parts:
            of_part = {name: x for name, x in targets.items() if name in part.commit["arrays"]}
            if not of_part:
                continue
            try:
                arrays |= self._read_part(part, of_part, check)
            except DamagedError as damage:
                if not frozen.is_store(part.path):
                    raise
                mend = frozen.advice(self.directory)
                raise DamagedError(part.path, damage.what, mend) from damage
        return jax.tree.unflatten(treedef, [arrays[name] for name in names]), record

    def frozen_names(self, step: int | None = None) -> set[str]:
        """The names of the arrays of a complete step (None: the newest) that no step changes.

        StorageError: there is no such step, or these arrays are missing.
        """
        path, commit, _ = self._open(step)
        constant = frozen.frozen_of(path, commit, self._directories())
        if constant is None:
            return set()
        return set(constant.commit["arrays"])

    def _directories(self) -> list[Path]:
        """Those that have steps of the run."""
        if self.second is None:
            return [self.directory]
        return [self.directory, self.second]

    def _read_part(
        self, part: "_Part", targets: dict[str, jax.ShapeDtypeStruct], check: bool
    ) -> dict[str, jax.Array]:
        """Arrays of one directory by their names; with `check` held against their digests."""
        entries = part.commit["arrays"]
        stored = {name: entries[name].get("stored", name) for name in targets}
        wanted = {stored[name]: target for name, target in targets.items()}
        digester = Digester(sum(target.size * target.dtype.itemsize for target in wanted.values()))
        # Digests of arrays of many processes need them all, and one may fail to read the next
        # array: not before all have.
        early = None
        if check and jax.process_count() == 1:
            early = digester.add
        advice = f"Remove or rename {part.path} to go on from the checkpoint before it."
        if frozen.is_store(part.path):
            advice = frozen.advice(self.directory)
        with as_storage_error(f"reading the checkpoint {part.path}", advice):
            read = self._read(part.path, part.commit, wanted, early)
        arrays = {name: read[there] for name, there in stored.items()}
        if check:
            found = digester.finish(read)
            for name, there in stored.items():
                _require_digest(part.path, name, entries[name], found[there])
            _require_finite(part.path, arrays)
        return arrays

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
        size = _num_bytes(abstract_state)
        once = _num_bytes(constant)
        if any(not defect(path) for path in frozen.stores(self.directory)):
            once = 0
        place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        free = shutil.disk_usage(place).free
        key = "output_dir"
        why = f"checkpoint.keep={self._config.keep}"
        kept = self._config.keep
        # Steps are kept at a URL: here are the newest and the one that is being saved.
        if self._home is not None:
            key = "local_dir"
            why = "the newest, which stays on this host,"
            kept = 1
        more = max(1, kept + 1 - len(self.steps()))
        what = (
            f"{place} has {free / 1e9:,.2f} GB free; a checkpoint takes up to {size / 1e9:,.2f} GB"
        )
        if once:
            what += f", and the frozen parameters once {once / 1e9:,.2f} GB"
        error = None
        if free < size + once:
            error = StorageError(f"{what}. Free space, or set {key} to another disk.")
        raise_together(error)
        if free >= size * more + once:
            return ""
        rule = f"{what}, and {why} needs {more} more at once"
        return f"{rule}. Free space, or keep fewer."

    def put_aside_incomplete(self) -> list[str]:
        """On process 0, renames the steps that `steps` passes over, so that everybody sees it.

        Returns:
            A line about each.
        """
        if jax.process_index() != 0:
            return []
        lines = []
        for step, why in survey(self.directory).items():
            if not why:
                continue
            path = self._path(step)
            # One that can't be renamed does not count either.
            with contextlib.suppress(StorageError):
                rename_aside(path)
            lines.append(
                f"{path} is no checkpoint: {why}. It is put aside; nothing goes on from it."
            )
        return lines

    def discard_after(self, step: int) -> None:
        """Removes the checkpoints of later steps: the run goes on from this one on another way.

        StorageError, in all processes: one can't be removed.
        """
        self.wait()
        error = None
        if jax.process_index() == 0:
            try:
                self._remove_after(step)
            except StorageError as problem:
                error = problem
        # This also waits until process 0 is here.
        raise_together(error)
        self.refresh()
        if self._second and jax.process_index() == 0:
            self._second.discard_after(step)

    def _remove_after(self, step: int) -> None:
        doing = f"removing steps after {step} of {self.directory}"
        with as_storage_error(doing, "Permit that, then run the same command again."):
            for later in self.steps():
                if later > step:
                    self._remove(later)

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
        command = f"maxtrain checkpoint copy {self._path(self.latest() or 0)} {target}"
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
        failure = pending.exception()
        if jax.process_count() > 1:
            said = gather({"failed": failure is not None})
            failed = [process for process, theirs in enumerate(said) if theirs["failed"]]
            if failed and failure is None:
                where = f"saving to {self.directory} failed in process {failed[0]}"
                failure = StorageError(f"{where}. See its message there.")
        if failure:
            raise failure
        self.refresh()

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
                if self._second:
                    self._second.close()

    def _path(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def _staging(self, step: int) -> Path:
        return self.directory / f".{step:08d}.partial"

    def _open(self, step: int | None) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """Path, commit record and caller's record of a complete step of a format that we know.

        None is the newest step.
        """
        self.wait()
        found = survey(self.directory)
        whole = complete(self.directory, self.second)
        if not whole:
            lines = "".join(f"\n  {self._path(bad)}: {why}." for bad, why in found.items())
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
            problem = f"{self._path(step)} is not a complete checkpoint: {why}"
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

    def _prepare(self, step: int) -> bool:
        """Whether this step is to be saved, as process 0 sees it, which makes room for it.

        StorageError, in all processes: it can't make room.
        """
        there = False
        error = None
        if jax.process_index() == 0:
            try:
                with self._saving(step):
                    there = step in self.steps()
                    if not there:
                        self._make_room(step)
            except StorageError as problem:
                error = problem
        raise_together(error)
        # A shared file system may tell others late.
        primary, *_ = gather({"there": there})
        if primary["there"]:
            return False
        if self._home is not None:
            self._make_own_room(step)
        return True

    def _make_own_room(self, step: int) -> None:
        """As `_make_room`, of the processes that share no directory with process 0."""
        error = None
        if jax.process_index() != 0:
            try:
                with self._saving(step):
                    self._make_room(step)
            except StorageError as problem:
                error = problem
        raise_together(error)

    def _make_room(self, step: int) -> None:
        # What is left of a process that was killed.
        for leftover in self.directory.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        if self._home is not None and jax.process_index() == 0:
            at_url.remove(self._home / f"{step:08d}")
        self._staging(step).mkdir(parents=True)

    def _remove(self, step: int) -> None:
        self._remove_path(self._path(step), lambda: failpoints.hit("during_removal", step))

    def _remove_path(self, path: Path, before_files: Callable[[], object] = lambda: None) -> None:
        """Removes a step, or what is beside them; at a URL first, whose copy this is."""
        url = at_url.url_of(path)
        if url is not None:
            at_url.remove(url)
        remove_step(path, before_files)

    def _read(
        self,
        path: Path,
        commit: dict[str, Any],
        targets: dict[str, jax.ShapeDtypeStruct],
        arrived: Arrived | None,
    ) -> dict[str, jax.Array]:
        """The arrays of a step; DamagedError in all processes if one finds damage to a file.

        Plain files are checked while they are read; others, of which every process takes a share,
        before Orbax reads them. `arrived` is told of arrays while others are read.
        """
        arrays = None
        damage = ""
        error = None
        files = commit["files"]
        fetch = functools.partial(at_url.fetch, path, files)
        try:
            arrays, damage = read_plain(path, files, targets, arrived, fetch)
            if arrays is None and not damage:
                fetch(files)
                damage = find_damage(path, files, jax.process_index(), jax.process_count())
        except DamagedError as found:
            damage = found.what
        except StorageError as problem:
            error = problem
        except OSError as problem:
            error = StorageError(
                f"reading {path} failed: {problem}. Mend access, then run the same command again."
            )
        raise_together(error)
        if jax.process_count() > 1:
            said = [theirs["what"] for theirs in gather({"what": damage[:900]}, 4096)]
            damage = next((what for what in said if what), "")
        if damage:
            raise DamagedError(path, damage)
        if arrays is None:
            how = ocp.args.PyTreeRestore(
                targets, ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
            )
            arrays = self._orbax.restore(path / "arrays", args=how)
        return arrays

    def _saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        advice = (
            "Earlier checkpoints are untouched. "
            "Free space or permit writing there, then run the same command again."
        )
        doing = f"saving step {step} to {self.directory}"
        return as_storage_error(doing, advice, self._staging(step))

    def _commit(
        self,
        step: int,
        record: str,
        arrays: dict[str, dict[str, Any]],
        constant: str | None,
        found: "_Found",
        number: int,
    ) -> None:
        """In the background: when the arrays are written, writes the rest, makes it a checkpoint,
        and retires old ones.

        Every process hashes the files that it wrote. `constant` is what `_save_constant` gave,
        and `number` counts the saves.
        """
        with self._saving(step):
            self._orbax.wait_until_finished()
            failpoints.hit("during_save", step)
            staging = self._staging(step)
            finite = dict(zip(arrays, jax.device_get(found.finite).tolist(), strict=True))
            self._refuse_non_finite(step, finite)
            if jax.process_index() == 0:
                (staging / "record.json").write_text(record, encoding="utf-8")
            entries = sorted(staging.rglob("*"))
            names = [entry.relative_to(staging).as_posix() for entry in entries if entry.is_file()]
            mine = self._written_here(names)
            hashes = hash_files(staging, mine)
            if self._home is not None:
                self._upload(step, mine)
            said = report(f"checkpoint/{number}", json.dumps(hashes))
            if jax.process_index() != 0:
                if self._home is not None:
                    shutil.rmtree(staging, ignore_errors=True)
                return
            files = {}
            for theirs in said:
                files.update(json.loads(theirs))
            for name, digest in by_name(list(arrays), found.digests).items():
                arrays[name] |= {"digest": digest, "finite": finite[name]}
            commit = {"format": FORMAT, "step": step, "versions": _VERSIONS, "arrays": arrays}
            commit["files"] = dict(sorted(files.items()))
            if constant is not None:
                commit[frozen.KEY] = constant
            sync(*entries)
            self._make_it_count(step, commit)
        if self._on_commit:
            self._on_commit(step)
        self._best = set(best_steps(json.loads(record)).values())
        self._retire()
        self.copy_newest()

    def _written_here(self, names: list[str]) -> list[str]:
        """Of the files of a step that this process sees, those that it answers for.

        Where each process has a directory of its own, all write the small files, which are the
        same.
        """
        index = jax.process_index()
        if self._home is None:
            return [name for name in names if _writer(name) == index]
        if index == 0:
            return names
        return [name for name in names if is_part_of_array(name)]

    def _upload(self, step: int, names: list[str]) -> None:
        """Copies files of a step that does not count yet to its URL."""
        assert self._home is not None
        home = self._home / f"{step:08d}"
        half = len(names) // 2
        at_url.upload(self._staging(step), home, names[:half])
        failpoints.hit("during_upload", step)
        at_url.upload(self._staging(step), home, names[half:])

    def _make_it_count_at_url(self, step: int, commit: dict[str, Any]) -> None:
        """Brings there what must be there before, then the commit record of the step."""
        assert self._home is not None
        home = self._home / f"{step:08d}"
        if self._before_commit:
            self._before_commit()
        failpoints.hit("before_upload_counts", step)
        (home / at_url.COMMIT).write_bytes(encode_commit(commit))
        failpoints.hit("after_upload", step)
        at_url.write_url(self._staging(step), home)

    def _make_it_count(self, step: int, commit: dict[str, Any]) -> None:
        """Writes the commit record of a step, and gives the step its name by one rename."""
        staging = self._staging(step)
        path = self._path(step)
        failpoints.hit("before_commit", step)
        if self._home is not None:
            self._make_it_count_at_url(step, commit)
        (staging / "commit.json").write_bytes(encode_commit(commit))
        sync(staging / "commit.json", staging)
        # What has the name is no complete checkpoint: `save` looked.
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
            shutil.rmtree(self._staging(step), ignore_errors=True)
        listed = ", ".join(bad[:5])
        if len(bad) > 5:
            listed += f" and {len(bad) - 5:,} more"
        raise TryAgainError(
            f"step {step:,} is not saved: {listed} not finite, although every update was. "
            "That is a fault of memory or of a device. "
            "Run the same command again: it goes on from the last checkpoint. "
            "If it comes again, test this machine's memory."
        )

    def confirm(self, step: int) -> None:
        """To be called when a step after the checkpoint of this step has been made and found good.

        A checkpoint can only be judged by the step after it. Until then the one before it is kept,
        whatever `checkpoint.keep` says.
        """
        newly = self._confirmed < self._newest <= step
        self._confirmed = max(self._confirmed, step)
        if newly and self._config.keep == 1 and jax.process_index() == 0:
            self._thread.submit(self._retire)

    def _retire(self) -> None:
        """Removes the steps that the config does not keep.

        One that can't be removed is told of, and stays.
        """
        try:
            for step in self._superfluous():
                self._remove(step)
            # What is at a URL need not be here but for the newest, which a rollback may want.
            for step in self.steps()[:-1]:
                at_url.drop_arrays(self._path(step))
        except (OSError, RuntimeError, StorageError) as error:
            what = f"removing old checkpoints from {self.directory} failed ({error})"
            mend = "Training goes on; they take space until they are removed"
            print(f"WARNING: {what}. {mend}.", file=sys.stderr, flush=True)

    def _superfluous(self) -> list[int]:
        """The steps that the config does not keep."""
        steps = self.steps()
        kept = set(steps[-self._config.keep :])
        confirmed = [step for step in steps if step <= self._confirmed]
        kept.update(confirmed[-1:])
        if self._config.keep_best:
            kept |= self._best
        if self._second and self._second.copying is not None:
            kept.add(self._second.copying)
        every = self._config.keep_every
        return [step for step in steps if step not in kept and (every is None or step % every)]


class _Part(NamedTuple):
    """A directory with arrays of a step, and its commit record."""

    path: Path
    commit: dict[str, Any]


class _Found(NamedTuple):
    """What a device finds out of the arrays that are saved, in their order."""

    digests: UInt32[Array, "leaves 2"]
    finite: Bool[Array, " leaves"]


def _require_digest(path: Path, name: str, saved: dict[str, Any], found: str) -> None:
    """DamagedError: an array is not what was saved. Those of format 1 have no digest."""
    expected = saved.get("digest")
    if expected is not None and expected != found:
        raise DamagedError(path, f"array {name}: digest {expected} was saved, {found} was read")


def _require_finite(path: Path, arrays: dict[str, jax.Array]) -> None:
    """DamagedError: a step holds weights that are not finite."""
    checked = {name: array for name, array in arrays.items() if must_be_finite(name)}
    if not checked:
        return
    bad = non_finite_names(checked)
    if not bad:
        return
    what = f"array {bad[0]} holds NaN or infinity"
    if len(bad) > 1:
        what += f", and {len(bad) - 1:,} arrays more"
    raise DamagedError(path, what)


def put_aside(damage: DamagedError) -> None:
    """Renames a step that `restore` found damaged.

    For all processes together: when it returns, all may look for the step before it. StorageError:
    it can't be renamed.
    """
    path = damage.path
    if at_url.url_of(path) is not None:
        _put_aside_at_url(path, damage)
        return
    error = None
    if jax.process_index() == 0:
        try:
            aside = rename_aside(path).name
            what = f"{path} is damaged: {damage.what}."
            then = f"It is put aside as {aside}; the run goes on from the checkpoint before it."
            if frozen.is_store(path):
                then = f"It is put aside as {aside}; the run goes on if there is a copy of it."
            print(f"WARNING: {what}\n{then}", file=sys.stderr, flush=True)
        except StorageError as problem:
            error = problem
    raise_together(error)


def _put_aside_at_url(path: Path, damage: DamagedError) -> None:
    """As `put_aside`, of a step that is at a URL.

    If files are damaged on this host alone, they are fetched once more; else what is at the URL is
    put aside. That is decided by process 0, and files that others have fetched are fetched again.
    """
    url = at_url.url_of(path)
    assert url is not None
    error = None
    if jax.process_index() == 0:
        files = read_commit(path)["files"]
        here = {name: entry for name, entry in files.items() if (path / name).exists()}
        try:
            then = f"Its files on this host are not those at {url}, and are fetched again."
            if not find_damage(path, here):
                aside = at_url.put_aside(url)
                then = f"At {url} it is put aside as {aside}; the run goes on without it."
            what = f"{path} is damaged: {damage.what}."
            print(f"WARNING: {what}\n{then}", file=sys.stderr, flush=True)
        except StorageError as problem:
            error = problem
    at_url.drop_arrays(path)
    raise_together(error)


def _flatten(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Names such as `params.layers.0.mlp.up.kernel`, leaves, and the tree's definition."""
    leaves, treedef = jax.tree.flatten(tree)
    names = leaf_names(tree)
    assert len(set(names)) == len(names), "two leaves have the same name"
    return names, leaves, treedef


def _described(names: list[str], leaves: list[Any]) -> dict[str, dict[str, Any]]:
    """The entry of each array in a commit record, as far as it is known before it is written."""
    described = {}
    for name, leaf in zip(names, leaves, strict=True):
        described[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    return described


def _differences(saved: dict[str, dict], wanted: dict[str, Any], partial: bool) -> str:
    """A table of the arrays that differ, empty if there are none."""
    there = {name: f"{array['dtype']}{array['shape']}" for name, array in saved.items()}
    here = {name: f"{array.dtype}{list(array.shape)}" for name, array in wanted.items()}
    compared = set(here)
    if not partial:
        compared |= set(there)
    names = sorted(name for name in compared if here.get(name) != there.get(name))
    if not names:
        return ""
    table = [("array", "checkpoint", "this run")]
    for name in names[:40]:
        table.append((name, there.get(name, "missing"), here.get(name, "missing")))
    lines = aligned(table)
    if len(names) > 40:
        lines.append(f"    ... and {len(names) - 40} more")
    return "\n".join(lines)


def _writer(name: str) -> int:
    """The process that wrote a file of a step directory, by the names that Orbax gives.

    What Orbax merges is written by process 0.
    """
    found = re.match(r"arrays/ocdbt\.process_(\d+)/", name)
    if not found:
        return 0
    return int(found[1])


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs, and what asyncio logs of Orbax's writes after one has failed.

    These are tracebacks of what is raised here.
    """
    where = record.pathname
    if record.name == "asyncio":
        where = record.getMessage()
    return "orbax" not in where


def _num_bytes(tree: PyTree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _changed_constant(found: str, before: str | None, whose: str) -> TryAgainError:
    """The error of arrays that no step changes and that have changed."""
    return TryAgainError(
        f"the frozen parameters (hash {found}) are not those that {whose} (hash {before}), "
        "although nothing changes them. That is a fault of memory or of a device. Nothing of it is "
        "saved. Run the same command again: it goes on from the last checkpoint. If it comes "
        "again, test this machine's memory."
    )


def _without_late_writes(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that nobody can catch, without those of writes that end too late.

    Writes that end after another one has failed report to Orbax's event loop, which is gone by
    then: a page of tracebacks beside the one message that counts.
    """

    def hook(unraisable: Any) -> None:
        error = unraisable.exc_value
        if isinstance(error, RuntimeError) and str(error) == "Event loop is closed":
            return
        before(unraisable)

    hook.__name__ = _without_late_writes.__name__
    return hook
