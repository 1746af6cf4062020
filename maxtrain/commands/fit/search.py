"""Search for the mesh, batch, remat and accumulation that fit onto devices and are fast.

Compiling takes seconds to minutes. So meshes come in the order of what they promise by
`StepLowerBounds`, and what can't be better than what fits already, or can't fit, is not compiled.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from data_pipeline.base.errors import ConfigError
from maxtrain.commands.fit.estimate import FitEstimate, batch_shape, counted_shape, fit_step
from maxtrain.commands.fit.lower_bounds import StepLowerBounds
from maxtrain.config import RunConfig, fit_to_devices
from maxtrain.config.across.pipeline import goes_row_by_row
from maxtrain.config.across.rows import rows_of_step
from maxtrain.config.rollouts import rollout_settings
from maxtrain.config.sections.mesh import num_stages, row_shards, slow_axes_of
from maxtrain.config.sections.moe import WITH_EXPERTS
from maxtrain.config.sections.remat_names import RematNamesConfig
from maxtrain.config.words import divisors
from maxtrain.parallel.hardware import slice_of
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.trainer.abstract_step import StepPrograms, least_micro_batches

# Of the axes that split more than rows and parameters. More of them is never fast.
_MOST_SPLIT = 16
# From the one that recomputes least.
REMATS = ("none", "dots", "named", "full")


class MeshAxes(NamedTuple):
    """Axes, outer to inner."""

    data: int
    stage: int
    fsdp: int
    context: int
    expert: int
    tensor: int


def meshes(config: RunConfig, num_devices: int, near: int) -> list[MeshAxes]:
    """Return the meshes of `num_devices` devices, with the rows split most first.

    Stages and slices are as the config has them; -1 stages are 1. Experts are split into any number
    of equal parts. There are one replica, as many as the config has, one of each `near` devices,
    and as many as there can be: numbers in between send no less.

    Args:
        near: devices that a faster network connects; all of them, where there is but one.
    """
    stage = max(1, config.mesh.stage)
    given = stage * math.prod(slow_axes_of(config.mesh).values())
    experts = [1]
    if config.model.family in WITH_EXPERTS and num_stages(config.mesh) <= 1:
        experts = divisors(config.model.moe.num_experts)
    found = set()
    for tensor in _powers(min(num_devices, _MOST_SPLIT)):
        for context in _powers(min(num_devices, _MOST_SPLIT)):
            for expert in experts:
                rest, left = divmod(num_devices, given * tensor * context * expert)
                if left:
                    continue
                for data in {1, config.mesh.data, num_devices // near // given, rest}:
                    if data >= 1 and rest % data == 0:
                        found.add(MeshAxes(data, stage, rest // data, context, expert, tensor))
    return sorted(found, key=_splits)


def _splits(mesh: MeshAxes) -> tuple[int, ...]:
    """Return in how many parts a mesh splits what is expensive to split."""
    inside = mesh.tensor * mesh.context
    return inside * mesh.expert, inside, mesh.context, mesh.data


def near_devices(devices: Sequence[Any]) -> int:
    """Return the number of devices that a fast network connects: those of a host of GPUs, or of a
    slice of TPUs.
    """
    if devices[0].platform == "gpu":
        places = {device.process_index for device in devices}
    else:
        places = {slice_of(device) for device in devices}
    return len(devices) // len(places)


def _powers(most: int) -> Iterator[int]:
    power = 1
    while power <= most:
        yield power
        power *= 2


def with_choice(
    config: RunConfig, mesh: MeshAxes, rows: int, accumulation: int, remat: str
) -> RunConfig:
    """The config with these settings, and without a preset, which would decide the mesh anew, or
    with what only another remat keeps."""
    kept = RematNamesConfig()
    if remat == "named":
        kept = config.model.kept
    return dataclasses.replace(
        config,
        mesh=dataclasses.replace(config.mesh, preset="none", **mesh._asdict()),
        data=dataclasses.replace(config.data, batch_size=rows),
        optimizer=dataclasses.replace(config.optimizer, accumulation=accumulation),
        model=dataclasses.replace(config.model, remat=remat, kept=kept),
    )


class MeshCandidate(NamedTuple):
    """A mesh and a batch.

    Attributes:
        seconds: of a token at least: if all overlaps, and if nothing does.
    """

    mesh: MeshAxes
    rows: int
    seconds: tuple[float, float]


class SearchResult(NamedTuple):
    """Result of a search.

    Attributes:
        fits: fastest first.
        num_tried: number of compiled choices.
        num_slower: choices of a mesh and a batch that can't be as fast as the fastest that fits.
        is_whole: nothing was left out for want of tries.
    """

    fits: list[FitEstimate]
    num_tried: int
    num_slower: int
    is_whole: bool


def search(
    config: RunConfig,
    devices: Sequence[Any],
    limit: int,
    batches: Sequence[int],
    most: int,
    begin: Callable[[int], None] = lambda num_choices: None,
    show: Callable[[FitEstimate], None] = lambda found: None,
) -> SearchResult:
    """Compiles choices of mesh, batch, remat and accumulation.

    Args:
        config: knows its vocabulary.
        batches: rows of a step (prompts, documents) to try.
        most: compilations.
        begin: gets the number of choices of a mesh and a batch.
        show: gets each that was compiled.

    Raises:
        ConfigError: no mesh divides model and batch.
    """
    choices = promising(config, devices, batches)
    begin(len(choices))
    trying = _MeshSearch(config, devices, limit, most, show)
    num_slower = 0
    problem = None
    num_possible = 0
    for choice in choices:
        if trying.is_slower(choice.seconds):
            num_slower += 1
            continue
        try:
            plain = with_choice(config, choice.mesh, choice.rows, 1, REMATS[0])
            state = bytes_on_device(StepPrograms(plain, devices).parts.abstract)
        except ConfigError as error:
            problem = problem or error
            continue
        num_possible += 1
        if state <= limit and not trying.with_mesh(choice, state):
            break
    if num_possible == 0 and problem is not None:
        raise problem
    fits = sorted(trying.fits, key=_slowness)
    return SearchResult(fits, trying.num_tried, num_slower, trying.is_whole)


def promising(
    config: RunConfig, devices: Sequence[Any], batches: Iterable[int]
) -> list[MeshCandidate]:
    """Meshes and batches that divide each other and the model, those first that take least by what
    they send at least.

    Raises:
        ConfigError: there is none.
    """
    bounds = None
    found = []
    problem = None
    for mesh in meshes(config, len(devices), near_devices(devices)):
        for rows in batches:
            try:
                plain = with_choice(config, mesh, rows, 1, REMATS[0])
                plain = fit_to_devices(plain, len(devices))
                if bounds is None:
                    bounds = StepLowerBounds(
                        plain, devices, StepPrograms(plain, devices).parts.abstract
                    )
                shape = batch_shape(plain)
                if rollout_settings(plain) is not None:
                    shape = counted_shape(StepPrograms(plain, devices), shape)
                times = bounds.least(plain, shape.rows * shape.length, shape.length)
            except ConfigError as error:
                problem = problem or error
                continue
            tokens = shape.rows * shape.length
            seconds = (times.seconds / tokens, times.without_overlap / tokens)
            found.append(MeshCandidate(mesh, rows, seconds))
    if not found:
        assert problem is not None
        raise problem
    return sorted(found, key=lambda choice: choice.seconds)


class _MeshSearch:
    """Compiles, and keeps what fits."""

    def __init__(
        self,
        config: RunConfig,
        devices: Sequence[Any],
        limit: int,
        most: int,
        show: Callable[[FitEstimate], None],
    ):
        self.config = config
        self.devices = devices
        self.limit = limit
        self.most = most
        self.show = show
        self.fits: list[FitEstimate] = []
        self.num_tried = 0
        self.is_whole = True

    def is_slower(self, seconds: tuple[float, float]) -> bool:
        """Return whether what takes at least so long for a token is slower than what fits
        already.
        """
        return any(_slowness(found)[:2] < seconds for found in self.fits)

    def with_mesh(self, choice: MeshCandidate, state: int) -> bool:
        """Tries accumulation and remat. One that recomputes more, or accumulates more, than
        another that fits is left out.

        Args:
            state: bytes on each device of what lies between steps.

        Returns:
            False: there are no tries left.
        """
        too_large: dict[str, tuple[int, int]] = {}
        fitting: set[str] = set()
        for accumulation in _accumulations(self.config, choice.mesh, choice.rows):
            for remat in REMATS:
                if fitting & set(REMATS[: REMATS.index(remat) + 1]):
                    break
                before = too_large.get(remat)
                if before is not None and self._is_hopeless(before, accumulation, state):
                    continue
                if self.num_tried == self.most:
                    self.is_whole = False
                    return False
                changed = with_choice(self.config, choice.mesh, choice.rows, accumulation, remat)
                found = self._tried(changed)
                if found.fits:
                    fitting.add(remat)
                    break
                too_large[remat] = (accumulation, found.total or found.refused or 0)
        return True

    def _tried(self, config: RunConfig) -> FitEstimate:
        self.num_tried += 1
        found = fit_step(config, self.devices, self.limit)
        self.show(found)
        if found.fits:
            self.fits.append(found)
        return found

    def _is_hopeless(self, before: tuple[int, int], accumulation: int, state: int) -> bool:
        """Return whether a step is too large even if all beside the state became smaller with the
        rows that are computed at a time.
        """
        was, needed = before
        return state + (needed - state) * was / accumulation > self.limit


def _slowness(found: FitEstimate) -> tuple[float, float, int]:
    """Seconds of a token; of equal ones, without overlap, and then bytes."""
    assert found.times is not None
    assert found.total is not None
    return (
        found.times.seconds / found.tokens,
        found.times.without_overlap / found.tokens,
        found.total,
    )


def _accumulations(config: RunConfig, mesh: MeshAxes, rows: int) -> list[int]:
    """Return how often a step may accumulate: 1, 2, 4, ... while the mesh divides the rows; once
    where more often would keep as much.
    """
    plain = with_choice(config, mesh, rows, 1, REMATS[0])
    if goes_row_by_row(plain):
        return [1]
    # Any number of rows that a balanced batch may have is a multiple of the smallest.
    counted = batch_shape(plain).rows
    if plain.data.packing == "balanced":
        counted = rows_of_step(plain)
    parts = row_shards(plain.mesh) * least_micro_batches(config)
    choices = _powers(counted // parts)
    return [count for count in choices if counted % (parts * count) == 0]
