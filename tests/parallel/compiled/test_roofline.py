"""Times of a step from the makers' figures, against numbers computed by hand."""

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from data_pipeline.base.errors import ConfigError
from maxtrain.parallel.compiled.collectives import Collective
from maxtrain.parallel.compiled.roofline import lines_of, roofline, seconds_of
from maxtrain.parallel.compiled.work import ProgramWork
from maxtrain.parallel.hardware import links

GB = 1e9


def chip(kind, *coords, of_slice=None):
    """Return a chip. A single slice that is only described has no number."""
    found = SimpleNamespace(device_kind=kind, coords=coords, process_index=0)
    if of_slice is not None:
        found.slice_index = of_slice
    return found


def gpus(kind, hosts):
    return [SimpleNamespace(id=i, device_kind=kind, process_index=i // 8) for i in range(8 * hosts)]


def torus(kind, *sizes):
    return [chip(kind, *place) for place in np.ndindex(*sizes)]


H100 = gpus("NVIDIA H100 80GB HBM3", 2)
V5P = torus("TPU v5", 4, 4, 4)
V5E = torus("TPU v5 lite", 4, 4, 1)
# Two slices of 4 x 4.
SLICES = [
    chip("TPU v5 lite", *place, of_slice=number)
    for number in range(2)
    for place in np.ndindex(4, 4, 1)
]
ALL = "{}"
# Of 16 GPUs: each with its like on the other host.
ACROSS = "[8,2]<=[2,8]T(1,0)"
# Of 64 chips: along the last dim; every other one of it.
ROW = "[16,4]<=[64]"
EVERY_OTHER = "[32,2]<=[16,2,2]T(0,2,1)"


@pytest.mark.parametrize(
    ("devices", "kind", "places", "seconds"),
    [
        # NVLink: each sends 7 parts of 1 GB at 450 GB/s.
        (H100, "all-gather", "[2,8]<=[16]", 7 / 450),
        # 15 parts over the 8 ports of a host, of 50 GB/s each.
        (H100, "all-gather", ALL, 15 / 400),
        (H100, "all-reduce", ACROSS, 1 / 50),
        # Half of what there is to send goes to the other host, over a port of its own.
        (H100, "all-to-all", ALL, (8 / 16) / 50),
        (H100, "collective-permute", ACROSS, 1 / 50),
        # Three rings of 100 GB/s in both directions.
        (V5P, "all-gather", ALL, 63 / 600),
        (V5P, "all-gather", ROW, 3 / 200),
        (V5P, "reduce-scatter", ROW, (3 / 4) / 200),
        # The links between the two also carry what the ones between them have.
        (V5P, "all-gather", EVERY_OTHER, 1 / 100),
        # Each of four has a quarter for each: one over the middle of the ring's half.
        (V5P, "all-to-all", ROW, 1 / 200),
        (V5P, "collective-permute", "{{0,1},{1,2}}", 1 / 100),
        # No rings: 50 GB/s along each of two dims.
        (V5E, "all-gather", ALL, 15 / 100),
        (V5E, "all-to-all", "[4,4]<=[16]", 1 / 50),
        # Each with its like in the other slice, over its share of the network of hosts.
        (SLICES, "all-reduce", "[16,2]<=[2,16]T(1,0)", 1 / 3.125),
        (SLICES, "collective-permute", "{{0,16},{16,0}}", 1 / 3.125),
        # 16 parts come from the other slice, over the shares of 16 chips.
        (SLICES, "all-gather", ALL, 16 / (16 * 3.125)),
        (SLICES, "all-gather", "[2,16]<=[32]", 15 / 100),
    ],
)
def test_a_collective_takes_what_its_slowest_links_take(devices, kind, places, seconds):
    one = Collective(kind, GB, places)
    assert seconds_of(one, devices, links(devices[0])) == pytest.approx(seconds)


def test_a_program_for_several_slices_numbers_the_devices_of_one():
    """In this mesh, slices are between two axes of one: 0 to 3 of it are the chips at 0, 1, 4,
    5."""
    chips = [chip("TPU v5 lite", *place, 0, of_slice=0) for place in np.ndindex(2, 2)]
    others = [chip("TPU v5 lite", *place, 0, of_slice=1) for place in np.ndindex(2, 2)]
    devices = np.array([*chips[:2], *others[:2], *chips[2:], *others[2:]])
    mesh = SimpleNamespace(devices=devices, shape={"data": 2, "stage": 2, "fsdp": 2})
    counts = {Collective("all-reduce", GB, "{{0,2},{1,3}}"): 1}
    counts[Collective("all-reduce", GB, "[2,2]<=[4]")] = 1
    lines = lines_of(ProgramWork(0.0, 0.0, Counter(counts)), mesh, links(devices[0]))
    assert {line.axes for line in lines} == {("data",), ("fsdp",)}
    # Of two chips that a link of 50 GB/s joins.
    assert [line.seconds for line in lines] == [pytest.approx(1 / 50)] * 2


def test_a_step_takes_the_longest_of_its_three_parts():
    mesh = SimpleNamespace(devices=np.array(H100).reshape(2, 8), shape={"data": 2, "fsdp": 8})
    gathers = {Collective("all-gather", GB, "[2,8]<=[16]"): 9, Collective("all-gather", 0, ALL): 2}
    alone = Collective("all-reduce", GB, "[16,1]<=[16]")
    work = ProgramWork(2e15, 3.35e12, Counter({**gathers, alone: 5}))
    found = links(H100[0])
    lines = lines_of(work, mesh, found)
    gather, whole = lines
    assert (gather.kind, gather.axes, gather.count) == ("all-gather", ("fsdp",), 9)
    assert gather.num_bytes == 63 * GB
    assert whole.axes == ("data", "fsdp")
    times = roofline(work, 1e15, 989.5e12, lines, found)
    assert times.products == pytest.approx(2e15 / 989.5e12)
    assert times.memory == pytest.approx(1.0)
    assert times.network == pytest.approx(9 * 7 / 450)
    assert times.limit == "products"
    assert times.seconds == times.products
    assert times.without_overlap == pytest.approx(sum(times))
    # Custom kernels hide products, but not those of the model.
    hidden = roofline(ProgramWork(1e12), 1e15, 989.5e12, [], found)
    assert hidden.products == pytest.approx(1e15 / 989.5e12)


def test_devices_without_figures_are_refused():
    with pytest.raises(ConfigError, match=r"no bandwidths are known for 'TPU v3'\. Use one of v5e"):
        links(chip("TPU v3", 0, 0, 0))
