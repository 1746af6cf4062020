"""Arrays that lie in the memory of a host, and are fetched to its devices by programs.

Source: jax's memory kinds, https://docs.jax.dev/en/latest/notebooks/host-offloading.html.
"""

from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from data_pipeline.errors import ConfigError

# Pages that the system never moves, so that devices read and write them by themselves.
_KIND = "pinned_host"


def require_host_memory(mesh: Mesh, key: str) -> None:
    """ConfigError: devices of this kind can't read the memory of their hosts, as `key` asks.

    GPUs that are described to the compiler, and are not here, name no memories: what was placed in
    one would lie on devices without a word.
    """
    try:
        found = NamedSharding(mesh, PartitionSpec(), memory_kind=_KIND).memory_kind
    except ValueError:
        found = None
    if found != _KIND:
        kind = mesh.devices.flat[0].device_kind
        raise ConfigError(
            f"{key}=true needs memory of the kind {_KIND}, and {kind} names none; GPUs that are "
            f"described, and are not here, never do. Set {key}=false."
        )


def on_hosts(tree: PyTree) -> PyTree:
    """An abstract tree whose arrays lie in the memory of hosts, split as they were; single numbers
    stay on devices."""

    def place(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        if x.ndim == 0:
            return x
        assert isinstance(x.sharding, NamedSharding)
        there = x.sharding.with_memory_kind(_KIND)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)

    return jax.tree.map(place, tree)


def is_on_host(x: Any) -> bool:
    """Whether an array lies in the memory of a host: one at rest, described, or inside jit."""
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return x.sharding is not None and x.sharding.memory_kind == _KIND


def on_device(x: Array) -> Array:
    """The array on its devices, where it lies on a host; else itself."""
    if not is_on_host(x):
        return x
    return jax.device_put(x, jax.memory.Space.Device)


def where_it_was(x: Array, before: Array) -> Array:
    """A new array in the memory in which the one before it lies; inside jit."""
    if not is_on_host(before):
        return x
    return jax.device_put(x, jax.memory.Space.Host)
