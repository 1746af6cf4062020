"""Checkpoints of a run: one directory for each step, which counts only when it is whole.

    DIRECTORY/00001000/arrays/       every leaf of the state as a global array (Orbax's files),
                                     readable onto any mesh
    DIRECTORY/00001000/record.json   what the caller saves beside it: data cursor, fingerprints,
                                     config
    DIRECTORY/00001000/commit.json   format, versions, shape, dtype and digest of every array, size
                                     and hashes of every file: written last

A step is prepared in `.00001000.partial`, gets its commit record when everything else is on the
disk, and then its name by one rename: a process killed at any instant leaves a whole step or none.
A directory that came to its name some other way (empty, half copied, half removed) lacks the commit
record or a file listed there, and is passed over. Restoring checks the hashes of files while plain
ones are read, and before Orbax reads others, which itself checks none of this; then, on the device
and on any mesh, the digests of the arrays. All processes of a job call every method, in the same
order.
"""

import concurrent.futures
import contextlib
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
from maxtrain import failpoints
from maxtrain.checkpoint.copying import remove_step
from maxtrain.checkpoint.finite import must_be_finite
from maxtrain.checkpoint.integrity import (
    FORMAT,
    encode_commit,
    find_damage,
    hash_files,
    read_commit,
    survey,
    sync,
)
from maxtrain.checkpoint.integrity import put_aside as rename_aside
from maxtrain.checkpoint.listing import aligned, as_storage_error, complete, read_step
from maxtrain.checkpoint.plain import Arrived, read_plain
from maxtrain.checkpoint.second import SecondDirectory
from maxtrain.config.schema import CheckpointConfig
from maxtrain.ops.digest import Digester, by_name, digests, leaf_names
from maxtrain.ops.finite import begin_finite, non_finite_names
from maxtrain.parallel.agreement import await_first, gather, raise_together, report

_VERSIONS = {
    "maxtrain": maxtrain.__version__,
    "jax": jax.__version__,
    "orbax": ocp.__version__,
    "numpy": np.__version__,
}


