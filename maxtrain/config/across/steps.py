"""The schedule of the learning rate, and the steps and the peak that it has."""

import dataclasses
import math
from collections.abc import Iterator

from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.schedule import (
    TO_THE_LOWEST,
    ScheduleConfig,
    length_problems,
    warmup_fits,
)

# The least share of a shortened schedule that is warm-up, if the schedule has a warm-up.
_LEAST_WARMUP = 0.1


def steps_problems(config: RunConfig) -> Iterator[str]:
    """Yield the settings that do not fit into the number of steps; with steps=auto only the plan
    knows that number.
    """
    if config.steps != "auto":
        yield from length_problems(config.schedule, config.steps)


def peak_problems(config: RunConfig) -> Iterator[str]:
    """A lowest rate above the peak."""
    schedule = config.schedule
    lowest = schedule.min_learning_rate
    peak = config.optimizer.learning_rate
    if lowest is not None and schedule.name in TO_THE_LOWEST and lowest > peak:
        yield (
            f"schedule.min_learning_rate={lowest} must be at most optimizer.learning_rate={peak}. "
            "Set schedule.min_learning_rate=null, for the share of the peak that "
            "schedule.min_lr_ratio says."
        )


def fit_warmup(config: RunConfig, num_steps: int) -> RunConfig:
    """Return the config with a warmup that fits into `num_steps` steps: its own, or a tenth of the
    steps if its own does not fit.

    The config is returned unchanged if not even a tenth fits; the checks then report it.
    """
    schedule = config.schedule
    if warmup_fits(schedule, num_steps):
        return config
    tenth = min(max(1, num_steps // 10), num_steps - 1)
    shorter = dataclasses.replace(schedule, warmup_steps=tenth)
    if tenth > schedule.warmup_steps or not warmup_fits(shorter, num_steps):
        return config
    return dataclasses.replace(config, schedule=shorter)


def shortened(schedule: ScheduleConfig, num_steps: int, steps: int) -> ScheduleConfig:
    """Return the schedule of `num_steps` with the same shape in fewer steps.

    Everything that is counted in steps shrinks alike. Only the warm-up keeps at least a tenth of
    the steps where there is room for it: a rate that is stable after 2,000 steps of warm-up would
    seem too high after two.

    Args:
        schedule: fits into `num_steps`.
        num_steps: the steps that it is meant for.
        steps: the steps to fit it into; at most `num_steps`.

    Returns:
        The schedule. Pieces may still be too short to have an update each: see `warmup_fits`.
    """
    share = steps / num_steps
    if share >= 1:
        return schedule
    warmup = schedule.warmup_steps * share
    if warmup and schedule.name != "pieces":
        room = steps - 1
        if schedule.name == "wsd":
            room = steps - math.ceil(schedule.decay_fraction * steps)
        warmup = max(warmup, min(_LEAST_WARMUP * steps, room))
    pieces = []
    for piece in schedule.pieces:
        if piece.until is not None and piece.unit == "steps":
            piece = dataclasses.replace(piece, until=piece.until * share)
        pieces.append(piece)
    timescale = schedule.timescale
    if timescale is not None:
        timescale = max(1, round(timescale * share))
    return dataclasses.replace(
        schedule,
        warmup_steps=min(round(warmup), steps - 1),
        pieces=tuple(pieces),
        timescale=timescale,
    )
