"""Every update rule against the equations of its paper, in numpy and float64, matrix by matrix."""

import collections
import dataclasses
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.base.errors import ConfigError
from maxtrain.config.schema import GroupConfig, OptimizerConfig, ScheduleConfig
from maxtrain.train_step.optimizer import (
    COUPLED,
    apply_updates,
    average_or_params,
    make_optimizer,
    paths,
    stochastic_round,
)
from maxtrain.train_step.schedule import make_schedule

pytestmark = pytest.mark.usefixtures("optax_dtypes")
# Dims as in a model, and the number of stacked dims, of those of a layer's inputs, and of its
# outputs.
LAYOUT = {
    "head": ((5, 4), ("embed", "vocab"), 0, 1),
    "up": ((2, 5, 4), ("embed", "mlp"), 1, 1),
    "q": ((2, 5, 2, 3), ("embed", "heads", "head_dim"), 1, 1),
    "o": ((2, 2, 3, 5), ("heads", "head_dim", "embed"), 1, 2),
    "norm": ((5,), ("norm",), 0, 1),
    "norms": ((2, 5), ("norm",), 1, 1),
}
MATRICES = ("head", "up", "q", "o")
RULES = ["adamw", "adam", "sgd", "momentum", "nesterov", "adafactor", "lion", "muon"]
STEPS, SCHEDULE = 6, ScheduleConfig(warmup_steps=2)