class Checkpoints:
    """The checkpoints below one directory, which the first one makes: saving, finding, restoring,
    and removing old ones.

    Those below a second directory are found and restored as well, and new ones are copied there.
    `on_commit` is called on process 0, in the background, with each step that has come to count.
    """

    _numbers = itertools.count()  # of the saves of this process, below any directory

    def __init__(
        self,
        directory: str | Path,
        config: CheckpointConfig,
        second: Path | None = None,
        on_commit: Callable[[int], object] = lambda step: None,
    ):
        self.directory = Path(directory).expanduser().absolute()
        self._config = config
        self._on_commit = on_commit
        # All processes, by name: they then wait for each other at the coordinator. Left to itself,
        # Orbax has all devices take part, and fails where processes have different numbers of them.
        together = set(range(jax.process_count())) if jax.process_count() > 1 else None
        options = ocp.options.MultiprocessingOptions(active_processes=together)
        # Compressing noise, which weights mostly are, took four times as long as writing it.
        # Many processes write few files each, to be merged; one writes a file a shard, which can be
        # read in one pass.
        handler = ocp.PyTreeCheckpointHandler(
            use_compression=False,
            use_ocdbt=jax.process_count() > 1,
            multiprocessing_options=options,
        )
        self._orbax = ocp.AsyncCheckpointer(handler, multiprocessing_options=options)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future | None = None
        self._abandoned = False
        self.second = second
        self._second = SecondDirectory(self.directory, second, config.copy_keep) if second else None
        self._last = time.monotonic()  # when the last save, or this process, began
        self._newest = -1  # the last step that this process began to save
        self._confirmed = (
            -1
        )  # up to this step, checkpoints are known to be good by the steps after them
        self._best: set[int] = set()  # the steps of the best evaluations, by the newest record
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
        """Whether `minutes` have passed since the last save by this process's clock, if there is
        such a limit."""
        return (
            self._config.minutes is not None
            and time.monotonic() - self._last >= 60 * self._config.minutes
        )

    def save(self, step: int, state: PyTree[jax.Array], record: dict[str, Any]) -> bool:
        """Save one step, after any save under way; if `asynchronous`, return as soon as the state
        may be changed or donated.

        The record is strict JSON. Returns False if that step is complete on the disk already; it is
        left alone.

        Raises:
            StorageError: this save, or the one before it, failed. Earlier checkpoints are
                untouched.
            TryAgainError: likewise, because weights are not finite.
        """
        self.wait()
        self._last = time.monotonic()
        if not self._prepare(step):
            return False
        text = json.dumps(record | {"format": FORMAT}, indent=1, sort_keys=True, allow_nan=False)
        names, leaves, _ = _flatten(state)
        arrays = {
            name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
            for name, leaf in zip(names, leaves)
        }
        with self._saving(step):
            # An accelerator's arrays are on the host when this returns. A CPU's are read in place
            # meanwhile, which is as
            # good: jax does not reuse the buffer of a donated array that somebody still reads.
            self._orbax.save(
                self._staging(step) / "arrays", args=ocp.args.PyTreeSave(dict(zip(names, leaves)))
            )
        # Computed while files are written. A process whose save failed has raised by now: here it
        # would wait for its peers, who wait for it in Orbax.
        found = _Found(digests(state), begin_finite(state))
        if jax.process_count() > 1 and jax.default_backend() == "cpu":
            jax.block_until_ready(
                found
            )  # before another program that talks to other processes; see `gather`
        self._newest = step
        self._pending = self._thread.submit(
            self._commit, step, text, arrays, found, next(self._numbers)
        )
        if not self._config.asynchronous:
            self.wait()
        return True

    def restore(
        self,
        abstract_state: PyTree,
        step: int | None = None,
        partial: bool = False,
        check: bool = True,
    ) -> tuple[PyTree, dict[str, Any]]:
        """The arrays of a step, bit for bit as they were saved, laid out as asked for; and its
        record.

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
        if differences := _differences(commit["arrays"], dict(zip(names, leaves)), partial):
            mend = f"Set the config back to that of {path / 'record.json'}, or set run_name to a new name to start afresh."
            raise ConfigError(
                f"{path} holds another state than this config makes:\n{differences}\n{mend}"
            )
        home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = [getattr(leaf, "sharding", None) or home for leaf in leaves]
        stored = [commit["arrays"][name].get("stored", name) for name in names]
        targets = {
            n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
            for n, x, s in zip(stored, leaves, shardings)
        }
        advice = f"Remove or rename {path} to go on from the checkpoint before it."
        digester = Digester(sum(target.size * target.dtype.itemsize for target in targets.values()))
        # Digests of arrays of many processes need them all, and one may fail to read the next
        # array: not before all have.
        early = digester.add if check and jax.process_count() == 1 else None
        with as_storage_error(f"reading the checkpoint {path}", advice):
            arrays = self._read(path, commit, targets, early)
        found = digester.finish(arrays) if check else {}
        for name, there in zip(names, stored):
            expected = commit["arrays"][name].get("digest")  # steps of format 1 have none
            if check and expected not in (None, found[there]):
                raise DamagedError(
                    path, f"array {name}: digest {expected} was saved, {found[there]} was read"
                )
        if check:
            _require_finite(path, {name: arrays[there] for name, there in zip(names, stored)})
        return jax.tree.unflatten(treedef, [arrays[name] for name in stored]), record

    def require_space(self, abstract_state: PyTree) -> str:
        """A warning if the disk has no space for all checkpoints that are kept at once; empty if it
        has.

        StorageError, in all processes: it has none for one.
        """
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_state))
        place = next(path for path in (self.directory, *self.directory.parents) if path.exists())
        free, more = (
            shutil.disk_usage(place).free,
            max(1, self._config.keep + 1 - len(self.steps())),
        )
        what = (
            f"{place} has {free / 1e9:,.2f} GB free; a checkpoint takes up to {size / 1e9:,.2f} GB"
        )
        error = (
            StorageError(f"{what}. Free space, or set output_dir to another disk.")
            if free < size
            else None
        )
        raise_together(error)
        rule = f"{what}, and checkpoint.keep={self._config.keep} needs {more} more at once"
        return f"{rule}. Free space, or keep fewer." if free < size * more else ""

    def put_aside_incomplete(self) -> list[str]:
        """On process 0, renames the steps that `steps` passes over, so that everybody sees it; a
        line about each."""
        lines = []
        for step, why in survey(self.directory).items() if jax.process_index() == 0 else ():
            if why:
                with contextlib.suppress(StorageError):  # it does not count either way
                    rename_aside(self._path(step))
                lines.append(
                    f"{self._path(step)} is no checkpoint: {why}. It is put aside; nothing goes on from it."
                )
        return lines

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: the run goes on from this one on another way.

        StorageError, in all processes: one can't be removed.
        """
        self.wait()
        error = None
        try:
            with as_storage_error(
                f"removing steps after {step} of {self.directory}",
                "Permit that, then run the same command again.",
            ):
                for later in (
                    [later for later in self.steps() if later > step]
                    if jax.process_index() == 0
                    else ()
                ):
                    self._remove(later)
        except StorageError as problem:
            error = problem
        raise_together(error)  # and return when process 0 is here
        if self._second and jax.process_index() == 0:
            self._second.discard_after(step)

    def copy_newest(self) -> None:
        """Has the second directory, if there is one, look for a step that it lacks; returns at
        once."""
        if self._second and jax.process_index() == 0:
            self._second.offer()

    def settle(self, seconds: float) -> str:
        """Waits so long for copies under way; on process 0 a warning if the newest step is not in
        the second directory then."""
        if not self._second:
            return ""
        settled = jax.process_index() != 0 or self._second.settle(seconds)
        await_first(
            f"settled/{next(self._numbers)}", seconds + 60
        )  # the end of others would end process 0 as well
        if settled:
            return ""
        target, source = self._second.target, self._path(self.latest() or 0)
        return f"{target} lacks the newest checkpoint. `maxtrain checkpoint copy {source} {target}` copies it."

    def wait(self) -> None:
        """Return when the last save is complete on the disk, for all processes.

        Raises:
            StorageError: it failed, here or in another process (noticed after Orbax's limit of 20
                minutes).
        """
        pending, self._pending = self._pending, None
        failure = pending.exception() if pending else None
        if pending and jax.process_count() > 1:
            failed = [
                process
                for process, said in enumerate(gather({"failed": failure is not None}))
                if said["failed"]
            ]
            if failed and failure is None:
                failure = StorageError(
                    f"saving to {self.directory} failed in process {failed[0]}. See its message there."
                )
        if failure:
            raise failure

    def abandon(self, seconds: float = 1.0) -> None:
        """Wait so long for the last save, and then leave it and its copy as they are: it may be
        waiting for a lost process."""
        pending, self._pending = self._pending, None
        concurrent.futures.wait([pending] if pending else [], seconds)
        self._abandoned = True

    def close(self) -> None:
        """Finish this process's part of the last save, and end the background thread; raises
        StorageError if it failed here."""
        pending, self._pending = self._pending, None
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
        """Path, commit record and caller's record of a complete step (None: the newest) of a format
        that we know."""
        self.wait()
        found, whole = survey(self.directory), complete(self.directory, self.second)
        if not whole:
            lines = "".join(f"\n  {self._path(bad)}: {why}." for bad, why in found.items())
            raise StorageError(
                f"{self.directory} has no complete checkpoint.{lines} Check the path, or train from the start."
            )
        step = max(whole) if step is None else step
        path = whole.get(step)
        if path is None:
            why, known = found.get(step, "there is no such step"), ", ".join(map(str, whole))
            problem = (
                f"{self._path(step)} is not a complete checkpoint: {why}. Complete steps: {known}"
            )
            raise StorageError(f"{problem}. Ask for one of these.")
        commit = read_commit(path)
        if commit["format"] > FORMAT:
            rule = f"has format {commit['format']}, written by {commit.get('versions')}; this version reads up to {FORMAT}"
            raise StorageError(
                f"{path} {rule}. Upgrade maxtrain, or remove that step to go on from the one before it."
            )
        return path, *read_step(path)

    def _prepare(self, step: int) -> bool:
        """Whether this step is to be saved, as process 0 sees it, which makes room for it;
        StorageError in all processes."""
        there, error = False, None
        try:
            with self._saving(step):
                there = jax.process_index() == 0 and step in self.steps()
                if jax.process_index() == 0 and not there:
                    for leftover in self.directory.glob(
                        ".*.partial"
                    ):  # of a process that was killed
                        shutil.rmtree(leftover, ignore_errors=True)
                    self._staging(step).mkdir(parents=True)
        except StorageError as problem:
            error = problem
        raise_together(error)
        chief, *_ = gather({"there": there})  # a shared file system may tell others late
        return not chief["there"]

    def _remove(self, step: int) -> None:
        remove_step(self._path(step), lambda: failpoints.hit("during_removal", step))

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
        what, error, arrays = "", None, None
        try:
            arrays, what = read_plain(path, commit["files"], targets, arrived)
            if arrays is None and not what:
                what = find_damage(path, commit["files"], jax.process_index(), jax.process_count())
        except OSError as problem:
            error = StorageError(
                f"reading {path} failed: {problem}. Mend access, then run the same command again."
            )
        raise_together(error)
        if jax.process_count() > 1:
            what = next(
                (theirs["what"] for theirs in gather({"what": what[:900]}, 4096) if theirs["what"]),
                "",
            )
        if what:
            raise DamagedError(path, what)
        if arrays is None:
            how = ocp.args.PyTreeRestore(
                targets, ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=True
            )
            arrays = self._orbax.restore(path / "arrays", args=how)
        return arrays

    def _saving(self, step: int) -> contextlib.AbstractContextManager[None]:
        advice = "Earlier checkpoints are untouched. Free space or permit writing there, then run the same command again."
        return as_storage_error(
            f"saving step {step} to {self.directory}", advice, self._staging(step)
        )

    def _commit(
        self,
        step: int,
        record: str,
        arrays: dict[str, dict[str, Any]],
        found: "_Found",
        number: int,
    ) -> None:
        """In the background: when the arrays are written, write the rest, make it a checkpoint, and
        retire old ones.

        Every process hashes the files that it wrote. `number` counts the saves.
        """
        with self._saving(step):
            self._orbax.wait_until_finished()
            failpoints.hit("during_save", step)
            staging, path = self._staging(step), self._path(step)
            finite = dict(zip(arrays, jax.device_get(found.finite).tolist(), strict=True))
            self._refuse_non_finite(step, finite)
            if jax.process_index() == 0:
                (staging / "record.json").write_text(record, encoding="utf-8")
            entries = sorted(staging.rglob("*"))
            names = [entry.relative_to(staging).as_posix() for entry in entries if entry.is_file()]
            mine = hash_files(
                staging, [name for name in names if _writer(name) == jax.process_index()]
            )
            said = report(f"checkpoint/{number}", json.dumps(mine))
            if jax.process_index() != 0:
                return
            files = {name: entry for theirs in said for name, entry in json.loads(theirs).items()}
            for name, digest in by_name(list(arrays), found.digests).items():
                arrays[name] |= {"digest": digest, "finite": finite[name]}
            commit = {"format": FORMAT, "step": step, "versions": _VERSIONS, "arrays": arrays}
            commit["files"] = {name: files[name] for name in names}
            sync(*entries)
            failpoints.hit("before_commit", step)
            (staging / "commit.json").write_bytes(encode_commit(commit))
            sync(staging / "commit.json", staging)
            if path.exists():  # but is no complete checkpoint: `save` looked
                rename_aside(path)
            os.rename(staging, path)
            sync(self.directory)
            failpoints.hit("after_commit", step, path)
        self._on_commit(step)
        self._best = {mark["step"] for mark in json.loads(record).get("best", {}).values()}
        self._retire()
        self.copy_newest()

    def _refuse_non_finite(self, step: int, finite: dict[str, bool]) -> None:
        """TryAgainError, in all processes, if arrays that must be finite are not: what is being
        written never counts."""
        bad = [name for name, is_finite in finite.items() if must_be_finite(name) and not is_finite]
        if not bad:
            return
        if jax.process_index() == 0:
            shutil.rmtree(self._staging(step), ignore_errors=True)
        listed = ", ".join(bad[:5]) + (f" and {len(bad) - 5:,} more" if len(bad) > 5 else "")
        rule = f"step {step:,} is not saved: {listed} not finite, although every update was"
        mend = "Run the same command again: it goes on from the last checkpoint. If it comes again, test this machine's memory"
        raise TryAgainError(f"{rule}. That is a fault of memory or of a device. {mend}.")

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
        """Removes the steps that the config does not keep. One that can't be removed is told of,
        and stays."""
        try:
            for step in self._superfluous():
                self._remove(step)
        except (OSError, RuntimeError) as error:
            what = f"removing old checkpoints from {self.directory} failed ({error})"
            print(
                f"WARNING: {what}. Training goes on; they take space until they are removed.",
                file=sys.stderr,
                flush=True,
            )

    def _superfluous(self) -> list[int]:
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


