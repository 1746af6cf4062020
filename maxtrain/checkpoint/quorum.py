"""Quorum of steps on the disks of hosts: each host has the files that its process wrote, and a step
is complete if all its files are on some disk. Needs no device, and reads no files.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class LocalStep(NamedTuple):
    """Files of a step that a process has on the disk of its host.

    Attributes:
        identity: of the save, the same in all processes that took part in it.
        count: of all files of the step.
        files: those that are here, by their places in the commit record: bit i of the number is
            of file i.
    """

    identity: str
    count: int
    files: int


class CompleteStep(NamedTuple):
    """A step whose every file is on the disk of some host.

    Attributes:
        identity: of the save.
        holders: the processes that have files of it, and all its small ones.
    """

    identity: str
    holders: list[int]


def whole_steps(held: Sequence[Mapping[int, LocalStep]]) -> dict[int, CompleteStep]:
    """The steps that are whole, ascending.

    Of two saves of one step that both are (one of them is of a past that the run has left), the one
    that more processes have counts.

    Args:
        held: what each process has, by step.
    """
    found = {}
    for step in _all_steps(held):
        saves = [save for save in _saves(step, held) if _missing(save, step, held) == 0]
        if saves:
            found[step] = max(saves, key=lambda save: (len(save.holders), -save.holders[0]))
    return found


def what_is_missing(
    held: Sequence[Mapping[int, LocalStep]], hosts: Sequence[str]
) -> dict[int, str]:
    """Return what is on no disk, as text, for each step that is not complete, ascending.

    Args:
        held: what each process has, by step.
        hosts: the names of their hosts.
    """
    found = {}
    whole = whole_steps(held)
    for step in _all_steps(held):
        if step in whole:
            continue
        best = min(_saves(step, held), key=lambda save: _missing(save, step, held))
        count = held[best.holders[0]][step].count
        words = f"{_missing(best, step, held):,} of its {count:,} files are on no disk"
        others = [process for process in range(len(held)) if process not in best.holders]
        if others:
            named = ", ".join(f"process {process} on {hosts[process]}" for process in others[:8])
            more = ""
            if len(others) > 8:
                more = f" and {len(others) - 8:,} more"
            words += f"; none of it is with {named}{more}"
        found[step] = words
    return found


def _all_steps(held: Sequence[Mapping[int, LocalStep]]) -> list[int]:
    return sorted({step for theirs in held for step in theirs})


def _saves(step: int, held: Sequence[Mapping[int, LocalStep]]) -> list[CompleteStep]:
    """The saves of a step that processes have something of."""
    holders: dict[str, list[int]] = {}
    for process, theirs in enumerate(held):
        if step in theirs:
            holders.setdefault(theirs[step].identity, []).append(process)
    return [CompleteStep(identity, processes) for identity, processes in holders.items()]


def _missing(save: CompleteStep, step: int, held: Sequence[Mapping[int, LocalStep]]) -> int:
    """Return how many files of a save nobody has."""
    there = 0
    for process in save.holders:
        there |= held[process][step].files
    return held[save.holders[0]][step].count - there.bit_count()
