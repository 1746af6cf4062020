"""The section `schedule`, and what must hold inside it."""

import dataclasses
from collections.abc import Iterator
from typing import Literal

from data_pipeline.base.config_key import AnyValueExcept, UsedBy, key
from data_pipeline.base.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class PieceConfig:
    """One piece of a learning-rate schedule; rates are factors of the peak,
    optimizer.learning_rate.
    """

    name: Literal["constant", "linear", "cosine", "exponential", "inverse_sqrt", "polynomial"] = (
        key("linear", "shape of the piece")
    )
    until: float | None = key(
        None,
        "end of the piece, counted from the start of the run; null: the end of the run",
        above=0,
    )
    unit: Literal["steps", "fraction"] = key(
        "steps", "unit of `until`; fraction: share of all steps"
    )
    start: float | None = key(
        None,
        "rate of the first update, as a factor of the peak; null: the last rate of the piece "
        "before",
        low=0,
        high=1e6,
    )
    end: float = key(
        0.0,
        "rate of the last update, as a factor of the peak; inverse_sqrt: the lowest rate",
        low=0,
        high=1e6,
        used_by=UsedBy(
            {"schedule.pieces[0].name": AnyValueExcept("constant")},
            "{key}={value} is not for a constant piece, which ends as it starts. "
            "Set {reader}=linear, or leave it out.",
        ),
    )
    power: float = key(
        2.0,
        "exponent of the polynomial: the share of updates that is left is raised to it",
        above=0,
        high=1000,
        used_by=UsedBy({"schedule.pieces[0].name": ("polynomial",)}),
    )


_FOR_INVERSE_SQRT = (
    "{key}={value} is for inverse_sqrt, not for {cause}. "
    "Set schedule.name=inverse_sqrt, or leave it out."
)
_NAME = "schedule.name={config.schedule.name}"
_INVERSE_SQRT = (
    UsedBy({"schedule.name": ("inverse_sqrt", "pieces")}, _FOR_INVERSE_SQRT, _NAME),
    UsedBy(
        {"schedule.name": AnyValueExcept("pieces"), "schedule.pieces[*].name": ("inverse_sqrt",)},
        _FOR_INVERSE_SQRT,
        _NAME,
        help="a piece named inverse_sqrt if it is pieces",
    ),
)
# Schedules that end at a lowest rate.
TO_THE_LOWEST = ("linear", "cosine", "exponential", "inverse_sqrt", "polynomial", "wsd")