def variables(seed, scale=1.0, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    made = {
        n: jnp.asarray(rng.normal(size=shape) * scale, dtype) for n, (shape, *_) in LAYOUT.items()
    }
    return nnx.State({n: nnx.Param(x, axes=LAYOUT[n][1]) for n, x in made.items()})


def config(**changes):
    usual = {
        "learning_rate": 3e-2,
        "clip_norm": None,
        "weight_decay": 0.3,
        "beta1": 0.8,
        "beta2": 0.9,
        "eps": 1e-5,
    }
    return OptimizerConfig(**(usual | changes))


def run(c, dtype=jnp.float32, num_steps=STEPS, factors=None, scales=lambda step: 10.0**-step):
    """Parameters after each update, and the state after all of them."""
    params = variables(0, dtype=dtype)
    optimizer = make_optimizer(c, SCHEDULE, num_steps, params, factors)
    state, seen, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for step in range(num_steps):
        updates, state = update(variables(step + 1, scales(step)), state, params)
        params = apply_updates(params, updates)
        seen.append({name: np.float64(x[...]) for name, x in params.items()})
    return seen, SimpleNamespace(trainable=params, opt_state=state)


def judged(state):
    return average_or_params(state.trainable, state.opt_state)


def layers(name, x):
    """The vectors or matrices of an array, one for each layer."""
    shape, _, stacked, inputs = LAYOUT[name]
    first = math.prod(shape[:stacked])
    return list(
        x.reshape(
            first,
            math.prod(shape[stacked : stacked + inputs]),
            *((-1,) if name in MATRICES else ()),
        )
    )


def direction(c, name, g, s, t):
    """The paper's update of one vector or matrix, from its gradient, its memory and the number of
    the update from 1."""
    rule = c.name
    if rule == "muon" and name in ("head", "norm", "norms"):
        rule = "adamw"
    match rule:
        case "sgd":
            return g
        case "momentum" | "nesterov":
            s["m"] = c.momentum * s["m"] + g
            return s["m"] if rule == "momentum" else c.momentum * s["m"] + g
        case "adam" | "adamw":
            s["m"] = c.beta1 * s["m"] + (1 - c.beta1) * g
            s["v"] = c.beta2 * s["v"] + (1 - c.beta2) * g**2
            return s["m"] / (1 - c.beta1**t) / (np.sqrt(s["v"] / (1 - c.beta2**t)) + c.eps)
        case "lion":
            u = np.sign(c.beta1 * s["m"] + (1 - c.beta1) * g)
            s["m"] = c.beta2 * s["m"] + (1 - c.beta2) * g
            return u
        case "adafactor":
            beta, square = 1 - t**-0.8, g**2 + 1e-30
            if g.ndim == 2:
                s["row"] = beta * s["row"] + (1 - beta) * square.mean(1)
                s["column"] = beta * s["column"] + (1 - beta) * square.mean(0)
                u = g / np.sqrt(np.outer(s["row"], s["column"]) / s["row"].mean())
            else:
                s["v"] = beta * s["v"] + (1 - beta) * square
                u = g / np.sqrt(s["v"])
            return u / max(1.0, math.sqrt((u**2).mean()))
        case "muon":
            b = c.momentum
            s["m"] = b * s["m"] + (1 - b) * g
            return (
                orthogonal(b * s["m"] / (1 - b ** (t + 1)) + (1 - b) * g / (1 - b**t))
                * 0.2
                * math.sqrt(max(g.shape))
            )


def orthogonal(x):
    """Five Newton-Schulz iterations. Source: Jordan 2024,
    https://kellerjordan.github.io/posts/muon."""
    x = x / np.linalg.norm(x)
    if wide := x.shape[0] > x.shape[1]:
        x = x.T
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if wide else x


def reference(
    c,
    num_steps=STEPS,
    rates=None,
    decays=None,
    scales=lambda step: 10.0**-step,
    clip=lambda g, p: g,
):
    """Compute the updates as `run` does, in float64; `rates` and `decays` by name."""
    schedule = make_schedule(SCHEDULE, c.learning_rate, num_steps)
    p = {name: np.float64(x[...]) for name, x in variables(0).items()}
    memory = {(name, i): collections.defaultdict(float) for name in p for i in range(2)}
    seen = []
    for step in range(num_steps):
        grads = clip(
            {name: np.float64(x[...]) for name, x in variables(step + 1, scales(step)).items()}, p
        )
        for name in p:
            decay = (decays or {}).get(name, c.weight_decay if name in MATRICES else 0.0)
            rate = float(schedule(step)) * (rates or {}).get(name, 1.0)
            made = []
            for i, (x, g) in enumerate(zip(layers(name, p[name]), layers(name, grads[name]))):
                if c.name in COUPLED:
                    made.append(
                        x - rate * direction(c, name, g + decay * x, memory[name, i], step + 1)
                    )
                else:
                    made.append(
                        x - rate * (direction(c, name, g, memory[name, i], step + 1) + decay * x)
                    )
            p[name] = np.stack(made).reshape(p[name].shape)
        seen.append(dict(p))
    return seen


def assert_same(ours, theirs, tolerance=2e-6):
    for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        for name in b:
            np.testing.assert_allclose(
                a[name], b[name], rtol=0, atol=tolerance, err_msg=f"{name}, step {step}"
            )


def norm_clip(limit):
    def clip(grads, _):
        norm = math.sqrt(sum((g**2).sum() for g in grads.values()))
        return {name: g * min(1.0, limit / norm) for name, g in grads.items()}

    return clip


@pytest.mark.long
@pytest.mark.every_dose
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_its_papers(rule):
    c = config(name=rule, momentum=0.7)
    assert_same(run(c)[0], reference(c), 2e-5 if rule == "muon" else 2e-6)


@pytest.mark.parametrize("limit", [0.5, 1e9], ids=["clipped", "below the limit"])
def test_the_global_norm_is_clipped(limit):
    c = config(clip_norm=limit)
    assert_same(run(c)[0], reference(c, clip=norm_clip(limit)))
    assert norm_clip(0.5)({"a": np.ones(9)}, None)["a"].sum() == pytest.approx(1.5)


def test_values_are_clipped_before_the_norm():
    c = config(name="sgd", clip_value=0.1, clip_norm=0.5)
    assert_same(
        run(c)[0],
        reference(
            c, clip=lambda g, p: norm_clip(0.5)({n: x.clip(-0.1, 0.1) for n, x in g.items()}, p)
        ),
    )


def test_adaptive_clipping_looks_at_each_output_of_each_layer():
    """Source: Brock et al. 2021, https://arxiv.org/abs/2102.06171, equation 3."""
    c = config(name="sgd", clip_adaptive=0.2)

    def clip(grads, params):
        out = {}
        for name, g in grads.items():
            made = []
            for gi, p in zip(layers(name, g), layers(name, params[name])):
                axis = 0 if gi.ndim == 2 else None
                limit = 0.2 * np.maximum(np.sqrt((p**2).sum(axis, keepdims=True)), 1e-3)
                norm = np.sqrt((gi**2).sum(axis, keepdims=True))
                made.append(np.where(norm > limit, gi * limit / norm, gi))
            out[name] = np.stack(made).reshape(g.shape)
        return out

    assert_same(run(c)[0], reference(c, clip=clip))


@pytest.mark.long
@pytest.mark.parametrize("stack", [True, False], ids=["stacked", "one layer"])
def test_muon_makes_each_layers_matrix_orthogonal_whatever_the_others_are(stack):
    """Singular values near 1 on the scale that makes the root mean square about 0.2."""
    params, grads = variables(0), variables(1)
    if stack:  # the second layer's gradient is 1e4 times the first's
        grads = jax.tree.map(
            lambda g: (
                g * jnp.asarray([1.0, 1e4]).reshape(2, *[1] * (g.ndim - 1)) if g.ndim > 2 else g
            ),
            grads,
        )
    optimizer = make_optimizer(
        config(name="muon", weight_decay=0.0), ScheduleConfig("constant", 0), 1, params
    )
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    for name in ("up", "q", "o"):
        for matrix in layers(name, np.float64(updates[name][...])):
            values = np.linalg.svd(matrix, compute_uv=False) / (
                3e-2 * 0.2 * math.sqrt(max(matrix.shape))
            )
            assert values.min() > 0.3 and values.max() < 1.3, (name, values)


def test_groups_have_their_own_rates_and_no_decay_is_by_path():
    groups = {"slow": GroupConfig("^(up|norms)$", 0.1, 0.5), "frozen": GroupConfig("q", 0.0)}
    c = config(groups=groups, no_decay=("hea",))
    ours, _ = run(c)
    rates, decays = {"up": 0.1, "norms": 0.1, "q": 0.0}, {"head": 0.0, "up": 0.5, "norms": 0.5}
    assert_same(ours, reference(c, rates=rates, decays=decays))
    assert (ours[-1]["q"] == np.float64(variables(0)["q"][...])).all()


@pytest.mark.parametrize("rule", ["adamw", "adam"])
def test_factors_multiply_the_rate_of_each_parameter_and_not_its_decoupled_decay(rule):
    c, factors = config(name=rule), {"up": 0.25, "norm": 3.0}
    ours, _ = run(c, factors=nnx.State({name: factors.get(name, 1.0) for name in LAYOUT}))
    decays = {"up": c.weight_decay / (factors["up"] if rule == "adamw" else 1)}
    assert_same(ours, reference(c, rates=factors, decays=decays))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"no_decay": ("embedding",)},
            "optimizer.no_decay=embedding matches no parameter. Set it to a part of one of .*head, n",
        ),
        (
            {"groups": {"a": GroupConfig("x$")}},
            r"optimizer.groups.a.pattern=x\$ matches no parameter. Set it",
        ),
        (
            {"groups": {"a": GroupConfig("up"), "b": GroupConfig("u|q")}},
            "up is in optimizer.groups.a and optimizer.groups.b, by their patterns. Set one of these so that",
        ),
    ],
    ids=["no_decay", "pattern", "both"],
)
def test_patterns_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        make_optimizer(config(**changes), SCHEDULE, STEPS, variables(0))


