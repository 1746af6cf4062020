"""Retention policy for checkpoints, and the check that the disk has space for them. Needs no
device.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from data_pipeline.base.errors import StorageError
from maxtrain.config.schema import CheckpointConfig


class StepFacts(NamedTuple):
    """Judgements about the steps of a run, which retention depends on.

    Attributes:
        confirmed: up to this step, checkpoints are known to be good by the steps after them.
        best: the steps of the best evaluations.
        copying: the step that is being copied elsewhere; None: none is.
    """

    confirmed: int
    best: set[int]
    copying: int | None


def superfluous(steps: Sequence[int], judged: StepFacts, config: CheckpointConfig) -> list[int]:
    """The steps, of these ascending ones, that the config does not keep.

    A checkpoint can only be judged by the step after it: the newest that is known to be good
    stays, whatever `checkpoint.keep` says.
    """
    kept = set(steps[-config.keep :])
    confirmed = [step for step in steps if step <= judged.confirmed]
    kept.update(confirmed[-1:])
    if config.keep_best:
        kept |= judged.best
    if judged.copying is not None:
        kept.add(judged.copying)
    every = config.keep_every
    return [step for step in steps if step not in kept and (every is None or step % every)]


class SpaceRequirement(NamedTuple):
    """The space that checkpoints take.

    Attributes:
        each: bytes of one.
        once: bytes of what is saved once for all of them.
        more: how many more there will be at a time.
        key: of the config, that says where they are.
        why: that many are needed.
    """

    each: int
    once: int
    more: int
    key: str
    why: str


def require_space(directory: Path, needed: SpaceRequirement) -> str:
    """A warning if the disk of a directory has no space for all checkpoints at a time.

    Returns:
        Empty if it has the space.

    Raises:
        StorageError: it has no space for one.
    """
    place = next(path for path in (directory, *directory.parents) if path.exists())
    free = shutil.disk_usage(place).free
    size = f"{needed.each / 1e9:,.2f} GB"
    what = f"{place} has {free / 1e9:,.2f} GB free; a checkpoint takes up to {size}"
    if needed.once:
        what += f", and the frozen parameters once {needed.once / 1e9:,.2f} GB"
    if free < needed.each + needed.once:
        raise StorageError(f"{what}. Free space, or set {needed.key} to another disk.")
    if free >= needed.each * needed.more + needed.once:
        return ""
    return f"{what}, and {needed.why} needs {needed.more} more at once. Free space, or keep fewer."
