"""Sharding table from the names of an array's dims to the mesh axes that split them, with checks.

Modules name their dims with logical axes; only this file knows which mesh axis that is. Outside a
mesh (`jax.set_mesh`) nothing is constrained, so that the same code runs in a notebook on one
device.

What is computed is split by `RULES`, always: kernels of attention, the exchange of tokens between
experts, stages and losses send what they send over these axes. Where parameters and their optimizer
state are stored, between their uses, is for the config to say (`stored_rules`); XLA moves them from
there to where they are used, and their gradients back.
"""

import dataclasses
import math
from collections.abc import Container, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from data_pipeline.base.errors import ConfigError
from maxtrain.config.sections.rules import RulesConfig

Axes = tuple[str | None, ...]
Rules = Mapping[str, tuple[str, ...]]
LENGTH = "activation_length"
RESIDUAL_LENGTH = "residual_length"
STAGE = "stage"

_SETTABLE: Rules = dataclasses.asdict(RulesConfig())
RULES: Rules = {
    **_SETTABLE,
    "score": (),
    "layers": (STAGE,),
    "activation_batch": ("data", "fsdp", "expert"),
    LENGTH: ("context",),
    RESIDUAL_LENGTH: ("context", "tensor"),
    "activation_embed": (),
}


def stored_rules(config: RulesConfig) -> Rules:
    """Return the sharding rules of parameters and their optimizer state in storage."""
    return {**RULES, **dataclasses.asdict(config)}


def partition_spec(
    axes: Axes,
    mesh_shape: Mapping[str, int],
    shape: tuple[int, ...] | None = None,
    name: str = "array",
    rules: Rules = RULES,
) -> PartitionSpec:
    """The PartitionSpec of an array whose dims have these logical names.

    Args:
        axes: a logical name for each dim, or None for a dim that is never split.
        mesh_shape: devices along each mesh axis.
        shape: sizes of the dims, checked for divisibility when given.
        name: what to call the array in a message.
        rules: of parameters, `stored_rules`.

    Raises:
        ConfigError: an unknown name; two dims on the same mesh axis; a dim that its mesh axes don't
            divide.
    """
    spec: list[Any] = []
    used: dict[str, str | None] = {}
    problems = []
    for i, axis in enumerate(axes):
        if axis is not None and axis not in rules:
            raise ConfigError(
                f"{name}: unknown logical axis {axis!r}. Use one of {', '.join(sorted(rules))}."
            )
        split = tuple(m for m in rules.get(axis or "", ()) if mesh_shape.get(m, 1) > 1)
        for m in split:
            if m in used:
                both = (used[m], axis)
                settable = [f"mesh.rules.{one}" for one in both if one in _SETTABLE]
                problems.append(
                    f"{name}: dims {both[0]!r} and {axis!r} are both split over mesh axis {m!r}. "
                    f"Set {' or '.join(settable)} without {m}."
                )
            used[m] = axis
        parts = math.prod(mesh_shape[m] for m in split)
        if shape is not None and shape[i] % parts:
            product = " * ".join(f"mesh.{m}={mesh_shape[m]}" for m in split)
            rule = f"dim {axis!r} of size {shape[i]} must be divisible by {product} = {parts}"
            fix = f"Use a divisor of {shape[i]}, or change the size"
            if axis in _SETTABLE:
                fix += f", or set mesh.rules.{axis} to fewer axes"
            problems.append(f"{name}: {rule}. {fix}.")
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
    return _constrained(x, axes, {LENGTH})


def constrain_residual(
    x: Float[Array, "*s B T D"], *before: str | None
) -> Float[Array, "*s B T D"]:
    """Fixes how the residual stream is split, and what norms make of it: by tokens, over `tensor`
    as well.

    What enters products that are split over `tensor` is gathered, and what they give is summed and
    dealt out in one, so that each device keeps and normalises a part of the tokens
    (https://arxiv.org/abs/2205.05198, section 4.2.2). A length that these axes don't divide is
    split as by `constrain`.

    Args:
        before: logical names of the dims before those of the batch.
    """
    length = RESIDUAL_LENGTH
    if x.shape[-2] % residual_shards():
        length = LENGTH
    return constrain(x, *before, "activation_batch", length, "activation_embed")


@jax.custom_vjp
def gather_residual(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """Return what products that are split over `tensor` take of the residual stream: all tokens,
    gathered once for all of these products. Its gradient is split as the residual stream is.
    """
    return constrain(x, "activation_batch", LENGTH, "activation_embed")


def _gather(x: Array) -> tuple[Array, None]:
    return gather_residual(x), None


def _scatter(_: None, gradient: Array) -> tuple[Array]:
    return (constrain_residual(gradient),)


gather_residual.defvjp(_gather, _scatter)


def constrain_weight(x: jax.Array, *axes: str | None) -> jax.Array:
    """Constrain a parameter during its use, as `constrain` does. A dim that can't be split there,
    but perhaps is where it is stored, is whole.
    """
    return _constrained(x, axes, set(axes))


def _constrained(x: jax.Array, axes: Axes, may_be_whole: Container[str | None]) -> jax.Array:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return x
    kept = []
    for size, axis in zip(x.shape, axes, strict=True):
        if axis in may_be_whole and size % parts_of(axis, mesh.shape):
            kept.append(None)
        else:
            kept.append(axis)
    return jax.lax.with_sharding_constraint(x, partition_spec(tuple(kept), mesh.shape))


def parts_of(axis: str | None, mesh_shape: Mapping[str, int], rules: Rules = RULES) -> int:
    """Return how many parts a dim of this name is split into."""
    if axis is None:
        return 1
    return math.prod(mesh_shape.get(name, 1) for name in rules[axis])


def length_shards() -> int:
    """Number of parts that the tokens of a row are split into on the current mesh."""
    return parts_of(LENGTH, jax.sharding.get_abstract_mesh().shape)


def residual_shards() -> int:
    """Number of parts that the tokens of a row are split into where the residual stream is kept."""
    return parts_of(RESIDUAL_LENGTH, jax.sharding.get_abstract_mesh().shape)


def stages() -> int:
    """Number of parts that the layers are split into on the current mesh."""
    return jax.sharding.get_abstract_mesh().shape.get(STAGE, 1)


def batch_shards() -> int:
    """Number of parts that the rows of a batch are split into on the current mesh."""
    return parts_of("activation_batch", jax.sharding.get_abstract_mesh().shape)


def named_sharding(
    mesh: Mesh,
    axes: Axes,
    shape: tuple[int, ...] | None = None,
    name: str = "array",
    rules: Rules = RULES,
) -> NamedSharding:
    """The sharding of an array on a real mesh; raises like `partition_spec`."""
    return NamedSharding(mesh, partition_spec(axes, mesh.shape, shape, name, rules))
