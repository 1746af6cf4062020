"""Wrong arithmetic or memory that no device reports: copies of an array that differ, and a step
that does not repeat.

Every device digests its own part of every array. What several devices hold a copy of must be the
same on all of them, and the same step, made twice from the same state, must give the same bits on
each.
"""

import functools
import platform
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from data_pipeline.errors import TryAgainError
from maxtrain.config.schema import IntegrityConfig
from maxtrain.ops.digest import compiler_options, digest, leaf_names
from maxtrain.parallel.agreement import gather

_MOST = 8  # findings that are told


class Integrity:
    """The checks of a run, called by all processes after the same steps.

    Args:
        config: how often.
        mesh: on which all arrays lie.
    """

    def __init__(self, config: IntegrityConfig, mesh: Mesh):
        self._config, self._mesh = config, mesh

    def repeat(
        self, step: int, program: Callable[..., Any], state: PyTree, batch: PyTree
    ) -> np.ndarray | None:
        """If it is time: what the step that ends as number `step` makes of a copy of this state;
        for `check`."""
        interval = self._config.repeat_interval
        return (
            device_digests(program(_copy(state), batch)[0])
            if interval and step % interval == 0
            else None
        )

    def check(
        self, step: int, state: PyTree, repeated: np.ndarray | None = None, save: bool = False
    ) -> None:
        """Looks at the state after a step, if it is time, or if it is about to be saved.

        Raises:
            TryAgainError: it is not what it should be; names devices and arrays.
        """
        interval, found = self._config.replicas_interval, []
        due = interval and (save or step % interval == 0)
        words = device_digests(state) if due or repeated is not None else None
        if words is None:
            return
        if repeated is not None:
            found = unrepeated(state, repeated, words)
            rule = f"step {step:,}, made twice from the same state, gave different bits"
        if due and not found:
            found = differing_copies(state, words)
            rule = f"copies of arrays differ between devices after step {step:,}"
        if found:
            hosts = [said["host"] for said in gather({"host": platform.node()[:200]})]
            lines = [f"\n  * {what} on {_place(device, hosts)}" for what, device in found[:_MOST]]
            more = f"\n  * and {len(found) - _MOST:,} more" if len(found) > _MOST else ""
            mend = "Run the same command again: it goes on from the last checkpoint. If a device is named again, take it out"
            raise TryAgainError(
                f"{rule}: wrong arithmetic or memory.{''.join(lines)}{more}\nNothing of it is saved. {mend}."
            )


def device_digests(tree: PyTree[Array]) -> np.ndarray:
    """The digest of each device's own part of each leaf: uint32 [devices, leaves, 2], in the order
    of their mesh."""
    leaves = jax.tree.leaves(tree)
    return np.asarray(
        _program(leaves[0].sharding.mesh, tuple(leaf.sharding.spec for leaf in leaves))(leaves)
    )


def differing_copies(tree: PyTree[Array], words: np.ndarray) -> list[tuple[str, Any]]:
    """Name and device of each copy of a part of a leaf that is not what most copies are; if there
    is no most, of all."""
    leaves, found = jax.tree.leaves(tree), []
    for number, (name, leaf) in enumerate(zip(leaf_names(tree), leaves, strict=True)):
        parts, places = (
            defaultdict[str, list[tuple[Any, tuple[int, ...]]]](list),
            leaf.sharding.devices_indices_map(leaf.shape),
        )
        for device, said in zip(
            leaf.sharding.mesh.devices.flat, words[:, number].tolist(), strict=True
        ):
            parts[str(places[device])].append((device, tuple(said)))
        for copies in parts.values():
            ((usual, count), *_) = Counter(said for _, said in copies).most_common()
            clear = 2 * count > len(copies)
            found += [
                (name, device)
                for device, said in copies
                if count < len(copies) and (said != usual or not clear)
            ]
    return found


def unrepeated(tree: PyTree[Array], first: np.ndarray, second: np.ndarray) -> list[tuple[str, Any]]:
    """Name and device of each part of a leaf that has two digests."""
    names, devices = leaf_names(tree), [*jax.tree.leaves(tree)[0].sharding.mesh.devices.flat]
    return [
        (names[leaf], devices[device])
        for device, leaf in np.argwhere((first != second).any(-1)).tolist()
    ]


def _place(device: Any, hosts: Sequence[str]) -> str:
    return f"{device} of process {device.process_index} on {hosts[device.process_index]}"


@functools.cache
def _program(mesh: Mesh, specs: tuple[PartitionSpec, ...]) -> jax.stages.Wrapped:
    def own(leaves: list[Array]) -> Array:
        return jnp.stack([digest(leaf) for leaf in leaves])[None]

    apart = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=([*specs],),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(
        apart,
        out_shardings=everywhere,
        compiler_options=compiler_options(mesh.devices.flat[0].platform),
    )


@jax.jit
def _copy(tree: PyTree[Array]) -> PyTree[Array]:
    """Buffers of their own, for a program that its arguments are donated to."""
    return jax.tree.map(jnp.copy, tree)
