"""The device mesh: names, sizes, and which devices are neighbours."""

import jax
import pytest
from jax.sharding import AxisType

from maxtrain.config.schema import MeshConfig
from maxtrain.parallel.mesh import AXES, make_mesh


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
