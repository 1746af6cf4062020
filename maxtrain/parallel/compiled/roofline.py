"""Roofline: the least time of a step, the longest of its products at the peak, its traffic at the
bandwidth of memory, and its collectives at the bandwidth of the links (Williams et al. 2009).

An estimate from the makers' figures, not a measurement: no device reaches them, kernels are small
or wait for each other, and what overlaps is decided when it runs. If nothing overlapped, a step
would take the sum of the three.
"""

import math
from typing import Any, NamedTuple

import numpy as np

from maxtrain.parallel.compiled.collectives import Collective
from maxtrain.parallel.compiled.work import ProgramWork
from maxtrain.parallel.hardware import Links, slice_of


class CollectiveTime(NamedTuple):
    """Collectives of one kind over the same axes of the mesh, for one device and one step."""

    kind: str
    # Such as ("fsdp",).
    axes: tuple[str, ...]
    count: int
    # That the device sends.
    num_bytes: float
    seconds: float
    # Whether they go from slice to slice, of TPUs.
    is_between_slices: bool = False

    @property
    def over(self) -> str:
        """The axes of the mesh, for messages."""
        words = " ".join(self.axes)
        if self.is_between_slices:
            words += ", between slices"
        return words


class Roofline(NamedTuple):
    """Seconds of one step.

    Attributes:
        products: matrix products at the device's peak.
        memory: traffic of the main memory.
        network: collectives, one after the other.
    """

    products: float
    memory: float
    network: float

    @property
    def seconds(self) -> float:
        """Seconds of the step if all three overlap."""
        return max(self)

    @property
    def without_overlap(self) -> float:
        return sum(self)

    @property
    def limit(self) -> str:
        """The name of the longest."""
        return max(self._fields, key=lambda name: getattr(self, name))


def lines_of(
    work: ProgramWork, mesh: Any, links: Links, is_compiled: bool = True
) -> list[CollectiveTime]:
    """The collectives of a step by kind and axes, those that take longest first.

    `is_compiled`: whether they number devices as a program does; else by positions in the mesh,
    which for one slice is the same.
    """
    devices = list(mesh.devices.flat)
    shape = dict(mesh.shape)
    of_slice = []
    if links.is_torus:
        of_slice = _positions_of_a_slice(devices)
    sums: dict[tuple[str, tuple[str, ...], bool], CollectiveTime] = {}
    for one, count in work.collectives.items():
        if is_compiled:
            one = _placed(one, devices, of_slice)
        axes = one.axes(shape)
        if not axes:
            continue
        key = (one.kind, axes, one.is_between_slices)
        before = sums.get(key, CollectiveTime(one.kind, axes, 0, 0.0, 0.0, one.is_between_slices))
        sums[key] = before._replace(
            count=before.count + count,
            num_bytes=before.num_bytes + count * one.sent(len(devices)),
            seconds=before.seconds + count * seconds_of(one, devices, links),
        )
    return sorted(sums.values(), key=lambda line: (-line.seconds, line.kind, line.axes))


def _positions_of_a_slice(devices: list[Any]) -> list[int]:
    """Return where the devices of the first of several slices are in the mesh; empty: there is but
    one.
    """
    found = []
    for position, device in enumerate(devices):
        if slice_of(device) == slice_of(devices[0]):
            found.append(position)
    if len(found) == len(devices):
        return []
    return found


def _placed(one: Collective, devices: list[Any], of_slice: list[int]) -> Collective:
    """Return a collective with positions in the mesh.

    Args:
        devices: of the mesh.
        of_slice: as of `_positions_of_a_slice`: what one slice does, all do.
    """
    if one.is_between_slices:
        return one.placed([device.id for device in devices])
    if of_slice:
        return one.within(of_slice)
    return one


def roofline(
    work: ProgramWork, model_flops: float, peak: float, lines: list[CollectiveTime], links: Links
) -> Roofline:
    """Return the roofline of one device.

    Args:
        model_flops: of the model on one device: no fewer are computed, whatever custom kernels
            hide.
        peak: FLOP/s of products.
    """
    return Roofline(
        products=max(work.flops, model_flops) / peak,
        memory=work.memory_bytes / links.memory,
        network=sum(line.seconds for line in lines),
    )


def seconds_of(one: Collective, devices: list[Any], links: Links) -> float:
    """Return the seconds of one collective, if nothing else uses the links."""
    groups = one.groups(len(devices))
    sent = one.sent(len(devices))
    if links.is_torus:
        within = _on_torus(one, groups, devices, links)
        numbers = [slice_of(device) for device in devices]
    else:
        within = sent / links.link
        numbers = [device.process_index for device in devices]
    # The slice or the host of each.
    places = np.array(numbers)[groups]
    others = (places != places[:, :1]).any(axis=1)
    if not others.any():
        return within
    assert links.beyond is not None, "slices whose network is not known are not described"
    group = places[others][0]
    n = len(group)
    here = int((group == group[0]).sum())
    if one.kind == "all-to-all":
        # What is for devices of this host, or slice, stays here.
        return max(within, sent * (n - here) / (n - 1) / links.beyond)
    if one.kind == "collective-permute":
        return sent / links.beyond
    if links.is_torus:
        # In parts: what is in the slice already does not come again from another.
        return max(within, sent * (n - here) / (n - 1) / (here * links.beyond))
    # A ring leaves the host once, over as many ports as it has devices there.
    return max(within, sent / (here * links.beyond))


def _on_torus(one: Collective, groups: np.ndarray, devices: list[Any], links: Links) -> float:
    coords = np.array([device.coords for device in devices])
    sizes = coords.max(axis=0) - coords.min(axis=0) + 1
    group = coords[groups[0]]
    sent = one.sent(len(devices))
    if one.kind == "collective-permute":
        return sent / links.link
    bandwidths = []
    extents = []
    for dim, size in enumerate(sizes):
        places = np.unique(group[:, dim])
        if len(places) == 1:
            continue
        span = int(places[-1] - places[0] + 1)
        is_ring = size % links.ring == 0 and len(places) * (places[1] - places[0]) == size
        if is_ring:
            span = int(size)
        # Other groups lie between the devices of a group that does not fill its span.
        share = len(places) / span
        bandwidths.append(links.link * share * (2 if is_ring else 1))
        extents.append(len(places))
    if not bandwidths:
        # Halves of one chip.
        return sent / links.link
    if one.kind.endswith("all-to-all"):
        # Half of what each half of a row has goes over the middle: n / 4 of a device's bytes.
        pairs = zip(extents, bandwidths, strict=True)
        return max(one.num_bytes * n / 4 / bandwidth for n, bandwidth in pairs)
    return sent / math.fsum(bandwidths)