def test_the_average_is_of_the_weights_after_each_update():
    c = config(ema_decay=0.3)
    seen, state = run(c)
    average = {name: np.float64(x[...]) for name, x in variables(0).items()}
    for step, params in enumerate(seen):
        decay = min(0.3, (1 + step) / (10 + step))
        average = {name: decay * average[name] + (1 - decay) * x for name, x in params.items()}
    assert_same([{n: np.float64(x[...]) for n, x in judged(state).items()}], [average])
    plain = run(dataclasses.replace(c, ema_decay=None))
    assert_same(seen, plain[0], 0.0)
    assert judged(plain[1]) is plain[1].trainable


@pytest.mark.long
@pytest.mark.every_dose
def test_the_average_of_bfloat16_weights_is_float32():
    _, state = run(config(ema_decay=0.9), jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(state.opt_state.average)} == {jnp.dtype("float32")}
    assert {x.dtype for x in jax.tree.leaves(judged(state))} == {jnp.dtype("bfloat16")}


@pytest.mark.long
@pytest.mark.parametrize("rule", RULES)
def test_bfloat16_weights_are_near_float32_ones(rule):
    c = config(name=rule, learning_rate=1e-2, momentum=0.7)
    ours, theirs = run(c, jnp.bfloat16)[0], reference(c)
    for name, x in theirs[-1].items():
        np.testing.assert_allclose(ours[-1][name], x, atol=0.05, err_msg=name)


