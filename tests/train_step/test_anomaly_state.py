"""Anomalies on the device: medians and deviations as numpy has them, every kind found, and a
rejected step changes no bit."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from maxtrain.config.schema import ANOMALIES, AnomalyConfig
from maxtrain.objectives.next_token import next_token
from maxtrain.ops.sums import WeightedSum
from maxtrain.train_step.anomaly_state import CAPACITY, judge, new_watch, spread
from maxtrain.train_step.state import with_watch

pytestmark = pytest.mark.usefixtures("optax_dtypes")
OFF = AnomalyConfig(loss_spike="off", grad_spike="off", dead="off", diverging="off")
SMALL = {"window": 6, "min_steps": 4, "patience": 3}


@functools.partial(jax.jit, static_argnums=0)
def judged(config, rows):
    """The last watch, and the metrics of each step; rows: loss, gradient norm, norm of weights,
    good, non-finite."""

    def step(watch, row):
        measured = dict(zip(("loss", "grad_norm", "weight_norm"), row[:3]))
        verdict = judge(watch, config, measured, row[3] > 0, row[4] > 0)
        return verdict.watch._replace(halted=verdict.halt), verdict.metrics | {
            "reject": verdict.reject
        }

    return jax.lax.scan(step, new_watch(), jnp.asarray(rows, jnp.float32))


def run(config, losses, norms=None, weights=None, good=None):
    """`judged`, of lists, on the host."""
    norms, weights = (
        np.ones(len(losses)) if norms is None else norms,
        np.ones(len(losses)) if weights is None else weights,
    )
    good = np.ones(len(losses)) if good is None else np.array(good, float)
    return jax.device_get(
        judged(config, np.stack([losses, norms, weights, good, 1 - good], axis=1))
    )


def shown(metrics, kind):
    """The steps, from 0, that show a kind."""
    return np.flatnonzero(metrics["found"][:, ANOMALIES.index(kind)]).tolist()


def by_hand(config, losses, norms, good):
    """Spikes of losses and norms, median and deviation before each step: with lists and numpy."""
    window, spikes, before, row = [], [], [], 0
    for loss, norm, ok in zip(losses, norms, good, strict=True):
        last = np.array(window[-config.window :], np.float64).reshape(-1, 2)
        median = np.median(last, axis=0) if len(last) else np.zeros(2)
        deviation = 1.4826 * np.median(np.abs(last - median), axis=0) if len(last) else np.zeros(2)
        deviation = np.maximum(deviation, 1e-3 * median)
        before.append((median, deviation))
        limit = median + np.array([config.loss_limit, config.grad_limit]) * deviation
        spike = ok and len(window) >= config.min_steps and np.array([loss, norm]) > limit
        if np.any(spike) and row >= config.patience:
            window, spike = [], False
        spikes.append(np.broadcast_to(spike, 2))
        row = row + 1 if np.any(spike) else 0 if ok else row
        window += [(loss, norm)] if ok and not np.any(spike) else []
    return np.array(spikes), before


LENGTH = 40
level = st.integers(8, 400).map(lambda n: n / 8)  # exact in float32, and so are their medians


@settings(max_examples=60, deadline=None)
@given(
    losses=st.lists(level, min_size=LENGTH, max_size=LENGTH),
    norms=st.lists(level, min_size=LENGTH, max_size=LENGTH),
    good=st.lists(
        st.sampled_from([True, True, True, True, False]), min_size=LENGTH, max_size=LENGTH
    ),
)
def test_spikes_are_those_of_median_and_mad_by_hand(losses, norms, good):
    config = dataclasses.replace(
        OFF, loss_spike="skip", grad_spike="warn", loss_limit=1.7, grad_limit=2.3, **SMALL
    )
    watch, metrics = run(config, losses, norms, good=good)
    spikes, before = by_hand(config, losses, norms, good)
    np.testing.assert_array_equal(metrics["found"][:, 1:3], spikes)
    np.testing.assert_allclose(metrics["median"][:, :2], [m for m, _ in before], rtol=1e-6)
    np.testing.assert_allclose(metrics["deviation"][:, :2], [d for _, d in before], rtol=1e-6)
    np.testing.assert_array_equal(metrics["reject"], spikes[:, 0] | ~np.array(good))
    assert watch.found[1:3].tolist() == spikes.sum(axis=0).tolist() and watch.found[
        0
    ] == LENGTH - sum(good)


@pytest.mark.parametrize(
    "count", [0, 1, 2, 7, CAPACITY - 1, CAPACITY, CAPACITY + 1, 3 * CAPACITY + 5]
)
@pytest.mark.parametrize("window", [1, 4, 128, CAPACITY])
def test_the_spread_is_of_the_last_values_of_the_ring(count, window):
    stream, ring = (
        np.random.default_rng(count).normal(size=(3, count)).astype(np.float32),
        np.zeros((3, CAPACITY), np.float32),
    )
    for i in range(count):
        ring[:, i % CAPACITY] = stream[:, i]
    median, deviation = spread(jnp.asarray(ring), jnp.full(3, count, jnp.int32), window)
    last = stream[:, -window:] if count else np.zeros((3, 1))
    np.testing.assert_allclose(median, np.median(last, axis=1), rtol=1e-6)
    mad = np.median(np.abs(last - np.median(last, axis=1, keepdims=True)), axis=1)
    np.testing.assert_allclose(
        deviation, np.maximum(1.4826 * mad, 1e-3 * np.abs(median)), rtol=1e-5
    )


def test_a_new_level_is_accepted_after_patience_and_a_single_spike_leaves_no_trace():
    config = dataclasses.replace(OFF, loss_spike="skip", **SMALL)
    noise = np.tile([0.0, 0.01, 0.02], 20)
    up = np.where(np.arange(60) < 20, 2.0, 5.0) + noise
    _, metrics = run(config, up)
    assert shown(metrics, "loss_spike") == [20, 21, 22], (
        "then the level is 5, and nothing more is left out"
    )
    once = 2 + noise
    once[30] = 9
    with_it, metrics = run(config, once)
    without, _ = run(config, np.delete(once, 30))
    assert shown(metrics, "loss_spike") == [30] and metrics["median"].max() < 2.02
    for ours, theirs in zip(with_it[:2], without[:2]):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.every_dose
@pytest.mark.long
def test_the_other_kinds_are_found_when_they_come_and_not_before():
    steps = np.arange(60)
    noise = np.tile([0.0, 0.01, 0.02], 20)
    dead = dataclasses.replace(OFF, dead="warn", dead_steps=5, **SMALL)
    assert shown(run(dead, np.where(steps < 30, 2 + noise, 3))[1], "dead") == list(range(35, 60))
    assert shown(run(dead, 2 + noise, np.where(steps < 30, 1 + noise, 1e-8))[1], "dead") == list(
        range(34, 60)
    )
    assert shown(run(dead, 2 + noise, np.where(steps < 30, 1, 0))[1], "dead") == list(range(34, 60))
    drift = dataclasses.replace(OFF, weight_drift="warn", drift_limit=0.2, **SMALL)
    assert shown(run(drift, 2 + noise, weights=1.02**steps)[1], "weight_drift") == []
    assert shown(
        run(drift, 2 + noise, weights=np.where(steps == 30, 1.25, 1))[1], "weight_drift"
    ) == [30]
    diverging = dataclasses.replace(OFF, diverging="warn", diverging_limit=1.5, **SMALL)
    losses = 2 + noise + np.maximum(steps - 30, 0) * 0.1
    found = shown(run(diverging, losses)[1], "diverging")
    medians = np.array([np.median(losses[max(0, i - 6) : i]) if i else 2 for i in steps])
    assert found == np.flatnonzero(medians > 1.5 * 2.01).tolist() and 40 < found[0] < 50


def test_what_is_off_is_not_looked_at_and_not_remembered():
    losses = np.where(np.arange(40) % 8 == 7, 99.0, 2.0 + np.arange(40) % 3)
    watch, metrics = run(dataclasses.replace(OFF, **SMALL), losses, weights=np.full(40, 7.0))
    assert (
        not metrics["found"].any()
        and not metrics["reject"].any()
        and watch.count.tolist() == [40, 40, 0]
    )


def test_after_a_halt_nothing_is_found_twice_nor_counted():
    config = dataclasses.replace(OFF, non_finite="stop")
    watch, metrics = run(config, np.full(6, 2.0), good=[1, 1, 0, 1, 0, 1])
    assert metrics["halted"].tolist() == [False, False, True, True, True, True] and watch.halted
    assert metrics["anomalies"][2, 0] == 0, "the state is as before that step"


# in whole steps

GOOD = 5  # steps before a spoilt one


def spoilt(models, batch, scales):
    """next_token, but a batch that begins with 2 has a hundredfold loss, and one with 0 none at
    all."""
    result, first = next_token().forward(models, batch, scales), batch["inputs"][0, 0]
    factor = jnp.where(first == 2, 100.0, jnp.where(first == 0, jnp.nan, 1.0))
    total, weight = result.sums["nll"]
    sums = {"nll": WeightedSum(total * factor, weight)}
    return result._replace(loss=result.loss * factor, sums=sums)


def steps(tiny, config, shape, *firsts):
    """State and metrics, on the host, after steps on batches that begin with these ids (None: as
    they are)."""
    parts = tiny.parts(
        shape, objective=next_token()._replace(forward=spoilt), step={"anomaly": config}
    )
    with jax.set_mesh(parts.mesh):
        state, metrics = parts.new_state(), []
        for i, first in enumerate([None] * GOOD + list(firsts)):
            batch = dict(tiny.batch(i % 2))
            if first is not None:
                batch["inputs"] = batch["inputs"].copy()
                batch["inputs"][0, 0] = first
            state, values = parts.step(state, parts.put(batch))
            metrics.append(values)
    return jax.device_get((state, metrics))


def bits(tree):
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


@pytest.mark.long
@pytest.mark.parametrize("shape, kind", [((1, 1, 1), "loss_spike"), ((2, 2, 2), "grad_spike")])
def test_a_skipped_spike_changes_no_bit_of_weights_optimizer_or_window(tiny, shape, kind):
    config = dataclasses.replace(OFF, min_steps=4, **{kind: "skip"})
    (before, _), (after, metrics) = steps(tiny, config, shape), steps(tiny, config, shape, 2, 2)
    assert [shown({"found": m["found"][None]}, kind) for m in metrics] == [[]] * GOOD + [[0], [0]]
    assert bits((before.trainable, before.opt_state)) == bits((after.trainable, after.opt_state))
    assert (after.step, after.control.skipped, after.control.skipped_in_row) == (GOOD + 2, 2, 0)
    assert (
        bits(before.control.watch[:2]) == bits(after.control.watch[:2])
        and metrics[-1]["anomalies"].sum() == 2
    )
    assert metrics[-1]["learning_rate"] == metrics[-2]["learning_rate"]


@pytest.mark.long
def test_rollback_and_stop_halt_before_the_step_and_nothing_changes_any_more(tiny):
    config = dataclasses.replace(OFF, min_steps=4, loss_spike="rollback", non_finite="stop")
    before, _ = steps(tiny, config, (1, 1, 1))
    for bad in (2, 0):
        after, metrics = steps(tiny, config, (1, 1, 1), bad, None, None)
        assert [bool(m["halted"]) for m in metrics] == [False] * GOOD + [True] * 3
        assert after.control.watch.halted and bits(
            with_watch(after, after.control.watch._replace(halted=np.array(False)))
        ) == bits(before)


@pytest.mark.long
def test_warnings_change_no_bit_of_any_step(tiny):
    """The defaults warn; what they look at decides nothing."""
    off, _ = steps(tiny, OFF, (1, 1, 1), None, 2, None)
    warned, metrics = steps(
        tiny, AnomalyConfig(min_steps=4, weight_drift="warn"), (1, 1, 1), None, 2, None
    )
    assert bits((off.trainable, off.opt_state)) == bits((warned.trainable, warned.opt_state))
    assert metrics[GOOD + 1]["found"].tolist() == [False, True, True, False, False, False]
    norm = np.sqrt(
        sum((np.asarray(w, np.float64) ** 2).sum() for w in jax.tree.leaves(warned.trainable))
    )
    np.testing.assert_allclose(metrics[-1]["weight_norm"], norm, rtol=0.1)
