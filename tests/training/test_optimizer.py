"""AdamW against numpy in float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from maxtrain.config.schema import OptimizerConfig, ScheduleConfig
from maxtrain.training.optimizer import decay_mask, make_optimizer
from maxtrain.training.schedule import make_schedule

pytestmark = pytest.mark.usefixtures("optax_dtypes")


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
    c = OptimizerConfig(learning_rate=3e-3, clip_norm=clip, weight_decay=0.3, beta1=0.8, beta2=0.9, eps=1e-5)
    schedule, num_steps = ScheduleConfig(warmup_steps=2), 6
    optimizer, rate = make_optimizer(c, schedule, num_steps), make_schedule(schedule, c.learning_rate, num_steps)
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
            p[name] = p[name] - float(rate(step)) * (adam + decay)
            np.testing.assert_allclose(params[name][...], p[name], rtol=1e-5, atol=1e-6, err_msg=f"{name}, step {step}")


def test_factors_multiply_the_rate_of_each_parameter_and_not_its_decay():
    c, params, factors = OptimizerConfig(learning_rate=3e-3, weight_decay=0.3), variables(0), {"up": 0.25, "norm": 3.0}
    schedule = ScheduleConfig(name="constant", warmup_steps=0)
    plain, scaled = (
        make_optimizer(c, schedule, 4, f)
        for f in (None, nnx.State({name: factors.get(name, 1.0) for name in ("head", "up", "norm", "norms")}))
    )
    one, other = (o.update(variables(1), o.init(params), params)[0] for o in (plain, scaled))
    for name, variable in params.items():
        decay = -3e-3 * 0.3 * variable[...] if name in ("head", "up") else 0.0
        expected = (one[name][...] - decay) * factors.get(name, 1.0) + decay
        np.testing.assert_allclose(other[name][...], expected, rtol=1e-5, atol=1e-8)
