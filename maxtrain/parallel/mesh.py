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
from maxtrain.config.sections.mesh import axes_of, slow_axes_of

# Outer to inner.
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices`, or all devices of all processes, with GSPMD (Auto) axes.

    Neighbours in `tensor` are closest. The config's -1 is already filled in, see
    config.across.shapes.fit_to_devices. ConfigError: mesh.dcn_* do not fit the slices there are.
    """
    if devices is None:
        devices = jax.devices()
    axis_types = (AxisType.Auto,) * len(AXES)
    fast = _shape(axes_of(config), "mesh.")
    slow = _shape(slow_axes_of(config), "mesh.dcn_")
    # jax would leave some of them idle.
    shape = tuple(inner * outer for inner, outer in zip(fast, slow, strict=True))
    assert math.prod(shape) == len(devices), f"{shape} of {len(devices)} devices"
    if not slow_axes_of(config):
        return jax.make_mesh(shape, AXES, axis_types=axis_types, devices=devices)
    return Mesh(over_slices(config, devices), AXES, axis_types=axis_types)


def _shape(sizes: dict[str, int], prefix: str) -> tuple[int, ...]:
    """Sizes by their keys, as those of all axes."""
    return tuple(sizes.get(f"{prefix}{axis}", 1) for axis in AXES)


def over_slices(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """Devices as a mesh of several slices, which a slow network connects: along an axis, those of
    one slice are neighbours, and the first `mesh.dcn_...` step is from slice to slice.

    A slice is what devices say (`slice_index`: TPU slices, hosts of GPUs); where all say the same,
    or nothing, each process is one. ConfigError: the number of slices, or of their devices, is
    another.
    """
    slow = slow_axes_of(config)
    indices = {getattr(device, "slice_index", None) for device in devices}
    by_process = len(indices) == 1
    unit = "processes" if by_process else "slices"
    attribute = "process_index" if by_process else "slice_index"
    counts = collections.Counter(getattr(device, attribute) for device in devices)
    wanted = math.prod(slow.values())
    given = " x ".join(f"{key}={size}" for key, size in slow.items())
    if len(counts) != wanted:
        if len(slow) > 1:
            given = f"{given} = {wanted}"
        keys = " and ".join(slow)
        raise ConfigError(
            f"{given} must be the number of {unit}, {len(counts)}. Set {keys} so that they "
            f"multiply to {len(counts)}, or leave mesh.dcn_data and mesh.dcn_fsdp out: then jax "
            "orders devices."
        )
    if len(set(counts.values())) > 1:
        sizes = ", ".join(str(count) for _, count in sorted(counts.items()))
        raise ConfigError(
            f"{given} is for {unit} of equal size, and these have {sizes} devices. Start as many "
            "devices in each, or leave mesh.dcn_data and mesh.dcn_fsdp out."
        )
    return mesh_utils.create_hybrid_device_mesh(
        _shape(axes_of(config), "mesh."),
        _shape(slow, "mesh.dcn_"),
        devices,
        process_is_granule=by_process,
    )
