"""The device mesh: axis names, sizes, devices."""

import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from maxtrain.config.schema import MeshConfig
from maxtrain.config.sections.mesh import axes_of

# Outer to inner. Nobody can ask for `expert` today: it has size 1.
AXES = ("data", "stage", "fsdp", "context", "expert", "tensor")


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
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)
