"""What a step is judged by before its update: the losses and norms of the steps before it, kept on
the device.

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

CAPACITY = 256  # of the rings; a window may be shorter, so that its length may change from one start of a run to the next
_LEAST = 1e-3  # a deviation is at least this share of the median: steps that are all but equal make no spike of the next one
_VANISHED = 1e-6  # share of its median at which a gradient norm is none


class Watch(NamedTuple):
    """Rings of what accepted steps measured (loss, gradient norm, norm of all weights), and what
    was found up to now."""

    values: Float[Array, "3 W"]
    count: Int[Array, "3"]  # accepted since a ring began
    spikes_in_row: Int[Array, ""]
    still: Int[Array, ""]  # steps in a row without a gradient, or with the loss of the step before
    last_loss: Float[Array, ""]
    best: Float[Array, ""]  # the lowest median of losses
    found: Int[Array, "K"]  # steps of the run with each kind of ANOMALIES
    halted: Bool[
        Array, ""
    ]  # a step was found that ends the run, or takes it back: no step is made any more


def new_watch() -> Watch:
    """Of a new run."""
    none = jnp.zeros((), jnp.int32)
    infinite = jnp.float32(jnp.inf)
    found = jnp.zeros(len(ANOMALIES), jnp.int32)
    return Watch(
        jnp.zeros((3, CAPACITY)),
        jnp.zeros(3, jnp.int32),
        none,
        none,
        infinite,
        infinite,
        found,
        jnp.zeros((), bool),
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
    return middle, jnp.maximum(
        1.4826 * median(jnp.abs(values - middle[:, None])), _LEAST * jnp.abs(middle)
    )


class Verdict(NamedTuple):
    """`reject`: the step must not change the weights. `halt`: nor may this or any later step change
    anything at all.

    `metrics`: found (of each kind, whether the step shows it), anomalies (steps of the run that
        did), halted, and median and
    deviation of loss, gradient norm and norm of all weights in the window before this step.
    """

    reject: Bool[Array, ""]
    halt: Bool[Array, ""]
    watch: Watch  # after the step
    metrics: dict[str, Array]


def judge(
    watch: Watch,
    config: AnomalyConfig,
    measured: Mapping[str, Array],
    good: Bool[Array, ""],
    non_finite: Bool[Array, ""],
) -> Verdict:
    """Judge a step by its loss, grad_norm and, unless that is not looked at, weight_norm.

    `good`: the step has targets, and these numbers are finite; `non_finite`: it has some, they are
        not, and no lower loss
    scale would mend it.
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
    weighed = jnp.array(
        [True, True, config.weight_drift != "off"]
    )  # what is not measured is not remembered
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
    reject, halt = (found & rejects).any(), watch.halted | (found & halts).any()
    metrics = {
        "found": found,
        "anomalies": jnp.where(halt, watch.found, after.found),
        "halted": halt,
    }
    return Verdict(reject, halt, after, metrics | {"median": median, "deviation": deviation})
