"""Reading the arrays of a step onto the devices of any mesh, checked on the way.

All processes of a job call these functions, in the same order.
"""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import orbax.checkpoint as ocp

from data_pipeline.base.errors import ConfigError, DamagedError, StorageError
from maxtrain.checkpoint import at_url, frozen_params, peers
from maxtrain.checkpoint.finite import must_be_finite
from maxtrain.checkpoint.integrity import find_damage
from maxtrain.checkpoint.listing import aligned, as_storage_error
from maxtrain.checkpoint.local import is_local
from maxtrain.checkpoint.zarr_reader import Arrived, read_plain
from maxtrain.ops.digest import Digester
from maxtrain.ops.finite import non_finite_names
from maxtrain.parallel.agreement import gather, raise_together


class ArrayDirectory(NamedTuple):
    """A directory with arrays of a step, and its commit record."""

    path: Path
    commit: dict[str, Any]


def require_same(
    parts: Sequence[ArrayDirectory], names: list[str], leaves: list[Any], partial: bool
) -> None:
    """Check that the arrays of a step are the requested ones. ConfigError: they are not; the
    message has a table.

    Args:
        parts: the first is the step itself.
        partial: the step may have more arrays.
    """
    there = {}
    for part in parts:
        there |= part.commit["arrays"]
    differences = _differences(there, dict(zip(names, leaves)), partial)
    if not differences:
        return
    path = parts[0].path
    fix = (
        f"Set the config back to that of {path / 'record.json'}, "
        "or set run_name to a new name to start afresh."
    )
    raise ConfigError(f"{path} holds another state than this config makes:\n{differences}\n{fix}")


def read_parts(
    parts: Sequence[ArrayDirectory],
    targets: dict[str, jax.ShapeDtypeStruct],
    check: bool,
    orbax: ocp.AsyncCheckpointer,
    directory: Path,
) -> dict[str, jax.Array]:
    """The arrays of a step by their names.

    Args:
        targets: the arrays to read, with a sharding each.
        check: hold them against their digests.
        orbax: reads what does not lie in plain files.
        directory: the one that has the steps of the run, for messages.

    Raises:
        DamagedError: files or arrays are not what was saved, or weights are not finite; in all
            processes.
        StorageError: they can't be read.
    """
    arrays = {}
    for part in parts:
        of_part = {name: x for name, x in targets.items() if name in part.commit["arrays"]}
        if not of_part:
            continue
        advice = f"Remove or rename {part.path} to go on from the checkpoint before it."
        if frozen_params.is_store(part.path):
            advice = frozen_params.advice(directory)
        try:
            arrays |= _read_part(part, of_part, check, orbax, advice)
        except DamagedError as damage:
            if not frozen_params.is_store(part.path):
                raise
            raise DamagedError(part.path, damage.what, advice) from damage
    return arrays


def _read_part(
    part: ArrayDirectory,
    targets: dict[str, jax.ShapeDtypeStruct],
    check: bool,
    orbax: ocp.AsyncCheckpointer,
    advice: str,
) -> dict[str, jax.Array]:
    """Arrays of one directory by their names; with `check` held against their digests."""
    entries = part.commit["arrays"]
    digester = Digester(sum(target.size * target.dtype.itemsize for target in targets.values()))
    # Digests of arrays of many processes need them all, and one may fail to read the next
    # array: not before all have.
    early = None
    if check and jax.process_count() == 1:
        early = digester.add
    if is_local(part.path):
        peers.bring(part.path, part.commit["files"], targets)
    with as_storage_error(f"reading the checkpoint {part.path}", advice):
        arrays = _read(part, targets, early, orbax)
    if check:
        found = digester.finish(arrays)
        for name in targets:
            _require_digest(part.path, name, entries[name], found[name])
        _require_finite(part.path, arrays)
    return arrays


def _read(
    part: ArrayDirectory,
    targets: dict[str, jax.ShapeDtypeStruct],
    arrived: Arrived | None,
    orbax: ocp.AsyncCheckpointer,
) -> dict[str, jax.Array]:
    """The arrays of a step; DamagedError in all processes if one finds damage to a file.

    Plain files are checked while they are read; others, of which every process takes a share,
    before Orbax reads them. `arrived` is called with arrays while others are read.
    """
    path = part.path
    arrays = None
    damage = ""
    error = None
    files = part.commit["files"]
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
            f"reading {path} failed: {problem}. Restore access, then run the same command again."
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
        arrays = orbax.restore(path / "arrays", args=how)
    return arrays


def _require_digest(path: Path, name: str, saved: dict[str, Any], found: str) -> None:
    """DamagedError: an array is not what was saved."""
    expected = saved["digest"]
    if expected != found:
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
