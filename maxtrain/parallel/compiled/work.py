"""Work of one device in one run of a compiled program: FLOPs of products, bytes read and written,
collectives.

XLA's own count takes a loop once, and is missing for devices that are described. Loops count as
often as they run here; of branches, the one with the most products. Custom kernels (cuDNN, Pallas)
show their bytes, but not their FLOPs.
"""

import dataclasses
import re
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np

from maxtrain.parallel.compiled.collectives import Collective, collective, ends, goes_on
from maxtrain.parallel.compiled.hlo import HloComputation, HloInstruction, HloModule, HloShape
from maxtrain.parallel.compiled.loops import LoopBody, rounds
from maxtrain.parallel.compiled.traffic import Traffic, copied_by_host

_WINDOW = re.compile(r"window=\{([^}]*)\}")
_CONTRACTED = re.compile(r'"lhs_contracting_dimensions":\[([^\]]*)\]')


@dataclasses.dataclass
class ProgramWork:
    """Sums over what runs.

    Attributes:
        flops: of matrix products, a multiply-add being two.
        memory_bytes: read from the device's main memory and written to it.
        collectives: how often each runs.
        loops_of_unknown_length: which count as one round.
        host_bytes: that go between the device and the memory of its host.
    """

    flops: float = 0.0
    memory_bytes: float = 0.0
    collectives: Counter[Collective] = dataclasses.field(default_factory=Counter)
    loops_of_unknown_length: int = 0
    host_bytes: float = 0.0

    def add(self, other: "ProgramWork", times: int = 1) -> None:
        self.flops += times * other.flops
        self.memory_bytes += times * other.memory_bytes
        self.host_bytes += times * other.host_bytes
        for one, count in other.collectives.items():
            self.collectives[one] += times * count
        self.loops_of_unknown_length += other.loops_of_unknown_length


def work_of(module: HloModule, has_small_memories: bool) -> ProgramWork:
    """Return what one run of a program does.

    Args:
        has_small_memories: arrays whose layout names another memory than the main one are beside
            the cores, as on TPUs.
    """
    return _WorkCounter(module, has_small_memories).of(LoopBody(module.entry))


class _WorkCounter:
    def __init__(self, module: HloModule, has_small_memories: bool):
        self.module = module
        self.traffic = Traffic(module, has_small_memories)
        self._flops: dict[str, float] = {}

    def of(self, place: LoopBody, before: Iterable[str] = ()) -> ProgramWork:
        """Return what one run of a computation does.

        Args:
            before: channels of collectives that fusions have begun before it.
        """
        work = ProgramWork()
        begun = set(before)
        for one in place.computation.instructions.values():
            self._add(work, one, place, begun)
        return work

    def _add(
        self, work: ProgramWork, one: HloInstruction, place: LoopBody, begun: set[str]
    ) -> None:
        module = self.module
        if one.opcode == "while":
            body = module.called(one, "body")
            assert body is not None
            times = rounds(module, one, place)
            if times is None:
                work.loops_of_unknown_length += 1
                times = 1
            work.add(self.of(LoopBody(body, one, place), begun), times)
            return
        if one.opcode == "conditional":
            branches = [self.of(LoopBody(branch)) for branch in module.branches(one)]
            work.add(max(branches, key=lambda branch: (branch.flops, branch.memory_bytes)))
            return
        # call-start: what a core beside the others does meanwhile, as the gathers of a TPU's
        # SparseCore.
        if one.opcode in ("call", "call-start", "async-start"):
            called = module.called(one) or module.called(one, "to_apply")
            assert called is not None
            work.add(self.of(LoopBody(called)))
            return
        for inner, computation in self._inside(one, place.computation):
            found = collective(inner, computation)
            if found is not None and _is_first_part(inner, computation, begun):
                work.collectives[found] += 1
        work.flops += self._flops_of(one, place.computation)
        work.memory_bytes += self.traffic.of(one, place.computation)
        work.host_bytes += copied_by_host(one)

    def _inside(
        self, one: HloInstruction, computation: HloComputation
    ) -> Iterator[tuple[HloInstruction, HloComputation]]:
        """An instruction, and all those of a fusion."""
        yield one, computation
        if one.opcode.startswith("fusion"):
            fused = self.module.called(one)
            if fused is not None:
                for inner in fused.instructions.values():
                    yield from self._inside(inner, fused)

    def _flops_of(self, one: HloInstruction, computation: HloComputation) -> float:
        if one.opcode == "dot":
            lhs = computation.instructions[one.operands[0]]
            return _dot(one.shapes[0], lhs.shapes[0], one.numbers("lhs_contracting_dims"))
        if one.opcode == "convolution":
            lhs, rhs = computation.operands(one)
            return _convolution(one, lhs.shapes[0], rhs.shapes[0])
        if one.opcode == "custom-call":
            contracted = _CONTRACTED.search(one.attributes)
            if contracted is None:
                return 0.0
            lhs = computation.instructions[one.operands[0]]
            dims = tuple(int(dim) for dim in re.findall(r"\d+", contracted[1]))
            return _dot(one.shapes[0], lhs.shapes[0], dims)
        if not one.opcode.startswith("fusion"):
            return 0.0
        fused = self.module.called(one)
        if fused is None:
            return 0.0
        if fused.name not in self._flops:
            parts = fused.instructions.values()
            self._flops[fused.name] = sum(self._flops_of(part, fused) for part in parts)
        return self._flops[fused.name]


