"""The text of an optimized XLA program, as computations of instructions.

`jax.stages.Compiled.as_text` prints one instruction a line; the format is described at
https://openxla.org/xla/hlo_dumps. Only what counting needs is read.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

# Of one number. Types that are not here, such as tokens, take no memory.
_BYTES = {
    "pred": 1.0,
    "s4": 0.5,
    "u4": 0.5,
    "s8": 1.0,
    "u8": 1.0,
    "f8e4m3fn": 1.0,
    "f8e5m2": 1.0,
    "f8e4m3": 1.0,
    "f8e8m0fnu": 1.0,
    "f4e2m1fn": 0.5,
    "s16": 2.0,
    "u16": 2.0,
    "f16": 2.0,
    "bf16": 2.0,
    "s32": 4.0,
    "u32": 4.0,
    "f32": 4.0,
    "s64": 8.0,
    "u64": 8.0,
    "f64": 8.0,
    "c64": 8.0,
    "c128": 16.0,
}
_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_LINE = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_SPACE = re.compile(r"S\((\d+)\)")
_NAME = re.compile(r"%([\w.\-]+)")


class HloShape(NamedTuple):
    """Shape of one array on one device.

    Attributes:
        space: the memory that it lies in, as the layout says: 0 is the device's main one. On TPUs,
            all others are small ones beside the cores.
    """

    dtype: str
    dims: tuple[int, ...]
    space: int = 0

    @property
    def num_elements(self) -> int:
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def num_bytes(self) -> float:
        return self.num_elements * _BYTES.get(self.dtype, 0.0)


class HloInstruction(NamedTuple):
    """One line.

    Attributes:
        shapes: of the result; those of a tuple one after the other.
        operands: names of others in the same computation.
        inside: what is between the parentheses of the operands, such as the value of a constant.
        attributes: the text behind them.
    """

    name: str
    opcode: str
    shapes: tuple[HloShape, ...]
    operands: tuple[str, ...]
    inside: str
    attributes: str

    @property
    def num_bytes(self) -> float:
        return sum(shape.num_bytes for shape in self.shapes)

    def attribute(self, name: str) -> str | None:
        """The name of the computation that an attribute names, or a number; None: there is none."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        if found is None:
            return None
        return found[1]

    def numbers(self, name: str) -> tuple[int, ...]:
        """The numbers of an attribute such as dimensions={0,2}; empty if there is none."""
        found = re.search(rf"\b{name}=\{{([\d,]*)\}}", self.attributes)
        if found is None or not found[1]:
            return ()
        return tuple(int(number) for number in found[1].split(","))


class HloComputation(NamedTuple):
    """A list of instructions, each after its operands."""

    name: str
    instructions: dict[str, HloInstruction]
    root: HloInstruction

    def parameters(self) -> list[HloInstruction]:
        """Return the parameters in their order."""
        found = [one for one in self.instructions.values() if one.opcode == "parameter"]
        return sorted(found, key=lambda one: int(one.inside))

    def operands(self, instruction: HloInstruction) -> Iterator[HloInstruction]:
        for name in instruction.operands:
            yield self.instructions[name]


class HloModule(NamedTuple):
    """A whole program."""

    computations: dict[str, HloComputation]
    entry: HloComputation

    def called(
        self, instruction: HloInstruction, attribute: str = "calls"
    ) -> HloComputation | None:
        """The computation that an attribute names."""
        name = instruction.attribute(attribute)
        if name is None:
            return None
        return self.computations[name]

    def branches(self, conditional: HloInstruction) -> list[HloComputation]:
        """Return the branches of a conditional."""
        names = []
        for name in ("true_computation", "false_computation"):
            found = conditional.attribute(name)
            if found is not None:
                names.append(found)
        several = re.search(r"branch_computations=\{([^}]*)\}", conditional.attributes)
        if several is not None:
            names += _NAME.findall(several[1])
        return [self.computations[name] for name in names]


def parse(text: str) -> HloModule:
    """Reads the text of a compiled program.

    Raises:
        ValueError: it has no entry.
    """
    computations: dict[str, HloComputation] = {}
    entry = None
    name = ""
    is_entry = False
    instructions: dict[str, HloInstruction] = {}
    root = None
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header is not None:
            is_entry = header[1] is not None
            name = header[2]
            instructions = {}
            root = None
            continue
        # What another core does ends with the name of that core.
        if (line == "}" or line.startswith("}, execution_thread=")) and root is not None:
            computations[name] = HloComputation(name, instructions, root)
            if is_entry:
                entry = computations[name]
            continue
        found = _LINE.match(line)
        if found is None:
            continue
        one = _instruction(found[2], found[3])
        instructions[one.name] = one
        if found[1] is not None:
            root = one
    if entry is None:
        raise ValueError("the text of a program must have an ENTRY. Give that of a compiled one.")
    return HloModule(computations, entry)


def _instruction(name: str, text: str) -> HloInstruction:
    """Parse the text behind the equals sign: a shape, an opcode, operands, attributes."""
    if text.startswith("("):
        end = _closing(text, 0) + 1
    else:
        end = text.index(" ")
    shape = text[:end]
    opening = text.index("(", end)
    opcode = text[end:opening].strip()
    closing = _closing(text, opening)
    inside = text[opening + 1 : closing]
    return HloInstruction(
        name, opcode, shapes_of(shape), tuple(_NAME.findall(inside)), inside, text[closing + 1 :]
    )


def shapes_of(text: str) -> tuple[HloShape, ...]:
    """All arrays of a shape, such as (f32[2,3]{1,0}, s32[])."""
    found = []
    for dtype, dims, layout in _ARRAY.findall(text):
        space = _SPACE.search(layout)
        sizes = tuple(int(dim.removeprefix("<=")) for dim in dims.split(",") if dim)
        found.append(HloShape(dtype, sizes, int(space[1]) if space else 0))
    return tuple(found)


def _closing(text: str, opening: int) -> int:
    """Return where the parenthesis at `opening` is closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opening):
        if found[0] == "(":
            depth += 1
        else:
            depth -= 1
        if depth == 0:
            return found.start()
    raise ValueError(f"an instruction without its closing parenthesis: {text[:80]!r}")
