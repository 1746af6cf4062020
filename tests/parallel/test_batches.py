"""Global batches: every row lands where the mesh wants it, and reading ahead keeps the order."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import MeshConfig
from maxtrain.parallel import batches
from maxtrain.parallel.batches import BatchLayout, prefetch
from maxtrain.parallel.mesh import AXES, make_mesh

ROWS, LENGTH = 16, 6
MESHES = [(1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 1, 8), (2, 2, 2), (4, 1, 2)]


def mesh_of(*shape):
    return make_mesh(MeshConfig(*shape), jax.devices()[: np.prod(shape)])


@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_global_arrays_are_the_hosts_rows_split_over_data_and_fsdp(shape):
    layout = BatchLayout(mesh_of(*shape), ROWS, LENGTH)
    np.testing.assert_array_equal(layout.part.rows, np.arange(ROWS))  # one process holds them all
    host = {
        "inputs": np.arange(ROWS * LENGTH, dtype=np.int32).reshape(ROWS, LENGTH),
        "loss_mask": np.random.default_rng(0).random((ROWS, LENGTH), np.float32),
        "source": np.arange(ROWS, dtype=np.int32),
    }
    batch = layout.to_global(host)
    parts = shape[0] * shape[1]
    for name, x in batch.items():
        assert x.dtype == host[name].dtype and x.sharding.spec[0] == layout.sharding.spec[0]
        np.testing.assert_array_equal(x, host[name])
        assert len(x.addressable_shards) == np.prod(shape)
        for shard in x.addressable_shards:
            assert shard.data.shape == (ROWS // parts, LENGTH)[: x.ndim]
            np.testing.assert_array_equal(shard.data, host[name][shard.index])


class PartOfAMesh:
    """A sharding as a process sees it that has only some of the devices."""

    def __init__(self, sharding, devices):
        self.sharding, self.devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        return {
            d: i for d, i in self.sharding.devices_indices_map(shape).items() if d in self.devices
        }


@pytest.mark.parametrize(
    "shape, devices, rows",
    [
        ((4, 2, 1), [0, 1], [0, 1, 2, 3]),
        ((4, 2, 1), [6, 7], [12, 13, 14, 15]),
        ((2, 1, 4), [0, 1], range(8)),  # two processes share the rows of one replica
        ((2, 1, 4), [2, 3], range(8)),
        ((8, 1, 1), [1, 6], [2, 3, 12, 13]),  # not neighbours
        ((1, 8, 1), [7], [14, 15]),
        ((1, 1, 8), [5], range(16)),
    ],
    ids=str,
)
def test_each_process_reads_the_rows_of_its_devices_and_puts_them_there(
    monkeypatch, shape, devices, rows
):
    mine = [jax.devices()[i] for i in devices]
    real, whole = batches.named_sharding, np.random.default_rng(0).integers(0, 96, (ROWS, LENGTH))
    monkeypatch.setattr(batches, "named_sharding", lambda *args: PartOfAMesh(real(*args), mine))
    made = []
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *args: made.append(args) or jax.numpy.zeros(())
    )
    layout = BatchLayout(mesh_of(*shape), ROWS, LENGTH)
    np.testing.assert_array_equal(layout.part.rows, list(rows))
    layout.to_global(layout.own_part({"inputs": whole, "source": np.arange(ROWS)}))
    for (shape, sharding, part), expected in zip(made, (whole, np.arange(ROWS)), strict=True):
        for index in sharding.addressable_devices_indices_map(shape).values():
            np.testing.assert_array_equal(part(index), expected[index])


@pytest.mark.parametrize(
    "devices, rows, columns",
    [
        ([0], [0, 1, 2, 3], (0, 3)),
        ([3], [0, 1, 2, 3], (9, 12)),
        ([1, 2], [0, 1, 2, 3], (3, 9)),
        ([5, 2], range(8), (3, 9)),
    ],
    ids=str,
)
def test_a_process_reads_only_the_columns_of_its_devices_where_the_length_is_split(
    monkeypatch, devices, rows, columns
):
    mesh = jax.make_mesh(
        (2, 1, 1, 4, 1, 1), AXES, axis_types=(AxisType.Auto,) * 6, devices=jax.devices()
    )
    whole = np.random.default_rng(0).integers(0, 96, (8, 12))
    layout = BatchLayout(mesh, 8, 12)
    assert layout.part.rows.tolist() == list(range(8)) and layout.part.columns == slice(0, 12)
    arrays = layout.to_global({"inputs": whole, "source": whole[:, 0]})
    assert {shard.data.shape for shard in arrays["inputs"].addressable_shards} == {(4, 3)}
    for name, expected in (("inputs", whole), ("source", whole[:, 0])):
        np.testing.assert_array_equal(arrays[name], expected)
    real, mine, made = batches.named_sharding, [jax.devices()[i] for i in devices], []
    monkeypatch.setattr(batches, "named_sharding", lambda *args: PartOfAMesh(real(*args), mine))
    monkeypatch.setattr(
        jax, "make_array_from_callback", lambda *args: made.append(args) or jax.numpy.zeros(())
    )
    layout = BatchLayout(mesh, 8, 12)
    np.testing.assert_array_equal(layout.part.rows, list(rows))
    assert layout.part.columns == slice(*columns)
    layout.to_global(layout.own_part({"inputs": whole, "source": whole[:, 0]}))
    for (shape, sharding, part), expected in zip(made, (whole, whole[:, 0]), strict=True):
        for index in sharding.addressable_devices_indices_map(shape).values():
            np.testing.assert_array_equal(part(index), expected[index])


def test_rows_that_the_mesh_does_not_divide_are_refused():
    with pytest.raises(
        ConfigError,
        match=r"batch: .* size 12 must be divisible by mesh.data=2 \* mesh.fsdp=4 = 8. Use a",
    ):
        BatchLayout(mesh_of(2, 4, 1), 12, LENGTH)


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_prefetch_keeps_the_order_and_takes_that_many_ahead(ahead):
    taken = []

    def source():
        for i in range(10):
            taken.append(i)
            yield i

    items, got = prefetch(source(), ahead), []
    assert taken == []  # nothing before it is asked for
    for i in range(10):
        got.append(next(items))
        assert len(taken) == min(10, i + 1 + ahead)
    assert got == list(range(10)) == taken and next(items, None) is None


def test_prefetch_passes_errors_on_after_what_came_before_them():
    def source():
        yield 1
        yield 2
        raise OSError("no more")

    items = prefetch(source(), 1)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(OSError, match="no more"):
        next(items)