class _Found(NamedTuple):
    """What a device finds out of the arrays that are saved, in their order."""

    digests: UInt32[Array, "leaves 2"]
    finite: Bool[Array, " leaves"]


def _require_finite(path: Path, arrays: dict[str, jax.Array]) -> None:
    """DamagedError: a step holds weights that are not finite."""
    checked = {name: array for name, array in arrays.items() if must_be_finite(name)}
    if checked and (bad := non_finite_names(checked)):
        more = f", and {len(bad) - 1:,} arrays more" if len(bad) > 1 else ""
        raise DamagedError(path, f"array {bad[0]} holds NaN or infinity{more}")


def put_aside(damage: DamagedError) -> None:
    """Renames a step that `restore` found damaged, and returns when all processes may look for the
    one before it.

    For all processes together. StorageError: it can't be renamed.
    """
    error, path = None, damage.path
    if jax.process_index() == 0:
        try:
            aside = rename_aside(path).name
            text = f"{path} is damaged: {damage.what}.\nIt is put aside as {aside}; the run goes on from the checkpoint before it."
            print(f"WARNING: {text}", file=sys.stderr, flush=True)
        except StorageError as problem:
            error = problem
    raise_together(error)


def _flatten(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Names such as `params.layers.0.mlp.up.kernel`, leaves, and the tree's definition."""
    leaves, treedef = jax.tree.flatten(tree)
    names = leaf_names(tree)
    assert len(set(names)) == len(names), "two leaves have the same name"
    return names, leaves, treedef


def _differences(saved: dict[str, dict], wanted: dict[str, Any], partial: bool) -> str:
    """A table of the arrays that differ, empty if there are none."""
    there = {name: f"{array['dtype']}{array['shape']}" for name, array in saved.items()}
    here = {name: f"{array.dtype}{list(array.shape)}" for name, array in wanted.items()}
    names = sorted(
        name for name in (here if partial else here | there) if here.get(name) != there.get(name)
    )
    table = [
        ("array", "checkpoint", "this run"),
        *((n, there.get(n, "missing"), here.get(n, "missing")) for n in names[:40]),
    ]
    return (
        "\n".join(aligned(table) + [f"    ... and {len(names) - 40} more"] * (len(names) > 40))
        if names
        else ""
    )


def _writer(name: str) -> int:
    """The process that wrote a file of a step directory, by the names that Orbax gives; what it
    merges is by process 0."""
    found = re.match(r"arrays/ocdbt\.process_(\d+)/", name)
    return int(found[1]) if found else 0


def _not_of_orbax(record: logging.LogRecord) -> bool:
    """Leaves out what Orbax logs, and asyncio of its writes after the first that failed: tracebacks
    of what is raised here."""
    return "orbax" not in (record.getMessage() if record.name == "asyncio" else record.pathname)


def _without_late_writes(before: Callable[[Any], object]) -> Callable[[Any], object]:
    """A hook for exceptions that nobody can catch, without those of writes that end after another
    one has failed.

    They report to Orbax's event loop, which is gone by then: a page of tracebacks beside the one
    message that counts.
    """

    def hook(unraisable: Any) -> None:
        if not (
            isinstance(unraisable.exc_value, RuntimeError)
            and str(unraisable.exc_value) == "Event loop is closed"
        ):
            before(unraisable)

    hook.__name__ = _without_late_writes.__name__
    return hook
