"""The collectives of a compiled program: of what kind, between which devices, and how many bytes
each device sends."""

import functools
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from maxtrain.parallel.compiled.hlo import HloComputation, HloInstruction

KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "ragged-all-to-all",
    "collective-permute",
    "collective-broadcast",
)
# TPU's compiler writes what goes from slice to slice as a message to the host, whose target has ids
# of devices: groups {{100000,200000},...}, pairs {{100000->200000},...}, or, of all slices 1 and 2
# and of their devices 0 to 3, each with those of its number, {1,2}x{0:3}.
_BETWEEN_SLICES = {
    "ALL_GATHER": "all-gather",
    "ALL_REDUCE": "all-reduce",
    "REDUCE_SCATTER": "reduce-scatter",
    "ALL_TO_ALL": "all-to-all",
    "ONE_TO_ONE": "collective-permute",
}
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_TARGET = re.compile(r'_xla_megascale_target="?([{}\d,:x>-]+\})"?[,}]')
_ALL_SLICES = re.compile(r"\{([\d,]+)\}x\{(\d+):(\d+)\}")
# The first id of slice 1; that of slice 2 is twice this.
_IDS_OF_A_SLICE = 100_000
# TPU's compiler writes a reduce-scatter as an all-reduce of which a slice is taken.
_SCATTERED = "all-reduce-scatter"
_GROUPS = re.compile(
    r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|mesh\[.*?\] \{.*?\})"
)
_PAIRS = re.compile(r"source_target_pairs=(\{\{.*?\}\}|\{\})")
_IOTA = re.compile(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One collective, as one device takes part in it.

    Attributes:
        kind: one of KINDS.
        num_bytes: of its operands on a device.
        places: replica groups, or pairs of source and target, as the program has them.
        is_between_slices: it goes over the network of the hosts, and `places` has ids of devices
            until it is `placed`.
    """

    kind: str
    num_bytes: float
    places: str
    is_between_slices: bool = False

    def placed(self, ids: Sequence[int]) -> "Collective":
        """Return the collective with positions in the mesh, given the ids of the devices."""
        positions = {number: position for position, number in enumerate(ids)}
        groups = _groups_of_ids(self.places)
        return self._between([[positions[number] for number in group] for group in groups])

    def within(self, positions: Sequence[int]) -> "Collective":
        """Return the collective for a slice whose devices have these positions in the mesh: a
        program for several slices numbers the devices of one slice.
        """
        return self._between(np.array(positions)[self.groups(len(positions))].tolist())

    def _between(self, groups: list[list[int]]) -> "Collective":
        rows = [",".join(map(str, group)) for group in groups]
        return self._replace(places="{{" + "},{".join(rows) + "}}")

    def groups(self, num_devices: int) -> np.ndarray:
        """Positions in the mesh of the devices that have to do with each other, [groups, n]; of a
        permutation, [pairs, 2]."""
        return _groups(self.places, num_devices)

    def sent(self, num_devices: int) -> float:
        """Bytes that a device sends, where each piece takes the shortest known way (rings; Thakur
        et al. 2005)."""
        n = self.groups(num_devices).shape[1]
        if self.kind == "all-gather":
            return self.num_bytes * (n - 1)
        if self.kind == "all-reduce":
            return self.num_bytes * 2 * (n - 1) / n
        if self.kind in ("collective-permute", "collective-broadcast"):
            return self.num_bytes
        return self.num_bytes * (n - 1) / n

    def axes(self, mesh_shape: dict[str, int]) -> tuple[str, ...]:
        """The mesh axes along which the devices of a group differ."""
        sizes = tuple(mesh_shape.values())
        groups = self.groups(math.prod(sizes))
        places = np.array(np.unravel_index(groups, sizes))
        differs = (places != places[:, :, :1]).any(axis=(1, 2))
        return tuple(name for name, is_so in zip(mesh_shape, differs, strict=True) if is_so)


def collective(one: HloInstruction, computation: HloComputation) -> Collective | None:
    """An instruction as a collective; None: it is none, or the end of one."""
    kind = one.opcode.removesuffix("-start")
    if kind == "send":
        return _between_slices(one, computation)
    if kind not in KINDS:
        return None
    if kind == "all-reduce" and computation.name.startswith(_SCATTERED):
        kind = "reduce-scatter"
    num_bytes = sum(operand.num_bytes for operand in computation.operands(one))
    pattern = _GROUPS
    if kind == "collective-permute":
        pattern = _PAIRS
    places = pattern.search(one.attributes)
    if places is None:
        raise ValueError(f"{one.opcode} {one.name} does not say between which devices")
    return Collective(kind, num_bytes, places[1])


def _between_slices(one: HloInstruction, computation: HloComputation) -> Collective | None:
    """Return what is sent to other slices; None: it is sent elsewhere."""
    transfer = _TRANSFER.search(one.attributes)
    if transfer is None:
        return None
    kind = _BETWEEN_SLICES.get(transfer[1])
    target = _TARGET.search(one.attributes)
    if kind is None or target is None:
        raise ValueError(
            f"send {one.name} goes between slices as {transfer[1]}, which is not known"
        )
    num_bytes = sum(operand.num_bytes for operand in computation.operands(one))
    return Collective(kind, num_bytes, target[1], is_between_slices=True)


def _groups_of_ids(target: str) -> list[list[int]]:
    """Ids of the devices that have to do with each other."""
    found = _ALL_SLICES.fullmatch(target)
    if found is None:
        rows = re.findall(r"\{([\d,>-]+)\}", target)
        return [_numbers(row.replace("->", ",")) for row in rows]
    slices = _numbers(found[1])
    groups = []
    for place in range(int(found[2]), int(found[3]) + 1):
        groups.append([number * _IDS_OF_A_SLICE + place for number in slices])
    return groups


@functools.cache
def _groups(places: str, num_devices: int) -> np.ndarray:
    if places.startswith("mesh"):
        return _of_mesh(places)
    iota = _IOTA.fullmatch(places)
    if iota is not None:
        return _of_iota(iota).reshape(_numbers(iota[1]))
    if places == "{}":
        return np.arange(num_devices)[None]
    rows = [_numbers(row) for row in re.findall(r"\{([\d,]+)\}", places)]
    return np.array(rows)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _of_iota(found: re.Match[str]) -> np.ndarray:
    """The numbers of [2,4]<=[4,2]T(1,0): those below 8 as [4, 2], transposed, in their order."""
    sizes = _numbers(found[2])
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    if found[3]:
        numbers = numbers.transpose(_numbers(found[3]))
    return numbers.reshape(-1)


def _of_mesh(places: str) -> np.ndarray:
    """Parse mesh['a'=2,'b'=4] {'b'}: groups of devices that differ along b.

    'b':(2)2 is a factor of an axis: of size 2, with one of size 2 before it.
    """
    mesh, _, names = places.rpartition(" {")
    axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", mesh)}
    parts = []
    for name, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", names):
        low = int(before or 1)
        parts.append((name, low, low * int(size or axes[name])))
    # Of all factors of all axes, by the axis and the product of the factors before it.
    factors: dict[tuple[str, int], int] = {}
    for name, size in axes.items():
        cuts = {1, size}
        for other, low, high in parts:
            if other == name:
                cuts |= {low, high}
        for low, high in itertools.pairwise(sorted(cuts)):
            factors[name, low] = high // low
    within = []
    for name, low, high in parts:
        within += [key for key in factors if key[0] == name and low <= key[1] < high]
    keys = list(factors)
    inner = [keys.index(key) for key in within]
    outer = [dim for dim in range(len(keys)) if dim not in inner]
    numbers = np.arange(math.prod(axes.values()))
    ids = _IOTA.search(mesh)
    if ids is not None:
        numbers = _of_iota(ids)
    group = math.prod(factors[key] for key in within)
    split = numbers.reshape(tuple(factors.values()))
    return split.transpose([*outer, *inner]).reshape(-1, group)


def goes_on(computation: HloComputation) -> bool:
    """Return whether a fusion goes on with a collective that another one may have begun.

    TPU's compiler writes a collective that overlaps with products several times: in the fusion that
    begins it, in those that go on with it, also inside a loop, and in the one that ends it.
    """
    return computation.name.startswith("async_collective_fusion")


def ends(computation: HloComputation) -> bool:
    """Return whether a fusion ends such a collective."""
    return any(
        '"AsyncCollectiveDone"' in one.attributes for one in computation.instructions.values()
    )
