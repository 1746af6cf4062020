"""Schedules against their formulas in plain Python; AdamW against numpy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import OptimizerConfig
from maxtrain.training.optimizer import decay_mask, make_optimizer, make_schedule

pytestmark = pytest.mark.usefixtures("optax_dtypes")
PEAK, LOW = 3e-3, 2e-4


def config(**changes):
    return OptimizerConfig(**({"learning_rate": PEAK, "min_learning_rate": LOW, "warmup_steps": 0} | changes))


def formula(c, num_steps, step):
    """The learning rate of the update with this index, from 0."""
    warmup = min(c.warmup_steps, num_steps)
    if step < warmup:
        return PEAK * (step + 1) / warmup
    if c.schedule == "cosine":
        done = (step - warmup) / max(1, num_steps - 1 - warmup)
        return LOW + (PEAK - LOW) * (1 + math.cos(math.pi * done)) / 2
    decay = min(round(c.decay_fraction * num_steps), num_steps - warmup) if c.schedule == "wsd" else 0
    into = step - (num_steps - decay)
    return PEAK if into < 0 else PEAK - (PEAK - LOW) * into / max(1, decay - 1)


@pytest.mark.parametrize("schedule", ["cosine", "wsd", "constant"])
@pytest.mark.parametrize("num_steps, warmup", [(200, 10), (200, 0), (200, 1), (7, 3), (2, 1), (1, 0), (5, 50)])
def test_every_learning_rate_is_the_formulas(schedule, num_steps, warmup):
    c = config(schedule=schedule, warmup_steps=warmup, decay_fraction=0.3)
    rates = jax.vmap(make_schedule(c, num_steps))(jnp.arange(num_steps))
    np.testing.assert_allclose(rates, [formula(c, num_steps, step) for step in range(num_steps)], rtol=2e-6)


@pytest.mark.parametrize("schedule, last", [("cosine", LOW), ("wsd", LOW), ("constant", PEAK)])
def test_first_last_and_the_borders_of_the_pieces(schedule, last):
    rate = make_schedule(config(schedule=schedule, warmup_steps=10, decay_fraction=0.25), 100)
    assert rate(0) == pytest.approx(PEAK / 10) and rate(9) == rate(10) == pytest.approx(PEAK)
    assert rate(99) == pytest.approx(last)
    if schedule == "wsd":  # 25 updates of decay, the first of them still at the peak
        assert all(rate(step) == pytest.approx(PEAK) for step in (50, 74, 75)) and rate(76) < PEAK


def test_a_decay_that_the_warmup_leaves_no_room_for_is_shortened():
    rate = make_schedule(config(schedule="wsd", warmup_steps=8, decay_fraction=0.9), 10)
    assert rate(7) == pytest.approx(PEAK) and rate(8) == pytest.approx(PEAK) and rate(9) == pytest.approx(LOW)


def variables(seed, scale=1.0):
    """A matrix, a stack of matrices, a vector and a stack of vectors, named as in a model."""
    rng = np.random.default_rng(seed)
    shapes = {"head": (3, 4), "up": (2, 3, 4), "norm": (3,), "norms": (2, 3)}
    axes = {"head": ("embed", "vocab"), "up": ("embed", "mlp"), "norm": ("norm",), "norms": ("norm",)}
    return nnx.State({n: nnx.Param(jnp.float32(rng.normal(size=s) * scale), axes=axes[n]) for n, s in shapes.items()})


def test_matrices_decay_and_vectors_do_not_however_they_are_stacked():
    mask = decay_mask(variables(0))
    assert dict(mask) == {"head": True, "up": True, "norm": False, "norms": False}


@pytest.mark.parametrize("clip", [None, 0.5, 1e9], ids=["unclipped", "clipped", "below the limit"])
def test_adamw_equals_numpy(clip):
    c = config(schedule="cosine", warmup_steps=2, clip_norm=clip, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-5)
    optimizer, num_steps = make_optimizer(c, 6), 6
    params = variables(0)
    state = optimizer.init(params)
    p = {name: np.float64(x[...]) for name, x in params.items()}
    m, v = ({name: np.zeros_like(x) for name, x in p.items()} for _ in range(2))
    update = jax.jit(optimizer.update)
    for step in range(num_steps):
        grads = variables(step + 1, scale=10.0**-step)  # clipped at first, later not
        updates, state = update(grads, state, params)
        params = jax.tree.map(jnp.add, params, updates)
        g = {name: np.float64(x[...]) for name, x in grads.items()}
        norm = math.sqrt(sum((x**2).sum() for x in g.values()))
        assert clip != 0.5 or (norm > clip) == (step < 2)
        for name in p:
            x = g[name] * min(1.0, (clip or math.inf) / norm)
            m[name] = c.beta1 * m[name] + (1 - c.beta1) * x
            v[name] = c.beta2 * v[name] + (1 - c.beta2) * x**2
            adam = m[name] / (1 - c.beta1 ** (step + 1)) / (np.sqrt(v[name] / (1 - c.beta2 ** (step + 1))) + c.eps)
            decay = c.weight_decay * p[name] if name in ("head", "up") else 0.0
            p[name] = p[name] - formula(c, num_steps, step) * (adam + decay)
            np.testing.assert_allclose(params[name][...], p[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")