def _is_first_part(one: HloInstruction, computation: HloComputation, begun: set[str]) -> bool:
    """Return whether a collective counts, and is not a later part of one: see `goes_on`.

    Args:
        begun: channels of those that fusions have begun.
    """
    if ends(computation):
        return False
    channel = one.attribute("channel_id") or ""
    for other in computation.instructions.values():
        if '"AsyncCollectiveStart"' in other.attributes:
            begun.add(channel)
            return True
    return not (goes_on(computation) and channel in begun)


def _dot(result: HloShape, lhs: HloShape, contracted: tuple[int, ...]) -> float:
    depth = 1
    for dim in contracted:
        depth *= lhs.dims[dim]
    return 2.0 * result.num_elements * depth


def _convolution(one: HloInstruction, lhs: HloShape, rhs: HloShape) -> float:
    """TPU's compiler writes products as convolutions, in which batched dims are spatial ones.

    Only pairs of an input and a weight that meet count, as in XLA's HloCostAnalysis.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes)
    assert labels is not None
    window = _window(one)
    pairs = 1.0
    for dim in range(len(labels[1]) - 2):
        sizes = []
        for shape, names in ((lhs, labels[1]), (rhs, labels[2]), (one.shapes[0], labels[3])):
            sizes.append(shape.dims[names.index(str(dim))])
        pairs *= _meetings(sizes[0], sizes[1], sizes[2], {k: v[dim] for k, v in window.items()})
    groups = int(one.attribute("feature_group_count") or 1)
    batch_groups = int(one.attribute("batch_group_count") or 1)
    inputs = lhs.dims[labels[1].index("f")] // groups
    outputs = rhs.dims[labels[2].index("o")]
    rows = lhs.dims[labels[1].index("b")] // batch_groups
    return 2.0 * inputs * outputs * rows * pairs


def _window(one: HloInstruction) -> dict[str, list[str]]:
    """The settings of each spatial dim, by their names."""
    found = _WINDOW.search(one.attributes)
    if found is None:
        return {}
    settings = dict(setting.split("=") for setting in found[1].split())
    return {name: values.split("x") for name, values in settings.items()}


def _meetings(size: int, weights: int, outputs: int, window: dict[str, str]) -> float:
    """Pairs of an output and a weight, along one dim, for which there is an input."""
    stride = int(window.get("stride", 1))
    before = int(window.get("pad", "0_0").split("_")[0])
    lhs_dilate = int(window.get("lhs_dilate", 1))
    rhs_dilate = int(window.get("rhs_dilate", 1))
    at_output = np.arange(outputs) * stride - before
    count = 0
    for weight in range(weights):
        at = at_output + weight * rhs_dilate
        met = (at % lhs_dilate == 0) & (at >= 0) & (at // lhs_dilate < size)
        count += int(met.sum())
    return float(count)
