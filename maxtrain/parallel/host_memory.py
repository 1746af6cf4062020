"""Arrays that lie in the memory of a host, and are fetched to its devices by programs.

Source: jax's memory kinds, https://docs.jax.dev/en/latest/notebooks/host-offloading.html.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Shaped

from data_pipeline.base.errors import ConfigError

# Pages that the system never moves, so that devices read and write them by themselves.
_KIND = "pinned_host"
# More rows of an array are not taken for layers.
_MOST_LAYERS = 1024


def require_host_memory(mesh: Mesh, setting: str, without: str) -> None:
    """ConfigError: devices of this kind can't read the memory of their hosts, as `setting` asks;
    `without` does not.

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
            f"{setting} needs memory of the kind {_KIND}, and {kind} names none; GPUs that are "
            f"described, and are not here, never do. Set {without}."
        )


def described_on_host(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The description of an array that lies in the memory of hosts, split as it was."""
    assert isinstance(x.sharding, NamedSharding)
    there = x.sharding.with_memory_kind(_KIND)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)


def described_on_device(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """The description of an array, of which it is on its devices that it lies."""
    if not is_on_host(x):
        return x
    assert isinstance(x.sharding, NamedSharding)
    here = NamedSharding(x.sharding.mesh, x.sharding.spec)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here)


def is_on_host(x: Any) -> bool:
    """Return whether an array lies in the memory of a host: one at rest, described, or inside
    jit.
    """
    if isinstance(x, Tracer):
        return jax.typeof(x).memory_space == jax.memory.Space.Host
    return x.sharding is not None and x.sharding.memory_kind == _KIND


def on_device(x: Array) -> Array:
    """The array on its devices, where it lies on a host; else itself."""
    if not is_on_host(x):
        return x
    return jax.device_put(x, jax.memory.Space.Device)


def where_it_was(x: Array, before: Array) -> Array:
    """A new array in the memory in which the one before it lies."""
    if not is_on_host(before):
        return x
    return jax.device_put(x, jax.memory.Space.Host)


def lies_in_layers(x: Any) -> bool:
    """Return whether an array, at rest or described, lies in the memory of hosts as layers that can
    be fetched one after another: the first of its dims is short, and not split.
    """
    if not is_on_host(x) or x.ndim < 3 or x.shape[0] > _MOST_LAYERS:
        return False
    return not x.sharding.spec or x.sharding.spec[0] is None


def by_layer(measure: Callable[..., Shaped[Array, ""]], *stacks: Array) -> Shaped[Array, " layers"]:
    """A number of each layer of arrays that are stacked over layers, of which one at a time is
    fetched; inside jit.

    Args:
        measure: of one layer of each, [1, ...].
        stacks: [L, ...] each.
    """

    def of_layer(layer: Array) -> Array:
        return measure(*(on_device(layer_of(stack, layer)) for stack in stacks))

    return jax.lax.map(of_layer, jnp.arange(stacks[0].shape[0]))


def layer_of(stack: Array, layer: Array) -> Array:
    """One layer of an array that is stacked over layers, [1, ...], where it lies."""
    return jax.lax.dynamic_slice_in_dim(stack, layer, 1)
