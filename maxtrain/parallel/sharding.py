"""From the names of an array's dims to the mesh axes that they are split over: one table, checked.

Modules name their dims with logical axes; only this file knows which mesh axis that is. Outside a
mesh (`jax.set_mesh`) nothing is constrained, so that the same code runs in a notebook on one
device.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from data_pipeline.errors import ConfigError

Axes = tuple[str | None, ...]
LENGTH = "activation_length"
STAGE = "stage"

# Over `expert`, experts are split by their number, and other weights as over `fsdp`.
RULES: dict[str, tuple[str, ...]] = {
    "embed": ("fsdp", "expert"),
    "expert_embed": ("fsdp",),
    "mlp": ("tensor",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "head_dim": (),
    # Stages have parts of what is before and behind the layers.
    "vocab": ("stage", "tensor"),
    "score": (),
    "norm": (),
    "positions": (),
    "layers": ("stage",),
    "exp": ("expert",),
    "router": (),
    "rank": (),
    "latent": ("fsdp", "expert"),
    "activation_batch": ("data", "fsdp", "expert"),
    LENGTH: ("context",),
    "activation_embed": (),
}


def partition_spec(
    axes: Axes,
    mesh_shape: Mapping[str, int],
    shape: tuple[int, ...] | None = None,
    name: str = "array",
) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical names.

    Args:
        axes: a logical name for each dim, or None for a dim that is never split.
        mesh_shape: devices along each mesh axis.
        shape: sizes of the dims, checked for divisibility when given.
        name: what to call the array in a message.

    Raises:
        ConfigError: an unknown name; two dims on the same mesh axis; a dim that its mesh axes don't
            divide.
    """
    spec: list[Any] = []
    used: dict[str, str | None] = {}
    problems = []
    for i, axis in enumerate(axes):
        if axis is not None and axis not in RULES:
            raise ConfigError(
                f"{name}: unknown logical axis {axis!r}. Use one of {', '.join(sorted(RULES))}."
            )
        split = tuple(m for m in RULES.get(axis or "", ()) if mesh_shape.get(m, 1) > 1)
        for m in split:
            if m in used:
                both = f"{used[m]!r} and {axis!r}"
                problems.append(
                    f"{name}: dims {both} are both split over mesh axis {m!r}. "
                    "Change one of them in RULES."
                )
            used[m] = axis
        parts = math.prod(mesh_shape[m] for m in split)
        if shape is not None and shape[i] % parts:
            product = " * ".join(f"mesh.{m}={mesh_shape[m]}" for m in split)
            rule = f"dim {axis!r} of size {shape[i]} must be divisible by {product} = {parts}"
            mend = f"Use a divisor of {shape[i]}, or change the size"
            problems.append(f"{name}: {rule}. {mend}.")
        if len(split) == 1:
            spec.append(split[0])
        else:
            spec.append(split or None)
    if problems:
        raise ConfigError(problems)
    return PartitionSpec(*spec)


def spread(sharding: NamedSharding, shape: tuple[int, ...], axis: str = "data") -> NamedSharding:
    """The sharding with one dim split over one more mesh axis; unchanged if the axis divides none.

    That dim is the one with the largest part of those that the axis divides. The first dim of
    several, stacked over layers, is the last choice: layers are used one by one.
    """
    parts = sharding.mesh.shape[axis]
    unnamed = len(shape) - len(sharding.spec)
    spec = [*sharding.spec, *[None] * unnamed]
    names = [_axes_of(entry) for entry in spec]
    local = sharding.shard_shape(shape)
    fits = [i for i, size in enumerate(local) if size % parts == 0]
    if parts == 1 or not fits or any(axis in used for used in names):
        return sharding

    def preference(i: int) -> tuple[bool, int]:
        is_layers = len(shape) >= 3 and i == 0
        return not is_layers, local[i]

    best = max(fits, key=preference)
    spec[best] = axis
    if names[best]:
        spec[best] = (*names[best], axis)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec))


def _axes_of(entry: Any) -> tuple[str, ...]:
    """The mesh axes of one entry of a PartitionSpec."""
    if entry is None:
        return ()
    if isinstance(entry, tuple):
        return entry
    return (entry,)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Fixes how an intermediate array is split, by the logical names of its dims.

    It does nothing outside a mesh. A length that can't be split, such as that of a few tokens of
    generation, is whole on all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    kept = []
    for size, axis in zip(x.shape, axes, strict=True):
        if axis == LENGTH and size % length_shards():
            kept.append(None)
        else:
            kept.append(axis)
    return jax.lax.with_sharding_constraint(x, partition_spec(tuple(kept), mesh.shape))


def length_shards() -> int:
    """Number of parts that the tokens of a row are split into on the current mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(m, 1) for m in RULES[LENGTH])


def stages() -> int:
    """Number of parts that the layers are split into on the current mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(STAGE, 1)


def batch_shards() -> int:
    """Number of parts that the rows of a batch are split into on the current mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(m, 1) for m in RULES["activation_batch"])


def named_sharding(
    mesh: Mesh, axes: Axes, shape: tuple[int, ...] | None = None, name: str = "array"
) -> NamedSharding:
    """The sharding of an array on a real mesh; raises like `partition_spec`."""
    return NamedSharding(mesh, partition_spec(axes, mesh.shape, shape, name))
