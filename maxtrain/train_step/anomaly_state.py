"""Anomaly detection on the device: losses and norms of earlier steps, and the verdict on a step
before its update.

A loss or gradient norm is a spike if it exceeds the window's median by a number of deviations. A
deviation is 1.4826 times the median absolute deviation, which equals the standard deviation for
normally distributed numbers and is robust against outliers. Spikes stay out of the window, until
`patience` of them in a row show that the level has changed: then the window restarts.

All of this is part of the train state and replicated on every device. So all devices decide alike,
and a resumed run decides as an uninterrupted one.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.config.schema import ANOMALIES, AnomalyConfig

# Length of the ring buffers. A window may be shorter, so that its length may change between
# launches.
CAPACITY = 256
# A deviation is at least this share of the median, so that almost equal steps do not make the next
# one a spike.
_LEAST = 1e-3
# A gradient norm at or below this share of its median counts as vanished.
_VANISHED = 1e-6


class AnomalyState(NamedTuple):
    """Ring buffers of the measurements of accepted steps, and the anomalies found up to now.

    The rings hold the loss, the gradient norm, and the norm of all weights.
    """

    values: Float[Array, "3 W"]
    # Accepted steps since each ring was restarted.
    count: Int[Array, "3"]
    spikes_in_row: Int[Array, ""]
    # Consecutive steps with a vanished gradient, or with the same loss as the step before.
    still: Int[Array, ""]
    last_loss: Float[Array, ""]
    # The lowest median of losses up to now.
    best: Float[Array, ""]
    # Number of steps of the run with each kind of ANOMALIES.
    found: Int[Array, "K"]
    # Whether an anomaly ends the run or requires a rollback: no further step changes anything.
    halted: Bool[Array, ""]


def new_watch() -> AnomalyState:
    """Return the watch of a new run."""
    none = jnp.zeros((), jnp.int32)
    infinite = jnp.float32(jnp.inf)
    found = jnp.zeros(len(ANOMALIES), jnp.int32)
    return AnomalyState(
        values=jnp.zeros((3, CAPACITY)),
        count=jnp.zeros(3, jnp.int32),
        spikes_in_row=none,
        still=none,
        last_loss=infinite,
        best=infinite,
        found=found,
        halted=jnp.zeros((), bool),
    )


def spread(
    values: Float[Array, "3 W"], count: Int[Array, "3"], window: int
) -> tuple[Float[Array, "3"], Float[Array, "3"]]:
    """Return the median and the deviation of the last `window` values of each ring, or of as many
    as it has."""
    size = values.shape[1]
    age = (count[:, None] - 1 - jnp.arange(size)) % size
    there = jnp.minimum(count, window)
    inside = age < there[:, None]

    def median(x: Float[Array, "3 W"]) -> Float[Array, "3"]:
        ordered = jnp.sort(jnp.where(inside, x, jnp.inf), axis=1)
        middle = jnp.stack([jnp.maximum(there - 1, 0) // 2, there // 2], axis=1)
        return jnp.where(there > 0, jnp.take_along_axis(ordered, middle, axis=1).mean(axis=1), 0.0)

    middle = median(values)
    deviation = 1.4826 * median(jnp.abs(values - middle[:, None]))
    return middle, jnp.maximum(deviation, _LEAST * jnp.abs(middle))


class StepVerdict(NamedTuple):
    """The verdict on a step.

    Attributes:
        reject: whether the step must not change the weights.
        halt: whether neither this nor any later step may change anything.
        watch: the watch after the step.
        metrics: found (for each kind, whether the step shows it), anomalies (number of such steps
            in the run), halted, and median and deviation of loss, gradient norm and weight norm in
            the window before this step.
    """

    reject: Bool[Array, ""]
    halt: Bool[Array, ""]
    watch: AnomalyState
    metrics: dict[str, Array]


def judge(
    watch: AnomalyState,
    config: AnomalyConfig,
    measured: Mapping[str, Array],
    good: Bool[Array, ""],
    non_finite: Bool[Array, ""],
) -> StepVerdict:
    """Judge a step by its loss, grad_norm and, unless drift is off, weight_norm.

    Args:
        good: whether the step has targets, and these numbers are finite.
        non_finite: whether the step has targets, the numbers are not finite, and no lower loss
            scale would make them finite.
    """
    now = jnp.stack(
        [measured["loss"], measured["grad_norm"], measured.get("weight_norm", jnp.float32(0))]
    )
    median, deviation = spread(watch.values, watch.count, config.window)
    known = good & (watch.count >= config.min_steps)
    limits = jnp.array([config.loss_limit, config.grad_limit])
    looked_at = jnp.array([config.loss_spike != "off", config.grad_spike != "off"])
    spikes = known[:2] & looked_at & (now[:2] > median[:2] + limits * deviation[:2])
    shifted = spikes.any() & (watch.spikes_in_row >= config.patience)
    spikes = spikes & ~shifted
    drift = known[2] & (jnp.abs(now[2] - median[2]) > config.drift_limit * median[2])
    vanished = now[1] <= _VANISHED * median[1]
    quiet = vanished | (now[0] == watch.last_loss)
    still = jnp.where(good, jnp.where(quiet, watch.still + 1, 0), watch.still)
    best = jnp.where(known[0], jnp.minimum(watch.best, median[0]), watch.best)
    diverging = known[0] & (median[0] > config.diverging_limit * best)

    policies = [getattr(config, kind) for kind in ANOMALIES]
    found = jnp.stack(
        [non_finite, spikes[0], spikes[1], drift, good & (still >= config.dead_steps), diverging]
    )
    found = found & jnp.array([policy != "off" for policy in policies])

    accepted = good & ~spikes.any() & ~vanished
    # A number that is not measured does not enter its ring.
    weighed = jnp.array([True, True, config.weight_drift != "off"])
    count = jnp.where(weighed & ~(shifted & jnp.array([True, True, False])), watch.count, 0)
    place = jnp.arange(CAPACITY) == (count % CAPACITY)[:, None]
    after = AnomalyState(
        values=jnp.where(place & accepted, now[:, None], watch.values),
        count=count + (accepted & weighed).astype(jnp.int32),
        spikes_in_row=jnp.where(
            spikes.any(), watch.spikes_in_row + 1, jnp.where(good, 0, watch.spikes_in_row)
        ),
        still=still,
        last_loss=jnp.where(good, now[0], watch.last_loss),
        best=best,
        found=watch.found + found.astype(jnp.int32),
        halted=watch.halted,
    )
    halts = jnp.array([policy in ("rollback", "stop") for policy in policies])
    rejects = halts | jnp.array([policy == "skip" for policy in policies])
    reject = (found & rejects).any()
    halt = watch.halted | (found & halts).any()
    metrics = {
        "found": found,
        "anomalies": jnp.where(halt, watch.found, after.found),
        "halted": halt,
        "median": median,
        "deviation": deviation,
    }
    return StepVerdict(reject, halt, after, metrics)
