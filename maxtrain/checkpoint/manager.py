"""Checkpoints of a run: one directory for each step, which counts only when it is whole.

    DIRECTORY/00001000/arrays/       every leaf of the state as a global array (Orbax), readable onto any mesh
    DIRECTORY/00001000/record.json   what the caller saves beside it: data cursor, fingerprints, config
    DIRECTORY/00001000/commit.json   format, versions, shape and dtype of every array, size of every file: written last

A step is prepared in `.00001000.partial`, which gets its commit record when everything else is on the disk, and then its
name by one rename. So a process killed at any instant leaves either a whole step or none. A directory that came to its
name some other way (empty, half copied, half removed) lacks the commit record or a file that it lists, and is passed over.
Orbax itself asks for nothing of this on a local disk.

The entries of the commit record are objects, one for each array and file: digests and hashes can be added to them and
checked where `_defect` checks sizes. In a job of several processes all of them call every method, in the same order.
"""

import concurrent.futures
import contextlib
import datetime
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jaxtyping import PyTree

import maxtrain
from data_pipeline.errors import ConfigError, StorageError, UserError
from maxtrain.config.schema import CheckpointConfig

FORMAT = 1
_TABLE_ROWS = 40
_VERSIONS = {"maxtrain": maxtrain.__version__, "jax": jax.__version__, "orbax": ocp.__version__, "numpy": np.__version__}