@dataclasses.dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate over the updates of the run. The horizon is the number of steps of the
    plan."""

    name: Literal[
        "constant", "linear", "cosine", "exponential", "inverse_sqrt", "polynomial", "wsd", "pieces"
    ] = key(
        "cosine",
        "learning-rate schedule after the warmup; wsd: stable, then linear decay; see "
        "train_step/schedule.py",
    )
    warmup_steps: int = key(
        100,
        "steps of linear warmup; a tenth of the run if it is too long and not set for this run",
        low=0,
    )
    min_lr_ratio: float = key(
        0.1,
        "learning rate at the end of the decay, as a share of the peak",
        low=0,
        high=1,
        used_by=(
            UsedBy({"schedule.name": TO_THE_LOWEST}),
            UsedBy(
                {"schedule.min_learning_rate": (None,)},
                "{key}={value} is not used with {cause}, which is the rate itself. "
                "Set schedule.min_learning_rate=null, or leave it out.",
            ),
        ),
    )
    min_learning_rate: float | None = key(
        None,
        "learning rate at the end of the decay, instead of min_lr_ratio; null: use min_lr_ratio",
        low=0,
        used_by=UsedBy({"schedule.name": TO_THE_LOWEST}),
    )
    decay_fraction: float = key(
        0.2,
        "share of the run in which the learning rate decays",
        above=0,
        high=1,
        used_by=UsedBy({"schedule.name": ("wsd",)}),
    )
    power: float = key(
        2.0,
        "exponent of the polynomial: the share of updates that is left is raised to it",
        above=0,
        high=1000,
        used_by=UsedBy({"schedule.name": ("polynomial",)}),
    )
    timescale: int | None = key(
        None,
        "updates of inverse_sqrt after which the rate is 1 / sqrt(2) of its start; null: the "
        "number of updates before it",
        low=1,
        used_by=_INVERSE_SQRT,
    )
    pieces: tuple[PieceConfig, ...] = key(
        (),
        "pieces of the schedule after the warmup, in order",
        used_by=UsedBy({"schedule.name": ("pieces",)}),
    )


def pieces_problems(schedule: ScheduleConfig) -> Iterator[str]:
    """A schedule of pieces without any."""
    if schedule.name == "pieces" and not schedule.pieces:
        yield (
            "schedule.name=pieces needs at least one piece, but schedule.pieces is empty. "
            "Set for example 'schedule.pieces=[{name: constant, until: 0.8, unit: fraction}, "
            "{name: linear}]'."
        )


def warmup_fits(schedule: ScheduleConfig, num_steps: int) -> bool:
    """Return whether the warmup leaves room for what follows it."""
    return not list(length_problems(schedule, num_steps))


def length_problems(schedule: ScheduleConfig, num_steps: int) -> Iterator[str]:
    """Yield what does not fit into `num_steps` steps: the first problem only."""
    warmup = f"schedule.warmup_steps={schedule.warmup_steps}"
    if schedule.warmup_steps >= num_steps:
        yield (
            f"{warmup} must be less than steps={num_steps}. "
            f"Set schedule.warmup_steps to at most {num_steps - 1}, or more steps."
        )
    elif schedule.name == "wsd":
        decay = schedule.decay_fraction * num_steps
        if schedule.warmup_steps + decay > num_steps:
            most = 1 - schedule.warmup_steps / num_steps
            yield (
                f"{warmup} and schedule.decay_fraction={schedule.decay_fraction} "
                f"are more than steps={num_steps} together. "
                f"Set schedule.decay_fraction to at most {most:.3g}."
            )
    elif schedule.name == "pieces" and schedule.pieces:
        try:
            piece_borders(schedule, num_steps)
        except ConfigError as error:
            yield from error.problems


def piece_borders(schedule: ScheduleConfig, num_steps: int) -> list[int]:
    """The index of the first update of each piece after warm-up, and `num_steps`, which the last
    piece ends with.

    Raises:
        ConfigError: a piece without updates, or a last one that ends before the run.
    """
    *ends, end_of_last = [_end(piece, num_steps) for piece in schedule.pieces]
    if end_of_last is not None:
        key = f"schedule.pieces[{len(ends)}].until"
        raise ConfigError(
            f"{key}={schedule.pieces[-1].until} would end the last piece, which lasts until the "
            "run ends. Add a piece after it, such as {name: constant}, or leave it out."
        )
    borders = [min(schedule.warmup_steps, num_steps)]
    for index, end in enumerate([*ends, num_steps]):
        if end is None:
            key = f"schedule.pieces[{index}].until"
            raise ConfigError(f"{key} is null, but a piece follows. Set {key}=STEPS.")
        latest = num_steps
        if index < len(ends):
            latest = num_steps - 1
        if not borders[-1] < end <= latest:
            raise ConfigError(_no_room(schedule, index, borders, end, num_steps))
        borders.append(end)
    return borders


def _end(piece: PieceConfig, num_steps: int) -> int | None:
    """Return the update that a piece ends before, counted from the start of the run; None if the
    piece has no end of its own.
    """
    if piece.until is None:
        return None
    if piece.unit == "fraction":
        return round(piece.until * num_steps)
    return round(piece.until)


def _no_room(
    schedule: ScheduleConfig, index: int, borders: list[int], end: int, num_steps: int
) -> str:
    """The problem of a piece that ends here, after pieces with these borders."""
    name = f"schedule.pieces[{index}]"
    if schedule.pieces[index].until is not None:
        name = f"{name}.until={schedule.pieces[index].until}"
    before = f"schedule.pieces[{index - 1}]"
    if index == 0:
        before = f"warm-up (schedule.warmup_steps={borders[0]})"
    return (
        f"{name} ends at step {end:,}, but must end after {before}, which ends at "
        f"{borders[-1]:,}, and leave room for those behind it in the {num_steps:,} steps. "
        "Set the ends of the pieces so that each has updates."
    )
