"""The device mesh: names, sizes, and which devices are neighbours."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from data_pipeline.base.errors import ConfigError
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
class OrderedDevice:
    """The properties of a device that the order of devices depends on."""

    id: int
    process_index: int
    slice_index: int | None = None
    device_kind: str = "fake"
    platform: str = "fake"


def fakes(count, of_process, of_slice=None):
    """Return `count` devices in random order; `of_process`, `of_slice`: number of devices of
    each."""
    found = []
    for number in np.random.default_rng(0).permutation(count).tolist():
        index = None if of_slice is None else number // of_slice
        found.append(OrderedDevice(number, number // of_process, index))
    return found


def ids(devices):
    return np.vectorize(lambda device: device.id)(devices)


def test_a_slow_axis_goes_from_slice_to_slice_and_the_others_stay_within_one():
    """Four slices of eight devices, four of them on each of two hosts."""
    config = MeshConfig(data=1, fsdp=4, tensor=2, dcn_data=2, dcn_fsdp=2)
    mesh = over_slices(config, fakes(32, of_process=4, of_slice=8))
    assert mesh.shape == (2, 1, 8, 1, 1, 2)
    slices = ids(mesh).squeeze() // 8
    # [data, fsdp, tensor]: of fsdp's eight parts four are in each slice.
    assert (slices[0, :4] == 0).all() and (slices[0, 4:] == 1).all()
    assert (slices[1, :4] == 2).all() and (slices[1, 4:] == 3).all()
    assert sorted(ids(mesh).flat) == list(range(32))


def test_stages_may_go_from_slice_to_slice():
    """Four slices of four devices: two replicas of four stages, two of them in each slice."""
    config = MeshConfig(data=1, stage=2, fsdp=2, dcn_data=2, dcn_stage=2)
    mesh = over_slices(config, fakes(16, of_process=4, of_slice=4))
    assert mesh.shape == (2, 4, 2, 1, 1, 1)
    slices = ids(mesh).reshape(2, 4, 2) // 4
    # [data, stage]: fsdp stays inside.
    assert slices[:, :, 0].tolist() == slices[:, :, 1].tolist() == [[0, 0, 1, 1], [2, 2, 3, 3]]


@pytest.mark.parametrize("of_slice", [None, 16], ids=["none", "all in one"])
def test_without_slices_processes_are_what_a_slow_network_connects(of_slice):
    config = MeshConfig(data=2, fsdp=2, expert=2, dcn_data=2)
    mesh = over_slices(config, fakes(16, of_process=8, of_slice=of_slice))
    assert mesh.shape == (4, 1, 2, 1, 2, 1)
    processes = ids(mesh).reshape(4, -1) // 8
    np.testing.assert_array_equal(processes, [[0] * 4, [0] * 4, [1] * 4, [1] * 4])


def test_slices_that_are_not_there_are_refused():
    config = MeshConfig(data=1, fsdp=2, dcn_data=2, dcn_fsdp=2)
    with pytest.raises(
        ConfigError,
        match=r"dcn_data=2 x mesh.dcn_fsdp=2 = 4 must be the number of slices, 2. .* multiply to 2",
    ):
        over_slices(config, fakes(8, of_process=4, of_slice=4))
    with pytest.raises(ConfigError, match=r"dcn_data=4 must be the number of processes, 1\. Set"):
        make_mesh(MeshConfig(data=1, fsdp=2, dcn_data=4))
    uneven = [OrderedDevice(number, min(number // 3, 1)) for number in range(8)]
    with pytest.raises(ConfigError, match=r"there are 3 in number 0, 5 in number 1\. Start"):
        over_slices(MeshConfig(data=1, fsdp=4, dcn_data=2), uneven)


def slices_along(sizes, config, axes):
    """The slices of devices along some axes of a mesh; `sizes` are the devices of each slice."""
    chips = []
    for index, size in enumerate(sizes):
        for _ in range(size):
            chips.append(OrderedDevice(len(chips), index, index))
    # Each process may list them in another order.
    placed = over_slices(config, chips[::-1])
    slices = np.vectorize(lambda chip: chip.slice_index, otypes=[int])(placed)
    return slices.reshape(axes).tolist()


def test_outer_axes_are_split_over_slices():
    """Heads and rows stay inside a slice, as long as data and fsdp have room for all slices."""
    by_fsdp = slices_along((4, 4), MeshConfig(data=1, fsdp=4, tensor=2), (4, 2))
    assert by_fsdp == [[0, 0], [0, 0], [1, 1], [1, 1]]
    by_both = slices_along((2, 2, 2, 2), MeshConfig(data=2, fsdp=2, tensor=2), (2, 2, 2))
    assert by_both == [[[0, 0], [1, 1]], [[2, 2], [3, 3]]]
    # Then tensor is split, too: slow, but right.
    assert slices_along((2, 2), MeshConfig(data=1, fsdp=1, tensor=4), (4,)) == [0, 0, 1, 1]


@dataclasses.dataclass(frozen=True)
class Chip(OrderedDevice):
    """A chip of a torus."""

    coords: tuple[int, int, int] = (0, 0, 0)
    core_on_chip: int = 0


def test_an_axis_takes_whole_dims_of_a_torus_or_else_a_part_of_one():
    places = list(np.ndindex(4, 4, 4))
    chips = [Chip(i, 0, 0, "TPU v5", "tpu", place) for i, place in enumerate(places)]
    whole = make_mesh(MeshConfig(fsdp=16, tensor=4), chips).devices.reshape(16, 4)
    for group in whole:
        # A ring, which is a row of the torus.
        assert sum(len({chip.coords[dim] for chip in group}) == 4 for dim in range(3)) == 1
    part = make_mesh(MeshConfig(fsdp=8, tensor=8), chips).devices.reshape(8, 8)
    assert sorted(chip.id for chip in part.flat) == list(range(64))
    for group in part:
        # A block: 4 and 2 along two dims.
        extents = sorted(len({chip.coords[dim] for chip in group}) for dim in range(3))
        assert extents == [1, 2, 4]


def test_slices_of_different_sizes_are_refused():
    with pytest.raises(
        ConfigError, match=r"4 in number 0, 2 in number 1\. Start the job on slices"
    ):
        slices_along((4, 2), MeshConfig(data=1, fsdp=6), (6,))
