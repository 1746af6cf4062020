"""The device mesh: axis names, sizes, devices."""

import collections
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.config.sections.mesh import axes_of

# Outer to inner. Nobody can ask for `expert` today: it has size 1.
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")
# TPUs wired in two dimensions, where an axis of the mesh may take a part of one; as jax has it.
_FLAT = ("TPU v5 lite", "TPU v5e")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices`, or all devices of all processes, with GSPMD (Auto) axes.

    Neighbours in `tensor` are closest. The config's -1 is already filled in, see
    config.across.shapes.fit_to_devices.
    """
    if devices is None:
        devices = jax.devices()
    sizes = {key.removeprefix("mesh."): size for key, size in axes_of(config).items()}
    shape = tuple(sizes.get(axis, 1) for axis in AXES)
    # jax would leave some of them idle.
    assert math.prod(shape) == len(devices), f"{shape} of {len(devices)} devices"
    types = (AxisType.Auto,) * len(AXES)
    if len({_slice_of(device) for device in devices}) == 1:
        return jax.make_mesh(shape, AXES, axis_types=types, devices=devices)
    return Mesh(over_slices(shape, devices), AXES, axis_types=types)


def over_slices(shape: Sequence[int], devices: Sequence[Any]) -> np.ndarray:
    """Devices of several slices, in the shape of the mesh.

    A slice has a fast network of its own: TPUs that are wired, or GPUs that NVLink joins. The
    outermost axes that can be are split over slices, since they talk least.

    Raises:
        ConfigError: slices have different numbers of devices.
    """
    sizes = collections.Counter(_slice_of(device) for device in devices)
    if len(set(sizes.values())) > 1:
        numbers = ", ".join(f"{size} in slice {index}" for index, size in sorted(sizes.items()))
        rule = f"slices must have equally many devices, and there are {numbers}"
        raise ConfigError(f"mesh: {rule}. Start the job on slices, or hosts, that are alike.")
    outer = []
    left = len(sizes)
    for size in shape:
        part = math.gcd(size, left)
        outer.append(part)
        left //= part
    # The shape has all devices, so the number of slices divides it.
    assert left == 1, f"{shape} over {len(sizes)} slices"
    inner = [size // part for size, part in zip(shape, outer)]
    return mesh_utils.create_hybrid_device_mesh(
        inner, outer, devices, allow_split_physical_axes=devices[0].device_kind in _FLAT
    )


def _slice_of(device: Any) -> int:
    """Which slice a device is in; CPUs have but one."""
    return getattr(device, "slice_index", 0)
