"""The device mesh: names, sizes, and which devices are neighbours."""

import dataclasses
from collections.abc import Sequence

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.mesh import AXES, make_mesh, over_slices


@pytest.mark.parametrize(("data", "fsdp", "tensor"), [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 4, 2)])
def test_axes_have_the_sizes_asked_for_and_the_reserved_ones_are_one(data, fsdp, tensor):
    mesh = make_mesh(MeshConfig(data=data, fsdp=fsdp, tensor=tensor))
    assert mesh.axis_names == AXES == ("data", "stage", "fsdp", "context", "expert", "tensor")
    assert mesh.devices.shape == (data, 1, fsdp, 1, 1, tensor)
    assert set(mesh.axis_types) == {AxisType.Auto}
    assert sorted(d.id for d in mesh.devices.flat) == list(range(8))


def test_tensor_is_innermost():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    ids = [[[d.id for d in pair] for pair in group] for group in mesh.devices.squeeze((1, 3, 4))]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_given_devices_are_used_in_their_order():
    devices = jax.devices()[2:6]
    mesh = make_mesh(MeshConfig(data=1, fsdp=2, tensor=2), devices)
    assert list(mesh.devices.flat) == devices


@pytest.mark.parametrize("data", [3, 16])
def test_no_device_is_left_idle(data):
    with pytest.raises(AssertionError, match="of 8 devices"):
        make_mesh(MeshConfig(data=data, fsdp=1, tensor=1))


@dataclasses.dataclass(frozen=True)
class Chip:
    """As much of a device as its place in a mesh depends on."""

    id: int
    slice_index: int
    platform: str = "gpu"
    device_kind: str = "NVIDIA H100 80GB HBM3"


def slices_along(sizes: Sequence[int], shape: Sequence[int]) -> np.ndarray:
    """The slices of devices in a mesh of this shape; `sizes` are the devices of each slice."""
    chips = []
    for index, size in enumerate(sizes):
        for _ in range(size):
            chips.append(Chip(len(chips), index))
    # Each process may list them in another order.
    placed = over_slices(shape, chips[::-1])
    assert placed.shape == tuple(shape)
    return np.vectorize(lambda chip: chip.slice_index, otypes=[int])(placed)


def test_outer_axes_are_split_over_slices():
    """Heads and rows stay inside a slice, as long as data and fsdp have room for all slices."""
    by_fsdp = slices_along((4, 4), (1, 1, 4, 1, 1, 2)).reshape(4, 2)
    assert by_fsdp.tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]
    by_both = slices_along((2, 2, 2, 2), (2, 1, 2, 1, 1, 2)).reshape(2, 2, 2)
    assert by_both.tolist() == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    # Then tensor is split, too: slow, but right.
    assert slices_along((2, 2), (1, 1, 1, 1, 1, 4)).ravel().tolist() == [0, 0, 1, 1]


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(ConfigError, match=r"4 in slice 0, 2 in slice 1\. Start the job on slices"):
        slices_along((4, 2), (1, 1, 6, 1, 1, 1))
