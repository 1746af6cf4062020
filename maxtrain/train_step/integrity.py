"""Detection of silent data corruption: replicas that differ, and steps that do not repeat.

Every device digests its own shard of every array. Replicas must have equal digests on all devices,
and a step repeated from the same state must give the same bits on each device.
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

from data_pipeline.base.errors import TryAgainError
from maxtrain.config.schema import IntegrityConfig
from maxtrain.ops.digest import compiler_options, digest_of, leaf_names
from maxtrain.parallel.agreement import gather
from maxtrain.parallel.host_memory import layer_of, lies_in_layers, on_device, where_it_was

# Most findings that a message lists.
_MOST = 8


class Integrity:
    """The integrity checks of a run, called by all processes after the same steps.

    Args:
        config: the intervals of the checks.
        mesh: the mesh of all arrays.
    """

    def __init__(self, config: IntegrityConfig, mesh: Mesh):
        self._config = config
        self._mesh = mesh

    def repeat(
        self, step: int, program: Callable[..., Any], state: PyTree, batch: PyTree
    ) -> np.ndarray | None:
        """Make step number `step` from a copy of this state if a repetition is due, and return the
        digests of the result.

        `check` compares them with the step itself. Returns None if no repetition is due.
        """
        interval = self._config.repeat_interval
        if not interval or step % interval != 0:
            return None
        repeated, *_ = program(_copy(state), batch)
        return device_digests(repeated)

    def check(
        self, step: int, state: PyTree, repeated: np.ndarray | None = None, save: bool = False
    ) -> None:
        """Check the state after a step, if that is due or the state is about to be saved.

        Raises:
            TryAgainError: digests differ. The message names devices and arrays.
        """
        interval = self._config.replicas_interval
        due = interval and (save or step % interval == 0)
        if not due and repeated is None:
            return
        words = device_digests(state)
        found = []
        if repeated is not None:
            found = unrepeated(state, repeated, words)
            rule = f"step {step:,}, made twice from the same state, gave different bits"
        if due and not found:
            found = differing_copies(state, words)
            rule = f"copies of arrays differ between devices after step {step:,}"
        if found:
            raise TryAgainError(_finding(rule, found))


def _finding(rule: str, found: Sequence[tuple[str, Any]]) -> str:
    """Build the error message. All processes call this together."""
    hosts = [report["host"] for report in gather({"host": platform.node()[:200]})]
    lines = [f"\n  * {what} on {_place(device, hosts)}" for what, device in found[:_MOST]]
    if len(found) > _MOST:
        lines.append(f"\n  * and {len(found) - _MOST:,} more")
    return (
        f"{rule}: wrong arithmetic or memory.{''.join(lines)}\n"
        "Nothing of it is saved. "
        "Run the same command again: it goes on from the last checkpoint. "
        "If a device is named again, take it out."
    )


def device_digests(tree: PyTree[Array]) -> np.ndarray:
    """Digest each device's own shard of each leaf: uint32 [devices, leaves, 2].

    Devices are in the order of their mesh.
    """
    leaves = jax.tree.leaves(tree)
    specs = tuple(leaf.sharding.spec for leaf in leaves)
    in_layers = tuple(map(lies_in_layers, leaves))
    program = _program(leaves[0].sharding.mesh, specs, in_layers)
    return np.asarray(program(leaves))


def differing_copies(tree: PyTree[Array], words: np.ndarray) -> list[tuple[str, Any]]:
    """List name and device of each replica of a shard that differs from the majority of its
    replicas.

    Without a majority, all replicas are listed.
    """
    leaves = jax.tree.leaves(tree)
    found = []
    for number, (name, leaf) in enumerate(zip(leaf_names(tree), leaves, strict=True)):
        # Maps each shard to the devices that hold it, with their digests.
        parts = defaultdict[str, list[tuple[Any, tuple[int, ...]]]](list)
        places = leaf.sharding.devices_indices_map(leaf.shape)
        devices = leaf.sharding.mesh.devices.flat
        for device, digest in zip(devices, words[:, number].tolist(), strict=True):
            parts[str(places[device])].append((device, tuple(digest)))
        for copies in parts.values():
            (usual, count), *_ = Counter(digest for _, digest in copies).most_common()
            if count == len(copies):
                continue
            is_most = 2 * count > len(copies)
            for device, digest in copies:
                if digest != usual or not is_most:
                    found.append((name, device))
    return found


def unrepeated(tree: PyTree[Array], first: np.ndarray, second: np.ndarray) -> list[tuple[str, Any]]:
    """List name and device of each shard of a leaf whose two digests differ."""
    names = leaf_names(tree)
    leaves = jax.tree.leaves(tree)
    devices = list(leaves[0].sharding.mesh.devices.flat)
    different = np.argwhere((first != second).any(-1)).tolist()
    return [(names[leaf], devices[device]) for device, leaf in different]


def _place(device: Any, hosts: Sequence[str]) -> str:
    """Describe a device with its process and host."""
    return f"{device} of process {device.process_index} on {hosts[device.process_index]}"


@functools.cache
def _program(
    mesh: Mesh, specs: tuple[PartitionSpec, ...], in_layers: tuple[bool, ...]
) -> jax.stages.Wrapped:
    def own(leaves: list[Array]) -> Array:
        return jnp.stack(list(map(digest_of, leaves, in_layers)))[None]

    apart = jax.shard_map(
        own,
        mesh=mesh,
        in_specs=([*specs],),
        out_specs=PartitionSpec(mesh.axis_names),
        check_vma=False,
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    options = compiler_options(mesh.devices.flat[0].platform)
    return jax.jit(apart, out_shardings=everywhere, compiler_options=options)


def _copy(tree: PyTree[Array]) -> PyTree[Array]:
    """Copy all arrays to buffers of their own, for a program that donates its arguments."""
    leaves, structure = jax.tree.flatten(tree)
    in_layers = tuple(map(lies_in_layers, leaves))
    return jax.tree.unflatten(structure, _copies(leaves, in_layers))


@functools.partial(jax.jit, static_argnums=1)
def _copies(leaves: list[Array], in_layers: tuple[bool, ...]) -> list[Array]:
    def copy(x: Array, in_layers: bool) -> Array:
        if not in_layers:
            return where_it_was(jnp.copy(on_device(x)), x)

        def of_layer(layer: Array) -> Array:
            return where_it_was(on_device(layer_of(x, layer))[0], x)

        return jax.lax.map(of_layer, jnp.arange(x.shape[0]))

    return list(map(copy, leaves, in_layers))
