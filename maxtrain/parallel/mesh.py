"""The device mesh: axis names, sizes, devices."""

import collections
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.config.sections.mesh import axes_of, slow_axes_of

# Outer to inner.
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")
# TPUs wired in two dimensions, where an axis of the mesh may take a part of one; as jax has it.
_FLAT = ("TPU v5 lite", "TPU v5e")


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over `devices`, or all devices of all processes, with GSPMD (Auto) axes.

    Neighbours in `tensor` are closest. The config's -1 is already filled in, see
    config.across.shapes.fit_to_devices. ConfigError: as of `over_slices`.
    """
    if devices is None:
        devices = jax.devices()
    axis_types = (AxisType.Auto,) * len(AXES)
    fast = _shape(axes_of(config), "mesh.")
    slow = _shape(slow_axes_of(config), "mesh.dcn_")
    # jax would leave some of them idle.
    shape = tuple(inner * outer for inner, outer in zip(fast, slow, strict=True))
    assert math.prod(shape) == len(devices), f"{shape} of {len(devices)} devices"
    if not slow_axes_of(config) and len(_numbers(devices, "slice_index")) == 1:
        placed = _placed(functools.partial(mesh_utils.create_device_mesh, shape), devices)
        return Mesh(placed, AXES, axis_types=axis_types)
    return Mesh(over_slices(config, devices), AXES, axis_types=axis_types)


def _placed(create: Callable[..., np.ndarray], devices: Sequence[Any]) -> np.ndarray:
    """Return what a function of mesh_utils makes of devices. An axis takes whole dims of a TPU's
    torus where sizes allow it, as those are closed to rings; where they do not, as with 8 devices
    of 4 x 4 x 4, it takes a part of one.
    """
    if devices[0].device_kind not in _FLAT:
        try:
            return create(devices=devices)
        except NotImplementedError:
            # It says that an axis is not a product of dims.
            pass
    return create(devices=devices, allow_split_physical_axes=True)


def _shape(sizes: dict[str, int], prefix: str) -> tuple[int, ...]:
    """Sizes by their keys, as those of all axes."""
    return tuple(sizes.get(f"{prefix}{axis}", 1) for axis in AXES)


def _numbers(devices: Sequence[Any], attribute: str) -> Mapping[int, int]:
    """Return how many devices each slice or process has, by its number; CPUs are in one slice."""
    return collections.Counter(getattr(device, attribute, None) or 0 for device in devices)


def over_slices(config: MeshConfig, devices: Sequence[Any]) -> np.ndarray:
    """Devices as a mesh of several slices, which a slow network connects.

    Along an axis, those of one slice are neighbours. With `mesh.dcn_...`, that step of an axis is
    from slice to slice; otherwise the outermost axes that can be are split over slices, since they
    talk least.

    A slice is what devices say (`slice_index`: TPUs that are wired, GPUs that NVLink joins); with
    `mesh.dcn_...`, where all say the same, or nothing, each process is one.

    Raises:
        ConfigError: there is another number of slices, or they have different numbers of devices.
    """
    slow = slow_axes_of(config)
    counts = _numbers(devices, "slice_index")
    units = "slices"
    by_process = len(counts) == 1
    if by_process:
        counts = _numbers(devices, "process_index")
        units = "processes"
    if slow:
        _require_slices(slow, len(counts), units)
    if len(set(counts.values())) > 1:
        sizes = ", ".join(f"{size} in number {index}" for index, size in sorted(counts.items()))
        raise ConfigError(
            f"mesh: {units} must have equally many devices, and there are {sizes}. Start the job "
            f"on {units} that are alike."
        )
    inner = _shape(axes_of(config), "mesh.")
    outer = _shape(slow, "mesh.dcn_")
    if not slow:
        outer = _outermost(inner, len(counts))
        inner = tuple(size // part for size, part in zip(inner, outer, strict=True))
    create = functools.partial(
        mesh_utils.create_hybrid_device_mesh, inner, outer, process_is_granule=by_process
    )
    return _placed(create, devices)


def _require_slices(slow: dict[str, int], count: int, units: str) -> None:
    wanted = math.prod(slow.values())
    if count == wanted:
        return
    given = " x ".join(f"{key}={size}" for key, size in slow.items())
    if len(slow) > 1:
        given = f"{given} = {wanted}"
    keys = " and ".join(slow)
    raise ConfigError(
        f"{given} must be the number of {units}, {count}. Set {keys} so that they multiply to "
        f"{count}, or leave them out."
    )


def _outermost(shape: Sequence[int], num_slices: int) -> tuple[int, ...]:
    """Return how many parts of each axis go to different slices."""
    outer = []
    left = num_slices
    for size in shape:
        part = math.gcd(size, left)
        outer.append(part)
        left //= part
    # The shape has all devices, so the number of slices divides it.
    assert left == 1, f"{shape} over {num_slices} slices"
    return tuple(outer)
