"""Ready arrangements of devices, mesh.preset: which axes one fills in, and how.

An axis that was set to anything but its default stays as it is. What a preset decides depends on
the number of devices and on the model, so it is known when the devices are.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

from maxtrain.config.across.context import context_problems
from maxtrain.config.across.experts import split_problems
from maxtrain.config.across.tensor import tensor_problems
from maxtrain.config.schema import MeshConfig, RunConfig
from maxtrain.config.sections.mesh import axes_of, slow_axes_of
from maxtrain.config.words import divisors

# The most devices that are taken to be near each other: of a host, as a rule.
_NEAR = 8
# The axis of a preset beside mesh.fsdp, and what must hold for it.
_AXES: dict[str, tuple[str, Callable[[RunConfig], Iterator[str]]]] = {
    "fsdp_tensor": ("tensor", tensor_problems),
    "moe": ("expert", split_problems),
    "long_context": ("context", context_problems),
}


def with_preset(config: RunConfig, num_devices: int) -> RunConfig:
    """The config with the axes that its preset decides, and without the preset.

    * fsdp: mesh.fsdp gets all devices.
    * hsdp: mesh.fsdp gets as many as divide them, 8 at most, and mesh.data the others.
    * fsdp_tensor, moe, long_context: mesh.tensor, mesh.expert or mesh.context gets the most that
      divide the devices, 8 at most, and that the model and its rows can be split into; mesh.fsdp
      gets the others.

    Where axes that are set do not divide the devices, nothing is filled in.
    """
    mesh = config.mesh
    plain = dataclasses.replace(config, mesh=dataclasses.replace(mesh, preset="none"))
    sizes = slow_axes_of(mesh) | axes_of(mesh)
    product = math.prod(size for size in sizes.values() if size > 0)
    if num_devices % product:
        return plain
    left = num_devices // product
    filled = {}
    if mesh.preset == "hsdp":
        filled = _replicas(mesh, left)
    elif mesh.preset in _AXES:
        axis, problems = _AXES[mesh.preset]
        if getattr(mesh, axis) == 1:
            filled[axis] = _most(plain, axis, problems, left)
    return dataclasses.replace(plain, mesh=dataclasses.replace(plain.mesh, **filled))


def _replicas(mesh: MeshConfig, left: int) -> dict[str, int]:
    """Return the axes that the preset hsdp sets, given the number of devices that are left."""
    if mesh.data != 1:
        return {}
    if mesh.fsdp != -1:
        return {"data": left}
    shards = math.gcd(left, _NEAR)
    return {"data": left // shards, "fsdp": shards}


def _most(
    config: RunConfig, axis: str, problems: Callable[[RunConfig], Iterator[str]], left: int
) -> int:
    """The largest size of an axis without a problem."""
    for size in reversed(divisors(math.gcd(left, _NEAR))):
        mesh = dataclasses.replace(config.mesh, **{axis: size})
        if not any(problems(dataclasses.replace(config, mesh=mesh))):
            return size
    return 1
