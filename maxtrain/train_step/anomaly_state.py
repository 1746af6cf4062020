"""What a step is judged by before its update: losses and norms of the steps before it, on device.

A loss or gradient norm is a spike if it is above the window's median by a number of deviations, of
1.4826 times the median absolute deviation each (which is the standard deviation of normal numbers,
and does not see a few wild ones). Spikes stay out of the window, until `patience` in a row show
that the level is another one: then the window begins afresh. All of it is in the state, on every
device the same: all decide alike, and a run that goes on from a checkpoint decides as one never
stopped.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from maxtrain.config.schema import ANOMALIES, AnomalyConfig

# Of the rings. A window may be shorter, so that its length may change from one start of a run to
# the next.
CAPACITY = 256
# A deviation is at least this share of the median: steps that are all but equal make no spike of
# the next one.
_LEAST = 1e-3
# The share of its median at which a gradient norm is none.
_VANISHED = 1e-6


class Watch(NamedTuple):
    """Rings of what accepted steps measured, and what was found up to now.

    The rings are of the loss, the gradient norm, and the norm of all weights.
    """

    values: Float[Array, "3 W"]
    # Accepted steps since a ring began.
    count: Int[Array, "3"]
    spikes_in_row: Int[Array, ""]
    # Steps in a row without a gradient, or with the loss of the step before.
    still: Int[Array, ""]
    last_loss: Float[Array, ""]
    # The lowest median of losses.
    best: Float[Array, ""]
    # Steps of the run with each kind of ANOMALIES.
    found: Int[Array, "K"]
    # A step was found that ends the run, or takes it back: no step is made any more.
    halted: Bool[Array, ""]


def new_watch() -> Watch:
    """Of a new run."""
    none = jnp.zeros((), jnp.int32)
    infinite = jnp.float32(jnp.inf)
    found = jnp.zeros(len(ANOMALIES), jnp.int32)
    return Watch(
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
    """Median and deviation of the last `window` values of each ring, or of what it has."""
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


class Verdict(NamedTuple):
    """What is found of a step.

    reject: the step must not change the weights.
    halt: nor may this or any later step change anything at all.
    watch: as it is after the step.
    metrics: found (of each kind, whether the step shows it), anomalies (steps of the run that did),
        halted, and median and deviation of loss, gradient norm and norm of all weights in the
        window before this step.
    """

    reject: Bool[Array, ""]
    halt: Bool[Array, ""]
    watch: Watch
    metrics: dict[str, Array]


def judge(
    watch: Watch,
    config: AnomalyConfig,
    measured: Mapping[str, Array],
    good: Bool[Array, ""],
    non_finite: Bool[Array, ""],
) -> Verdict:
    """Judge a step by its loss, grad_norm and, unless that is not looked at, weight_norm.

    Args:
        good: the step has targets, and these numbers are finite.
        non_finite: it has targets, the numbers are not finite, and no lower loss scale would mend
            that.
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
    # What is not measured is not remembered.
    weighed = jnp.array([True, True, config.weight_drift != "off"])
    count = jnp.where(weighed & ~(shifted & jnp.array([True, True, False])), watch.count, 0)
    place = jnp.arange(CAPACITY) == (count % CAPACITY)[:, None]
    after = Watch(
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
    return Verdict(reject, halt, after, metrics)
