"""Which mesh, batch, remat and accumulation fit onto devices, and are fast.

Compiling takes seconds to a minute, so what can't be better, or can't fit, is not compiled.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError
from maxtrain.config import RunConfig
from maxtrain.config.sections.mesh import row_shards, slow_axes_of
from maxtrain.fitting import Fit, batch_shape, fit_step
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.step_memory import StepPrograms, least_micro_batches

# Of the axes that split more than rows and parameters. More of them is never fast.
_MOST_SPLIT = 16
# From the one that recomputes least.
REMATS = ("none", "dots", "full")


class Mesh(NamedTuple):
    """Axes, outer to inner."""

    data: int
    stage: int
    fsdp: int
    context: int
    expert: int
    tensor: int


def meshes(config: RunConfig, num_devices: int) -> list[Mesh]:
    """Those of so many devices, with the rows split most first.

    Replicas, stages, parts of the experts and slices are as the config has them; -1 of them is 1.
    """
    data = max(1, config.mesh.data)
    stage = max(1, config.mesh.stage)
    expert = max(1, config.mesh.expert)
    given = data * stage * expert * math.prod(slow_axes_of(config.mesh).values())
    found = []
    for tensor in _powers(min(num_devices, _MOST_SPLIT)):
        for context in _powers(min(num_devices, _MOST_SPLIT)):
            rest, left = divmod(num_devices, given * tensor * context)
            if left == 0:
                found.append(Mesh(data, stage, rest, context, expert, tensor))
    return sorted(found, key=lambda mesh: (mesh.tensor * mesh.context, mesh.context))


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def with_choice(
    config: RunConfig, mesh: Mesh, rows: int, accumulation: int, remat: str
) -> RunConfig:
    """The config with these settings."""
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, **mesh._asdict()),
        data=dataclasses.replace(config.data, batch_size=rows),
        optimizer=dataclasses.replace(config.optimizer, accumulation=accumulation),
        model=dataclasses.replace(config.model, remat=remat),
    )


class Searched(NamedTuple):
    """What a search found.

    Attributes:
        fits: fastest first.
        num_tried: that were compiled.
        is_whole: nothing was left out for want of tries.
    """

    fits: list[Fit]
    num_tried: int
    is_whole: bool


def search(
    config: RunConfig,
    devices: Sequence[Any],
    limit: int,
    batches: Sequence[int],
    most: int,
    show: Callable[[Fit], None] = lambda found: None,
) -> Searched:
    """Compiles choices of mesh, batch, remat and accumulation.

    Args:
        config: knows its vocabulary.
        batches: rows of a step (prompts, documents) to try.
        most: compilations.
        show: gets each that was compiled.

    Raises:
        ConfigError: no mesh divides model and batch.
    """
    trying = _Trying(config, devices, limit, most, show)
    problem = None
    num_choices = 0
    for mesh in meshes(config, len(devices)):
        for rows in batches:
            try:
                plain = with_choice(config, mesh, rows, 1, REMATS[0])
                state = bytes_on_device(StepPrograms(plain, devices).parts.abstract)
            except ConfigError as error:
                problem = problem or error
                continue
            num_choices += 1
            if state <= limit:
                trying.with_mesh(mesh, rows, state)
    if num_choices == 0 and problem is not None:
        raise problem
    return Searched(sorted(trying.fits, key=_slowness), trying.num_tried, trying.is_whole)


class _Trying:
    """Compiles, and keeps what fits."""

    def __init__(
        self,
        config: RunConfig,
        devices: Sequence[Any],
        limit: int,
        most: int,
        show: Callable[[Fit], None],
    ):
        self.config = config
        self.devices = devices
        self.limit = limit
        self.most = most
        self.show = show
        self.fits: list[Fit] = []
        self.num_tried = 0
        self.is_whole = True

    def with_mesh(self, mesh: Mesh, rows: int, state: int) -> None:
        """Tries accumulation and remat. One that recomputes more, or accumulates more, than
        another that fits is left out.

        Args:
            state: bytes on each device of what lies between steps.
        """
        too_large: dict[str, tuple[int, int]] = {}
        fitting: set[str] = set()
        for accumulation in _accumulations(self.config, mesh, rows):
            for remat in REMATS:
                if fitting & set(REMATS[: REMATS.index(remat) + 1]):
                    break
                before = too_large.get(remat)
                if before is not None and self._is_hopeless(before, accumulation, state):
                    continue
                if self.num_tried == self.most:
                    self.is_whole = False
                    return
                asked = with_choice(self.config, mesh, rows, accumulation, remat)
                found = self._tried(asked)
                if found.fits:
                    fitting.add(remat)
                    break
                too_large[remat] = (accumulation, found.total or found.refused or 0)

    def _tried(self, config: RunConfig) -> Fit:
        self.num_tried += 1
        found = fit_step(config, self.devices, self.limit)
        self.show(found)
        if found.fits:
            self.fits.append(found)
        return found

    def _is_hopeless(self, before: tuple[int, int], accumulation: int, state: int) -> bool:
        """Whether a step is too large even if all beside the state became smaller with the rows
        that are computed at a time."""
        was, needed = before
        return state + (needed - state) * was / accumulation > self.limit


def _slowness(found: Fit) -> tuple[float, float, int]:
    """Seconds of a token; of equal ones, without overlap, and then bytes."""
    assert found.times is not None
    assert found.total is not None
    return (
        found.times.seconds / found.tokens,
        found.times.without_overlap / found.tokens,
        found.total,
    )


def _accumulations(config: RunConfig, mesh: Mesh, rows: int) -> list[int]:
    """How often a step may accumulate: 1, 2, 4, ... while the mesh divides the rows."""
    plain = with_choice(config, mesh, rows, 1, REMATS[0])
    rows_of_step = batch_shape(plain).rows
    parts = row_shards(plain.mesh) * least_micro_batches(config)
    choices = _powers(rows_of_step // parts)
    return [count for count in choices if rows_of_step % (parts * count) == 0]
