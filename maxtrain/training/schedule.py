"""The learning rate of each update: warm-up, then the pieces of the schedule, up to the plan's
number of steps.

Updates are counted by the optimizer's state, so that a skipped step uses up nothing.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax

from data_pipeline.errors import ConfigError
from maxtrain.config.schema import ScheduleConfig
from maxtrain.config.sections.schedule import piece_borders


class _Piece(NamedTuple):
    """Updates in a row whose rate goes from `start`, with the first of them, to `end`, with the
    last."""

    name: str
    length: int  # updates
    start: float
    end: float
    power: float = 1.0  # polynomial
    timescale: int = 1  # inverse_sqrt, updates


def make_schedule(config: ScheduleConfig, peak: float, num_steps: int) -> optax.Schedule:
    """Learning rate of the update with index 0 ... num_steps - 1.

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
        ConfigError: pieces that do not fit into the run; an exponential one from or to 0.
    """
    warmup, low = min(config.warmup_steps, num_steps), lowest_rate(config, peak)
    left, timescale = num_steps - warmup, config.timescale or max(1, warmup)
    if config.name == "pieces":
        pieces = _pieces(config, peak, num_steps)
    elif config.name == "wsd":
        decay = min(round(config.decay_fraction * num_steps), left)
        pieces = [_Piece("constant", left - decay, peak, peak), _Piece("linear", decay, peak, low)]
    else:
        pieces = [_Piece(config.name, left, peak, low, config.power, timescale)]
    if warmup:
        pieces.insert(0, _Piece("linear", warmup, peak / warmup, peak))
    borders = [sum(piece.length for piece in pieces[:i]) for i in range(1, len(pieces))]
    return optax.join_schedules([_curve(piece) for piece in pieces], borders)


def lowest_rate(config: ScheduleConfig, peak: float) -> float:
    """The rate that the last update has: a share of the peak, or what the config says itself."""
    if config.min_learning_rate is not None:
        return config.min_learning_rate
    return config.min_lr_ratio * peak


def _pieces(config: ScheduleConfig, peak: float, num_steps: int) -> list[_Piece]:
    borders, pieces, last = piece_borders(config, num_steps), [], 1.0
    for piece, first, end in zip(config.pieces, borders, borders[1:]):
        start = last if piece.start is None else piece.start
        made = _Piece(
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


def _curve(piece: _Piece) -> optax.Schedule:
    """Rate of the update with index 0 ... length - 1 of a piece."""
    start, end, span = piece.start, piece.end, max(1, piece.length - 1)
    if piece.name == "constant":
        return optax.constant_schedule(start)
    if piece.name == "exponential":
        if min(start, end) <= 0:
            mend = "Set schedule.min_lr_ratio, or `start` and `end` of the piece, to more than 0"
            raise ConfigError(
                f"schedule: an exponential curve goes from {start} to {end}, but neither may be 0. {mend}."
            )
        return optax.exponential_decay(start, span, end / start)
    if piece.name == "inverse_sqrt":
        return lambda s: jnp.maximum(
            end, start * jnp.sqrt(piece.timescale / (piece.timescale + jnp.maximum(s, 0)))
        )
    if piece.name == "cosine" and start:
        return optax.cosine_decay_schedule(start, span, alpha=end / start)
    if piece.name == "cosine":  # optax's is a multiple of its start
        down = optax.cosine_decay_schedule(end, span)
        return lambda s: end - down(s)
    return optax.polynomial_schedule(
        start, end, piece.power if piece.name == "polynomial" else 1.0, span
    )
