"""Which mesh, batch, remat and accumulation fit onto devices, and are fast.

Compiling takes seconds to a minute, so what can't be better is left out: a step that keeps all
activations and accumulates least needs no slower one of the same mesh, and a state that is too
large for a device needs no compiling.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from data_pipeline.errors import ConfigError
from maxtrain.config import RunConfig
from maxtrain.fitting import Fit, batch_shape, fit_step
from maxtrain.parallel.memory import bytes_on_device
from maxtrain.step_memory import StepPrograms

# Of the axes that split more than rows and parameters. More of them is never fast.
_MOST_SPLIT = 16
# From the one that recomputes least.
REMATS = ("none", "dots", "full")


class Mesh(NamedTuple):
    """Axes, outer to inner."""

    data: int
    fsdp: int
    context: int
    tensor: int


def meshes(config: RunConfig, num_devices: int) -> list[Mesh]:
    """Those of so many devices, with the rows split most first.

    Replicas (mesh.data) are as the config has them; -1 of them is 1.
    """
    data = max(1, config.mesh.data)
    found = []
    for tensor in _powers(min(num_devices, _MOST_SPLIT)):
        for context in _powers(min(num_devices, _MOST_SPLIT)):
            rest, left = divmod(num_devices, data * tensor * context)
            if left == 0:
                found.append(Mesh(data, rest, context, tensor))
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
    fits: list[Fit] = []
    tried = 0
    problem = None
    is_whole = True
    num_meshes = 0
    for mesh in meshes(config, len(devices)):
        for rows in batches:
            try:
                choices = _accumulations(config, mesh, rows, devices, limit)
            except ConfigError as error:
                problem = problem or error
                continue
            num_meshes += 1
            found: dict[str, Fit] = {}
            for accumulation in choices:
                for remat in REMATS:
                    # One that recomputes less, or was found with less accumulation, is better.
                    if remat in found or "none" in found:
                        continue
                    if tried == most:
                        is_whole = False
                        break
                    tried += 1
                    asked = with_choice(config, mesh, rows, accumulation, remat)
                    one = fit_step(asked, devices, limit)
                    show(one)
                    if one.fits:
                        found[remat] = one
                        break
            fits += found.values()
    if num_meshes == 0 and problem is not None:
        raise problem
    return Searched(sorted(fits, key=_slowness), tried, is_whole)


def _slowness(found: Fit) -> tuple[float, float, int]:
    """Seconds of a token; of equal ones, without overlap, and then bytes."""
    assert found.times is not None
    assert found.total is not None
    return (
        found.times.seconds / found.tokens,
        found.times.without_overlap / found.tokens,
        found.total,
    )


def _accumulations(
    config: RunConfig, mesh: Mesh, rows: int, devices: Sequence[Any], limit: int
) -> list[int]:
    """How often a step may accumulate: 1, 2, 4, ... while the mesh divides the rows; none if the
    state alone is too large."""
    plain = with_choice(config, mesh, rows, 1, REMATS[0])
    state = StepPrograms(plain, devices).parts.abstract
    if bytes_on_device(state) > limit:
        return []
    parts = mesh.data * mesh.fsdp
    rows_of_step = batch_shape(plain).rows
    found = []
    for count in _powers(rows_of_step // parts):
        if rows_of_step % (parts * count) == 0:
            found.append(count)
    return found
