"""The learning rate of each update: warmup, then the pieces of the schedule, up to the plan's end.

The optimizer's state counts updates, so a skipped step does not advance the schedule.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import ScheduleConfig
from maxtrain.config.sections.schedule import piece_borders


class _SchedulePiece(NamedTuple):
    """Consecutive updates whose rate goes from `start` at the first of them to `end` at the
    last."""

    name: str
    # Number of updates.
    length: int
    start: float
    end: float
    # Exponent of a polynomial piece.
    power: float = 1.0
    # Timescale of an inverse_sqrt piece, in updates.
    timescale: int = 1


def make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Return the learning rate of the updates with index 0 ... num_steps - 1.

    Warm-up goes in equal parts from peak / warmup_steps to the peak. With s of n updates done since
    then and low the `lowest_rate`, which the last update has:

        constant       peak
        linear         low + (peak - low) (1 - s / (n - 1))
        polynomial     low + (peak - low) (1 - s / (n - 1)) ** power
        cosine         low + (peak - low) (1 + cos(pi s / (n - 1))) / 2
        exponential    peak (low / peak) ** (s / (n - 1))
        inverse_sqrt   max(low, peak sqrt(t / (t + s))) with t = timescale
        wsd            peak, and then linear over the last decay_fraction of the run
        pieces         one of these after another, between factors of the peak

    Raises:
        ConfigError: pieces do not fit into the run, or an exponential piece starts or ends at 0.
    """
    warmup = min(config.warmup_steps, num_steps)
    left = num_steps - warmup
    low = lowest_rate(config, peak)
    timescale = config.timescale or max(1, warmup)
    if config.name == "pieces":
        pieces = _pieces(config, peak, num_steps)
    elif config.name == "wsd":
        decay = min(round(config.decay_fraction * num_steps), left)
        pieces = [
            _SchedulePiece("constant", left - decay, peak, peak),
            _SchedulePiece("linear", decay, peak, low),
        ]
    else:
        pieces = [_SchedulePiece(config.name, left, peak, low, config.power, timescale)]
    if warmup:
        pieces.insert(0, _SchedulePiece("linear", warmup, peak / warmup, peak))
    borders = [sum(piece.length for piece in pieces[:i]) for i in range(1, len(pieces))]
    return optax.join_schedules([_curve(piece) for piece in pieces], borders)


def lowest_rate(config: ScheduleConfig, peak: float) -> float:
    """Return the rate of the last update: min_learning_rate, or a share of the peak."""
    if config.min_learning_rate is not None:
        return config.min_learning_rate
    return config.min_lr_ratio * peak


def _pieces(config: ScheduleConfig, peak: float, num_steps: int) -> list[_SchedulePiece]:
    """Return the pieces of a schedule that the config gives piece by piece."""
    borders = piece_borders(config, num_steps)
    pieces = []
    # The rate at the end of the piece before, as a share of the peak.
    last = 1.0
    for piece, first, end in zip(config.pieces, borders, borders[1:]):
        start = piece.start
        if start is None:
            start = last
        made = _SchedulePiece(
            piece.name,
            end - first,
            peak * start,
            peak * piece.end,
            piece.power,
            config.timescale or max(1, first),
        )
        pieces.append(made)
        last = float(np.asarray(_curve(made)(end - first - 1))) / peak
    return pieces


def _curve(piece: _SchedulePiece) -> optax.Schedule:
    """Return the rate of the updates with index 0 ... length - 1 of a piece."""
    start = piece.start
    end = piece.end
    span = max(1, piece.length - 1)
    if piece.name == "constant":
        return optax.constant_schedule(start)
    if piece.name == "exponential":
        if min(start, end) <= 0:
            rule = f"an exponential curve goes from {start} to {end}, but neither may be 0"
            fix = "Set schedule.min_lr_ratio, or `start` and `end` of the piece, to more than 0"
            raise ConfigError(f"schedule: {rule}. {fix}.")
        return optax.exponential_decay(start, span, end / start)
    if piece.name == "inverse_sqrt":
        return _inverse_sqrt(piece)
    if piece.name == "cosine":
        return _cosine(start, end, span)
    if piece.name == "linear":
        return optax.polynomial_schedule(start, end, 1.0, span)
    if piece.name == "polynomial":
        return optax.polynomial_schedule(start, end, piece.power, span)
    raise AssertionError(f"schedule.name={piece.name} has no curve")


def _inverse_sqrt(piece: _SchedulePiece) -> optax.Schedule:
    timescale = piece.timescale

    def rate(s: ArrayLike) -> ArrayLike:
        share = jnp.sqrt(timescale / (timescale + jnp.maximum(s, 0)))
        return jnp.maximum(piece.end, piece.start * share)

    return rate


def _cosine(start: float, end: float, span: int) -> optax.Schedule:
    if start:
        return optax.cosine_decay_schedule(start, span, alpha=end / start)
    # Optax's curve is a multiple of its start value, so a rise from 0 is a mirrored fall.
    down = optax.cosine_decay_schedule(end, span)

    def up(s: ArrayLike) -> ArrayLike:
        return end - down(s)

    return up
