"""Bytes that instructions of a compiled program read from the main memory of a device and write to
it.

What is fused stays in registers: a fusion reads its operands and writes its result. Of an operand
of which it only takes a slice, that slice counts, and of a result that is an operand with another
slice in it, that slice, as in XLA's HloCostAnalysis. Caches are not known, so this is what a device
without any would move.
"""

from typing import NamedTuple

from maxtrain.parallel.compiled.collectives import collective, ends, goes_on
from maxtrain.parallel.compiled.hlo import HloComputation, HloInstruction, HloModule, HloShape

# Names for what is there already, and ends of what has been counted at its start.
_NOTHING = {
    "parameter",
    "constant",
    "tuple",
    "get-tuple-element",
    "bitcast",
    "after-all",
    "call-update",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "opt-barrier",
    "add-dependency",
    "domain",
}
_VIEWS = {"bitcast", "reshape", "convert", "copy"}
_SLICES = {"slice", "dynamic-slice", "gather"}
# The space of the memory of a host, as layouts name it: xla's Layout::kHostMemorySpace.
_HOST = 5


def copied_by_host(one: HloInstruction) -> float:
    """Bytes that an instruction brings from the memory of a host, or there."""
    if one.opcode == "dynamic-slice-start":
        # (operand, indices), result, what belongs to the launch.
        source = one.shapes[0]
        target = one.shapes[-2]
    elif one.opcode == "dynamic-update-slice-start":
        # (operand, update, indices), result, what belongs to the launch.
        source = one.shapes[1]
        target = one.shapes[0]
    elif one.opcode == "copy-start":
        target, source, *_ = one.shapes
    else:
        return 0.0
    if (source.space == _HOST) == (target.space == _HOST):
        return 0.0
    # Of the larger one, it is a slice.
    return min(source.num_bytes, target.num_bytes)


class _FusionTraffic(NamedTuple):
    """Memory traffic of a fused computation.

    Attributes:
        read: of each parameter, in bytes.
        written: of the result.
    """

    read: list[float]
    written: float


class Traffic:
    """Counts bytes of a program.

    Args:
        has_small_memories: as of `work_of`.
    """

    def __init__(self, module: HloModule, has_small_memories: bool):
        self._module = module
        self._has_small_memories = has_small_memories
        self._fused: dict[str, _FusionTraffic] = {}

    def of(self, one: HloInstruction, computation: HloComputation) -> float:
        """Bytes that one run of an instruction moves."""
        opcode = one.opcode
        if opcode in _NOTHING or opcode.endswith("-done"):
            return 0.0
        operands = list(computation.operands(one))
        if opcode == "custom-call" and not operands:
            return 0.0
        if opcode.startswith("fusion"):
            return self._of_fusion(one, operands)
        if opcode == "copy-start":
            return sum(self._bytes(shape) for shape in one.shapes[:2])
        found = collective(one, computation)
        if found is not None:
            # What is sent is read, and as much is written as the operands or the results have.
            results = sum(map(self._bytes, one.shapes))
            if opcode.endswith("-start") or opcode == "send":
                results -= found.num_bytes
            return found.num_bytes + max(0.0, results)
        if opcode in _SLICES:
            return 2 * self._all(one)
        if opcode == "dynamic-update-slice":
            return 2 * self._all(operands[1])
        if opcode == "scatter":
            return 2 * self._all(operands[-1])
        return self._all(one) + sum(self._all(operand) for operand in operands)

    def _bytes(self, shape: HloShape) -> float:
        if self._has_small_memories and shape.space:
            return 0.0
        return shape.num_bytes

    def _all(self, one: HloInstruction) -> float:
        return sum(self._bytes(shape) for shape in one.shapes)

    def _of_fusion(self, one: HloInstruction, operands: list[HloInstruction]) -> float:
        computation = self._module.called(one)
        if computation is None:
            return 0.0
        fused = self._of_fused(computation)
        total = 0.0
        for operand, read in zip(operands, fused.read, strict=True):
            # Operands in other memories are not read from the main one.
            total += min(read, self._all(operand))
        shapes = one.shapes
        if one.opcode == "fusion-start":
            # Operands come first, and what belongs to the launch last.
            shapes = computation.root.shapes
        return total + min(fused.written, sum(map(self._bytes, shapes)))

    def _of_fused(self, computation: HloComputation) -> _FusionTraffic:
        if computation.name not in self._fused:
            read = [self._read(one, computation) for one in computation.parameters()]
            written = self._written(computation)
            if ends(computation):
                # Counted where it began.
                read = [0.0] * len(read)
                written = 0.0
            self._fused[computation.name] = _FusionTraffic(read, written)
        return self._fused[computation.name]

    def _read(self, parameter: HloInstruction, computation: HloComputation) -> float:
        """Bytes of a parameter that are read, without regard to where it lies."""
        whole = parameter.num_bytes
        total = 0.0
        for user in computation.instructions.values():
            if parameter.name not in user.operands:
                continue
            if goes_on(computation) and self._is_handed_on(user, computation):
                continue
            is_first = user.operands[0] == parameter.name
            if user.opcode in _SLICES and is_first:
                total += user.num_bytes
            elif user.opcode == "dynamic-update-slice" and is_first:
                # It stays where it is.
                continue
            elif user.opcode in _VIEWS and user is not computation.root:
                share = self._read(user, computation) / max(1.0, user.num_bytes)
                total += share * whole
            elif user.opcode == "fusion":
                inner = self._module.called(user)
                assert inner is not None
                index = user.operands.index(parameter.name)
                total += self._of_fused(inner).read[index]
            else:
                return whole
        return min(total, whole)

    def _written(self, computation: HloComputation) -> float:
        root = computation.root
        if root.opcode != "tuple":
            return self._written_by(root, computation)
        results = list(computation.operands(root))
        if goes_on(computation):
            # Handed on where they lie.
            results = [one for one in results if not self._is_handed_on(one, computation)]
        return sum(self._written_by(one, computation) for one in results)

    def _is_handed_on(self, one: HloInstruction, computation: HloComputation) -> bool:
        """Return whether an instruction is of the collective that a fusion goes on with."""
        if one.opcode == "parameter" or one is computation.root:
            return True
        return collective(one, computation) is not None

    def _written_by(self, one: HloInstruction, computation: HloComputation) -> float:
        source = one
        while source.opcode in _VIEWS:
            source = computation.instructions[source.operands[0]]
        if source.opcode == "dynamic-update-slice":
            return computation.instructions[source.operands[1]].num_bytes
        if source.opcode == "fusion":
            inner = self._module.called(source)
            assert inner is not None
            return min(one.num_bytes, self._of_fused(inner).written)
        return one.num_bytes
