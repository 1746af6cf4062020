"""Trip counts of loops in compiled programs.

Compilers for GPUs write it down. That for TPUs does not: there it follows from what the loop starts
with, what a round adds, and what the condition compares.
"""

import math
import re
from typing import NamedTuple

from maxtrain.parallel.compiled.hlo import HloComputation, HloInstruction, HloModule

_KNOWN = re.compile(r'known_trip_count":\{"n":"(\d+)"')
# What hands a number on.
_COPIES = {
    "copy",
    "copy-start",
    "copy-done",
    "bitcast",
    "convert",
    "reshape",
    "optimization-barrier",
}


class LoopBody(NamedTuple):
    """A computation, where it is the body of a loop.

    Attributes:
        loop: None: it is no loop's body.
        outer: where the loop is.
    """

    computation: HloComputation
    loop: HloInstruction | None = None
    outer: "LoopBody | None" = None


class _LoopCounter(NamedTuple):
    """A whole number: an element of a loop's state, if it is one, plus a constant."""

    element: int | None
    constant: int


def rounds(module: HloModule, loop: HloInstruction, place: LoopBody) -> int | None:
    """Return how often the body of a loop runs; None if that cannot be derived.

    Args:
        place: where the loop is.
    """
    known = _KNOWN.search(loop.attributes)
    if known is not None:
        return int(known[1])
    condition = module.called(loop, "condition")
    body = module.called(loop, "body")
    assert condition is not None
    assert body is not None
    sides = _compared(module, condition)
    if sides is None:
        return None
    counter, bound = sides
    if counter.element is None:
        return None
    start = _at_start(module, loop, counter.element, place)
    step = _after_round(module, body, counter.element)
    if bound.element is None:
        end: int | None = bound.constant
    else:
        end = _kept(module, loop, body, bound.element, place)
        if end is not None:
            end += bound.constant
    if start is None or end is None or step is None:
        return None
    if step.element != counter.element or step.constant < 1:
        return None
    return max(0, math.ceil((end - start - counter.constant) / step.constant))


def _compared(
    module: HloModule, condition: HloComputation
) -> tuple[_LoopCounter, _LoopCounter] | None:
    """Return what must be less, and than what."""
    root = condition.root
    computation = condition
    given = None
    if root.opcode == "fusion":
        given = [_number(module, condition, name) for name in root.operands]
        fused = module.called(root)
        assert fused is not None
        computation = fused
        root = fused.root
    if root.opcode != "compare" or "direction=LT" not in root.attributes:
        return None
    less = _number(module, computation, root.operands[0], given)
    more = _number(module, computation, root.operands[1], given)
    if less is None or more is None:
        return None
    return less, more


def _number(
    module: HloModule,
    computation: HloComputation,
    name: str,
    given: list[_LoopCounter | None] | None = None,
) -> _LoopCounter | None:
    """An instruction as a number; None: it is none of the simple ones.

    Args:
        given: what the parameters of a fusion are; None: the parameter is the state of a loop.
    """
    one = computation.instructions[name]
    if one.opcode == "constant":
        if re.fullmatch(r"-?\d+", one.inside):
            return _LoopCounter(None, int(one.inside))
        return None
    if one.opcode in _COPIES:
        return _number(module, computation, one.operands[0], given)
    if one.opcode == "parameter" and given is not None:
        return given[int(one.inside)]
    if one.opcode == "get-tuple-element":
        index = int(one.attribute("index") or 0)
        source = computation.instructions[one.operands[0]]
        if source.opcode == "parameter" and given is None:
            return _LoopCounter(index, 0)
        if source.opcode == "tuple":
            return _number(module, computation, source.operands[index], given)
        return None
    if one.opcode == "add":
        return _sum(*(_number(module, computation, name, given) for name in one.operands))
    if one.opcode == "fusion":
        fused = module.called(one)
        assert fused is not None
        inner = [_number(module, computation, name, given) for name in one.operands]
        return _number(module, fused, fused.root.name, inner)
    return None


def _sum(a: _LoopCounter | None, b: _LoopCounter | None) -> _LoopCounter | None:
    if a is None or b is None or (a.element is not None and b.element is not None):
        return None
    element = b.element
    if a.element is not None:
        element = a.element
    return _LoopCounter(element, a.constant + b.constant)


def _after_round(module: HloModule, body: HloComputation, element: int) -> _LoopCounter | None:
    """An element of the state after a round."""
    if body.root.opcode != "tuple":
        return None
    return _number(module, body, body.root.operands[element])


def _at_start(module: HloModule, loop: HloInstruction, element: int, place: LoopBody) -> int | None:
    """An element of the state before the first round."""
    state = place.computation.instructions[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    number = _number(module, place.computation, state.operands[element])
    if number is None:
        return None
    if number.element is None:
        return number.constant
    # It is an element of the state of the loop around this one.
    if place.loop is None or place.outer is None:
        return None
    kept = _kept(module, place.loop, place.computation, number.element, place.outer)
    if kept is None:
        return None
    return kept + number.constant


def _kept(
    module: HloModule, loop: HloInstruction, body: HloComputation, element: int, place: LoopBody
) -> int | None:
    """An element of the state that no round changes."""
    if _after_round(module, body, element) != _LoopCounter(element, 0):
        return None
    return _at_start(module, loop, element, place)
