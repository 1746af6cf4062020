"""The schedule of the learning rate, and the steps and the peak that it has."""

import dataclasses
from collections.abc import Iterator

from maxtrain.config.schema import RunConfig
from maxtrain.config.sections.schedule import TO_THE_LOWEST, length_problems, warmup_fits


def steps_problems(config: RunConfig) -> Iterator[str]:
    """What does not fit into the steps; with steps=auto only the plan knows how many there are."""
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
    """The config with a warm-up that a run of so many steps has room for: its own, or a tenth of
    them if that does not fit.

    Unchanged if not even that fits, which the checks then say.
    """
    schedule = config.schedule
    if warmup_fits(schedule, num_steps):
        return config
    tenth = min(max(1, num_steps // 10), num_steps - 1)
    shorter = dataclasses.replace(schedule, warmup_steps=tenth)
    if tenth > schedule.warmup_steps or not warmup_fits(shorter, num_steps):
        return config
    return dataclasses.replace(config, schedule=shorter)