def test_state_has_the_parameters_structure_and_paths():
    assert list(paths(variables(0))) == sorted(LAYOUT)
    state = make_optimizer(config(name="muon"), SCHEDULE, STEPS, variables(0)).init(variables(0))
    assert sum(x.size for x in jax.tree.leaves(state) if x.ndim > 1) == sum(
        math.prod(shape) * (1 if name in ("up", "q", "o") else 2)
        for name, (shape, *_) in LAYOUT.items()
        if name != "norm"
    )


@settings(max_examples=30, deadline=None)
@given(st.floats(-(2.0**127), 2.0**127, width=32), st.integers(0, 2**32 - 1))
def test_a_stochastically_rounded_number_is_a_neighbour(x, seed):
    made = np.float32(stochastic_round(jnp.full(64, x, jnp.float32), jax.random.key(seed)))
    near = np.array([x], np.float32).view(np.uint32) & np.uint32(0xFFFF0000)
    assert {*made.view(np.uint32).tolist()} <= {
        int(near[0]),
        int(near[0]) + (0x10000 if near != np.float32(x).view(np.uint32) else 0),
    }


def test_stochastic_rounding_is_right_on_average_and_keeps_what_is_exact():
    values = np.float32([1.001, -1.001, 3e-5, -7.77e8, 1.0, -0.5, 0.0])
    n = 1 << 16
    made = np.float64(stochastic_round(jnp.tile(values, (n, 1)), jax.random.key(0)))
    step = np.abs(values) * 2**-7  # at least the distance of neighbours
    assert (np.abs(made.mean(0) - values) <= 5 * step / 2 / math.sqrt(n)).all()
    assert (made[:, 4:] == values[4:]).all() and made[:, 0].std() > 1e-3
    odd = np.float32(stochastic_round(jnp.float32([np.inf, -np.inf, np.nan]), jax.random.key(1)))
    np.testing.assert_array_equal(odd, np.float32([np.inf, -np.inf, np.nan]))


def test_small_updates_add_up_only_if_rounded_at_random():
    """512 updates of 1/1000 each: to nearest, none of them changes a 1."""
    stuck = params = nnx.State({"w": nnx.Param(jnp.ones(256, jnp.bfloat16), axes=("norm",))})
    updates = jax.tree.map(lambda p: jnp.full(p.shape, 1e-3, jnp.float32), params)
    add = jax.jit(apply_updates)
    for step in range(512):
        params, stuck = (
            add(params, updates, jax.random.fold_in(jax.random.key(3), step)),
            add(stuck, updates),
        )
    assert (stuck["w"][...] == 1).all()
    assert params["w"].dtype == jnp.bfloat16 and float(
        params["w"][...].astype(jnp.float32).mean()
    ) == pytest.approx(1.512, abs=0.01)


def test_adafactors_moments_are_those_of_float32_also_for_bfloat16_weights():
    """The decay is 1 - t^-0.8: rounded to bfloat16, averages would stay as they are after a
    thousand updates."""
    states = [
        run(config(name="adafactor"), dtype)[1].opt_state for dtype in (jnp.float32, jnp.bfloat16)
    ]
    leaves = [
        [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        for state in states
    ]
    assert len(leaves[0]) > len(LAYOUT)
    for exact, x in zip(*leaves, strict=True):
        assert x.dtype == jnp.float32
        np.testing.assert_array_equal(x, exact)


@pytest.mark.parametrize(
    "clipping",
    [
        {},
        {"clip_norm": 1.0},
        {"clip_value": 0.1},
        {"clip_norm": 1.0, "clip_value": 0.1, "clip_adaptive": 0.1},
    ],
)
@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_it_goes_on_with_the_state_of_an_optimizer_that_clips(name, clipping):
    """Updates layer by layer clip before, and go on with the state of the whole optimizer."""
    params = variables(1)
    rules = config(name=name, **clipping)
    whole, unclipped = (
        make_optimizer(rules, SCHEDULE, STEPS, params, clips=clips) for clips in (True, False)
    )
    state = whole.init(params)
    _, after = unclipped.update(variables(2), state, params)
    assert jax.tree.structure(after) == jax.tree.structure(state)