class Checkpoints:
    """The checkpoints below one directory: saving, finding, restoring, and removing what is no longer kept.

    Args:
        directory: where the step directories are; made when the first one is saved.
        config: how many are kept, and whether arrays are written in the background.
    """

    def __init__(self, directory: str | Path, config: CheckpointConfig):
        self.directory = Path(directory).expanduser().absolute()
        self._config = config
        self._orbax = ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future | None = None

    def steps(self) -> list[int]:
        """All complete steps in ascending order, read from the disk."""
        return [step for step in self._candidates() if _defect(self._path(step)) is None]

    def latest(self) -> int | None:
        """The newest complete step, read from the disk; None if there is none."""
        return next((step for step in reversed(self._candidates()) if _defect(self._path(step)) is None), None)

    def save(self, step: int, state: PyTree[jax.Array], record: dict[str, Any]) -> bool:
        """Save one step; with `asynchronous`, return as soon as the state may be changed or donated.

        On an accelerator the arrays are on the host by then. On a CPU the writer reads the arrays in place, and jax does
        not reuse a donated buffer while it is read. A save still under way is waited for first.

        Args:
            step: number of finished optimizer steps.
            state: arrays, on any mesh.
            record: strict JSON, saved beside the arrays.

        Returns:
            False if that step is complete on the disk already; it is left alone.

        Raises:
            StorageError: this save, or the one before it, failed. Earlier checkpoints are untouched.
        """
        self.wait()
        if step in self.steps():
            return False
        names, leaves, _ = _flatten(state)
        text = json.dumps(record, indent=1, sort_keys=True, allow_nan=False)
        specs = {name: {"shape": list(leaf.shape), "dtype": str(leaf.dtype)} for name, leaf in zip(names, leaves)}
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        commit = {"format": FORMAT, "step": step, "time": now, "versions": _VERSIONS, "arrays": specs}
        with self._saving(step):
            if jax.process_index() == 0:
                for leftover in self.directory.glob(".*.partial"):  # of a process that was killed
                    shutil.rmtree(leftover)
                self._staging(step).mkdir(parents=True)
            self._orbax.save(self._staging(step) / "arrays", args=ocp.args.PyTreeSave(dict(zip(names, leaves))))
        self._pending = self._thread.submit(self._commit, step, text, commit)
        if not self._config.asynchronous:
            self.wait()
        return True

    def read_record(self, step: int | None = None) -> dict[str, Any]:
        """The record saved with a step, without its arrays.

        Args:
            step: None for the newest complete one.

        Raises:
            StorageError: there is no such checkpoint, it is not whole, or it was written by a newer version.
        """
        return self._open(step)[1]

    def restore(self, abstract_state: PyTree, step: int | None = None, partial: bool = False) -> tuple[PyTree, dict[str, Any]]:
        """Read a step into arrays laid out as asked for, bit for bit as they were saved.

        Args:
            abstract_state: tree of ShapeDtypeStructs (or arrays) with the tree, shapes and dtypes of the saved state, and
                shardings of any mesh. A leaf without a sharding is put on this process's first device.
            step: None for the newest complete one.
            partial: the checkpoint may hold more leaves than asked for (say, the optimizer's); they are not read.

        Returns:
            The state, and the record that was saved with it.

        Raises:
            ConfigError: the state differs from the saved one; the message has a table. Nothing is padded, truncated or cast.
            StorageError: there is no such checkpoint, it is not whole, unreadable, or written by a newer version.
        """
        path, record, commit = self._open(step)
        names, leaves, treedef = _flatten(abstract_state)
        differences = _differences(commit["arrays"], dict(zip(names, leaves)), partial)
        if differences:
            raise ConfigError(
                f"the checkpoint {path} holds another state than this config makes, and nothing is ever padded, truncated or "
                f"cast:\n{differences}\nSet the config back to the one saved in {path / 'record.json'}, or set run_name to a "
                "new name to start afresh."
            )
        home = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shardings = [getattr(leaf, "sharding", None) or home for leaf in leaves]
        targets = {n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for n, x, s in zip(names, leaves, shardings)}
        how = ocp.args.PyTreeRestore(targets, ocp.checkpoint_utils.construct_restore_args(targets), partial_restore=partial)
        advice = f"Remove or rename {path} to go on from the checkpoint before it."
        with _as_storage_error(f"reading the checkpoint {path}", advice):
            arrays = self._orbax.restore(path / "arrays", args=how)
        return jax.tree.unflatten(treedef, [arrays[name] for name in names]), record

    def wait(self) -> None:
        """Return when the last save is complete on the disk, on all processes.

        Raises:
            StorageError: it failed, here or in another process. Earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        failure = pending.exception()
        if jax.process_count() > 1:
            failed = np.flatnonzero(multihost_utils.process_allgather(np.array(failure is not None)))
            if failed.size and failure is None:
                failure = StorageError(
                    f"saving to {self.directory} failed in process {failed[0]}. See the message of that process."
                )
        if failure is not None:
            raise failure

    def close(self) -> None:
        """Wait, then end the background thread.

        Raises:
            StorageError: the last save failed.
        """
        try:
            self.wait()
        finally:
            self._thread.shutdown()
            self._orbax.close()

    def _path(self, step: int) -> Path:
        return self.directory / f"{step:08d}"

    def _staging(self, step: int) -> Path:
        return self.directory / f".{step:08d}.partial"

    def _candidates(self) -> list[int]:
        """Steps that have a directory, complete or not, in ascending order."""
        names = (path.name for path in self.directory.glob("*") if path.name.isdecimal())
        return sorted(int(name) for name in names if self._path(int(name)).name == name)

    def _open(self, step: int | None) -> tuple[Path, dict[str, Any], dict[str, Any]]:
        """Path, record and commit record of a complete step of a format that we know."""
        self.wait()
        step = self.latest() if step is None else step
        if step is None:
            found = [f"\n  {self._path(other)}: {_defect(self._path(other))}" for other in self._candidates()]
            found = "".join(found) or " It holds no step directory at all."
            raise StorageError(f"{self.directory} has no complete checkpoint.{found}\nCheck the path, or train from the start.")
        path = self._path(step)
        if defect := _defect(path):
            known = ", ".join(map(str, self.steps())) or "none"
            raise StorageError(f"{path} is not a complete checkpoint: {defect}. Complete steps: {known}. Ask for one of these.")
        with _as_storage_error(f"reading {path}", "Check the file's permissions."):
            commit = json.loads((path / "commit.json").read_text(encoding="utf-8"))
            if commit["format"] > FORMAT:
                raise StorageError(
                    f"{path} has format {commit['format']} (maxtrain {commit.get('versions', {}).get('maxtrain', 'unknown')}); "
                    f"this version reads up to {FORMAT}. Upgrade maxtrain, or remove that step to go on from the one before it."
                )
            return path, json.loads((path / "record.json").read_text(encoding="utf-8")), commit

    @contextlib.contextmanager
    def _saving(self, step: int) -> Iterator[None]:
        """On failure remove what was written of this step (its space is needed) and raise a StorageError."""
        advice = "Earlier checkpoints are untouched. Free space or permit writing there, then run the same command again."
        with _as_storage_error(f"saving step {step} to {self.directory}", advice):
            try:
                yield
            except BaseException:
                shutil.rmtree(self._staging(step), ignore_errors=True)
                raise

    def _commit(self, step: int, record: str, commit: dict[str, Any]) -> None:
        """In the background: when the arrays are written, write the rest, make it a checkpoint, and retire old ones."""
        with self._saving(step):
            self._orbax.wait_until_finished()
            if jax.process_index() != 0:
                return
            staging, path = self._staging(step), self._path(step)
            (staging / "record.json").write_text(record, encoding="utf-8")
            files = sorted(entry for entry in staging.rglob("*") if entry.is_file())
            commit["files"] = {file.relative_to(staging).as_posix(): {"bytes": file.stat().st_size} for file in files}
            for entry in (*staging.rglob("*"), staging):
                _sync(entry)
            (staging / "commit.json").write_text(json.dumps(commit, indent=1), encoding="utf-8")
            _sync(staging / "commit.json")
            _sync(staging)
            if path.exists():  # `save` saw that it is not a complete checkpoint
                _remove(path)
            os.rename(staging, path)
            _sync(self.directory)
            self._retire()

    def _retire(self) -> None:
        """Remove complete steps that are neither among the newest `keep` nor multiples of `keep_every`."""
        every = self._config.keep_every
        for step in self.steps()[: -self._config.keep]:
            if every is None or step % every:
                _remove(self._path(step))


def _flatten(tree: PyTree) -> tuple[list[str], list[Any], Any]:
    """Names such as `params.layers.kernel`, leaves, and the tree's definition."""
    flat, treedef = jax.tree_util.tree_flatten_with_path(tree)
    # Flax variables are tree nodes whose only child is `value`.
    names = [jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value") for path, _ in flat]
    assert len(set(names)) == len(names), "two leaves have the same name"
    return names, [leaf for _, leaf in flat], treedef


def _differences(saved: dict[str, dict], wanted: dict[str, Any], partial: bool) -> str:
    """A table of the arrays that differ, empty if there are none."""
    rows = []
    for name in sorted(saved.keys() | wanted.keys()):
        there = (tuple(saved[name]["shape"]), saved[name]["dtype"]) if name in saved else None
        here = (tuple(wanted[name].shape), str(wanted[name].dtype)) if name in wanted else None
        if there == here or (here is None and partial):
            continue
        if there is None or here is None:
            what = "missing in the checkpoint" if there is None else "extra in the checkpoint"
        else:
            what = " and ".join(f"other {part}" for part, a, b in zip(("shape", "dtype"), there, here) if a != b)
        rows.append((what, name, *(f"{spec[1]}{list(spec[0])}" if spec else "-" for spec in (there, here))))
    if not rows:
        return ""
    table = [("difference", "array", "checkpoint", "this run"), *sorted(rows)[:_TABLE_ROWS]]
    widths = [max(len(row[i]) for row in table) for i in range(4)]
    lines = ["    " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table]
    hidden = len(rows) - _TABLE_ROWS
    return "\n".join(lines + ([f"    ... and {hidden} more"] if hidden > 0 else []))


def _defect(path: Path) -> str | None:
    """Why a step directory is not a complete checkpoint; None if it is one."""
    try:
        commit = json.loads((path / "commit.json").read_text(encoding="utf-8"))
        version, step = commit["format"], commit["step"]
        # Only a newer version knows how to check its own format; the step still exists, and restoring it is refused.
        files = commit["files"] if version <= FORMAT else {}
    except FileNotFoundError:
        return "commit.json is missing, so it was never finished or not copied whole"
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"commit.json is not readable ({error})"
    if step != int(path.name):
        return f"it is a copy of step {step}"
    for name, entry in files.items():
        try:
            size = (path / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if size != entry["bytes"]:
            return f"{name} has {size:,} bytes instead of {entry['bytes']:,}"
    return None


def _remove(path: Path) -> None:
    """Remove a step directory; it stops being a checkpoint first, so that it is never taken for one half way."""
    (path / "commit.json").unlink(missing_ok=True)
    shutil.rmtree(path)


def _sync(path: Path) -> None:
    """Have the kernel put a file, or the entries of a directory, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _as_storage_error(doing: str, advice: str) -> Iterator[None]:
    """Turn what Orbax, its array store and the operating system raise into one error with a mend."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise StorageError(f"{doing} failed: {first_line[:300]}. {advice}") from error
