"""Loss scaling against a table of what happens when, and in float16, where without it nothing would
be learned."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxtrain.config.schema import LossScaleConfig, PrecisionConfig
from maxtrain.objectives.next_token import next_token
from maxtrain.train_step.loss_scale import LossScale, advance, at_its_end, initial, resolve

pytestmark = pytest.mark.usefixtures("optax_dtypes")
HALF = PrecisionConfig(params="float32", compute="float16")


class RuleTable:
    """The rules, one by one, in plain Python."""

    def __init__(self, config):
        self.config, self.scale, self.row, self.patience = (
            config,
            config.initial,
            0,
            config.hysteresis,
        )

    def step(self, finite):
        c = self.config
        if not finite:
            self.row, self.patience = 0, self.patience - 1
            if self.patience <= 0:
                self.patience, self.scale = 0, max(self.scale * c.backoff, c.min)
        else:
            self.row += 1
            if self.row == c.window:
                self.row, self.patience, self.scale = (
                    0,
                    c.hysteresis,
                    min(self.scale * c.factor, c.max),
                )


@pytest.mark.parametrize(
    "hysteresis, window, factor, backoff", [(2, 5, 2.0, 0.5), (1, 1, 4.0, 0.25), (3, 7, 2.0, 0.125)]
)
def test_two_hundred_random_patterns_of_overflows_go_by_the_table(
    hysteresis, window, factor, backoff
):
    rng = np.random.default_rng(hysteresis)
    config = LossScaleConfig("dynamic", 2.0**10, window, factor, backoff, hysteresis, 0.5, 2.0**14)
    patterns = rng.uniform(size=(200, 120)) < rng.uniform(0.3, 1, (200, 1))

    def run(finite):
        return jax.lax.scan(
            lambda state, f: (new := advance(state, f, config), new), initial(config), finite
        )[1]

    states = jax.jit(jax.vmap(run))(patterns)
    seen = set()
    for pattern, *columns in zip(patterns, *jax.device_get(states)):
        table = RuleTable(config)
        for finite, *ours in zip(pattern, *columns):
            table.step(finite)
            assert ours == [table.scale, table.row, table.patience]
            seen.add(table.scale)
    assert {0.5, 2.0**10, 2.0**14} <= seen  # both ends were reached


def test_static_never_changes_and_auto_is_decided_by_the_compute_type():
    static = LossScaleConfig(mode="static", initial=128.0)
    state = initial(static)
    assert (
        state is not None
        and advance(state, jnp.asarray(False), static) == state
        and at_its_end(state, static)
    )
    auto = LossScaleConfig()
    assert [resolve(auto, dtype) for dtype in ("float32", "bfloat16")] == [None, None] and initial(
        None
    ) is None
    assert resolve(auto, "float16") == dataclasses.replace(auto, mode="dynamic")
    assert resolve(dataclasses.replace(auto, mode="none"), "float16") is None
    assert (auto.initial, auto.window, auto.hysteresis, auto.min, auto.max) == (
        2.0**16,
        1000,
        2,
        1.0,
        2.0**32,
    )


def steps(parts, batches):
    """State and metrics after steps on these batches."""
    with jax.set_mesh(parts.mesh):
        state, metrics = parts.new_state(), []
        for batch in batches:
            state, values = parts.step(state, parts.put(batch))
            metrics.append(values)
    return jax.device_get((state, metrics))


def small(tiny, loss_scale, precision=HALF, shape=(1, 1, 1), **options):
    """A step on a loss so small that its gradients are about 1e-8, and an optimizer that could use
    them."""
    tiny_loss = next_token()._replace(factors={"nll": 1e-7})
    config = dataclasses.replace(tiny.optimizer, eps=1e-20, weight_decay=0.0)
    step = {"loss_scale": loss_scale, **options}
    return tiny.parts(shape, objective=tiny_loss, precision=precision, optimizer=config, step=step)


@pytest.mark.long
def test_gradients_of_1e_8_train_in_float16_only_with_scaling(tiny):
    batches = [tiny.batch()] * tiny.steps
    dynamic = resolve(LossScaleConfig(initial=2.0**24, window=5), "float16")
    state, metrics = steps(small(tiny, dynamic), batches)
    _, unscaled = steps(small(tiny, None), batches)
    _, wanted = steps(small(tiny, None, tiny.precision), batches)
    first, last = metrics[0]["loss"], metrics[-1]["loss"]
    assert last < 0.8 * first and wanted[-1]["loss"] < 0.8 * first
    assert abs(unscaled[-1]["loss"] - first) < 0.1 * (
        first - last
    )  # what flushes to 0 teaches nothing
    assert metrics[0]["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=0.02)
    assert state.control.loss_scale.scale == 2.0**28  # grown four times in 20 steps


@pytest.mark.long
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=["one device", "mesh"])
def test_an_overflow_skips_the_update_bit_for_bit_and_lowers_the_scale(tiny, shape):
    """2 ** 32 is too much for float16 in the first steps: found, skipped, not counted as
    divergence, and then it trains."""
    config = resolve(LossScaleConfig(initial=2.0**32, hysteresis=1), "float16")
    parts = tiny.parts(shape, precision=HALF, step={"loss_scale": config})
    before = jax.device_get(parts.new_state())
    state, metrics = steps(parts, [tiny.batch()] * 24)
    skipped = int(state.control.skipped)
    assert 4 < skipped < 24
    scales = [float(m["loss_scale"]) for m in metrics]
    assert scales[: skipped + 1] == [2.0 ** (32 - i) for i in range(skipped + 1)] and set(
        scales[skipped:]
    ) == {scales[skipped]}
    assert all(m["skipped_in_row"] == 0 for m in metrics) and state.step == 24
    assert not np.isfinite(metrics[0]["grad_norm"]) and metrics[0]["bad_leaf"] >= 0
    assert np.isfinite(metrics[skipped]["grad_norm"]) and metrics[skipped]["bad_leaf"] == -1
    assert (
        len({float(m["learning_rate"]) for m in metrics[: skipped + 1]}) == 1
    )  # the schedule waits
    halfway, _ = steps(parts, [tiny.batch()] * skipped)
    ours_and_theirs = [(state.trainable, state.opt_state) for state in (halfway, before)]
    for ours, theirs in zip(*map(jax.tree.leaves, ours_and_theirs), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()
    assert metrics[-1]["loss"] < metrics[0]["loss"]


@pytest.mark.long
def test_what_no_lower_scale_can_mend_counts_as_divergence(tiny):
    """This covers the lowest scale, a static scale, and a loss that is itself not finite."""
    overflowing = next_token()._replace(factors={"nll": 1e30})
    for config in (
        LossScaleConfig("static", 2.0**20),
        LossScaleConfig("dynamic", 4.0, min=2.0, hysteresis=1),
    ):
        parts = tiny.parts(objective=overflowing, precision=HALF, step={"loss_scale": config})
        _, metrics = steps(parts, [tiny.batch()] * 4)
        expected = [1, 2, 3, 4] if config.mode == "static" else [0, 1, 2, 3]
        assert [int(m["skipped_in_row"]) for m in metrics] == expected


@pytest.mark.long
def test_scaling_up_and_down_again_changes_no_bit(tiny):
    """Multiplying by a power of two is exact, and gradients are linear in the loss. So is a whole
    step, in one program."""
    parts = tiny.parts(step={"loss_scale": LossScaleConfig("static", 2.0**12)}, accumulation=2)
    results = []
    with jax.set_mesh(parts.mesh):
        for scale in (1.0, 2.0**12):
            state = parts.new_state()
            value = jax.device_put(np.float32(scale), state.control.loss_scale.scale.sharding)
            scaled = state.control.loss_scale._replace(scale=value)
            control = state.control._replace(loss_scale=scaled)
            state = dataclasses.replace(state, control=control)
            metrics = {}
            for seed in (0, 1):
                state, metrics = parts.step(state, parts.put(tiny.batch(seed)))
            assert metrics.pop("loss_scale") == scale
            results.append(jax.device_get((state.trainable, state.opt_state, metrics)))
    for ours, theirs in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.asarray(ours).tobytes() == np.asarray(theirs).tobytes()


@pytest.mark.long
def test_a_scaled_step_is_the_float32_step_without_a_scale(tiny):
    """Two programs, whose sums are rounded in different orders: each of n additions by at most 2 **
    -24 of what is summed."""
    scaled = tiny.parts(step={"loss_scale": LossScaleConfig("static", 2.0**12)}, accumulation=2)
    batches = [tiny.batch(), tiny.batch(1)]
    ours, _ = steps(scaled, batches)
    theirs, _ = steps(tiny.parts(accumulation=2), batches)
    additions = (
        tiny.rows * tiny.length * len(batches)
        + tiny.model.vocab_size
        + tiny.model.num_layers * tiny.model.mlp_dim
    )
    for x, y in zip(
        jax.tree.leaves((ours.trainable, ours.opt_state)),
        jax.tree.leaves((theirs.trainable, theirs.opt_state)),
    ):
        assert np.linalg.norm(x - y) <= additions * 2.0**-24 * np.linalg.norm(y)
    assert isinstance(ours.control.loss_scale, LossScale) and theirs.control.loss_scale is None


@pytest.mark.long
def test_gradients_may_be_summed_up_in_bfloat16(tiny):
    """A choice that costs digits: near the float32 sum, and not equal to it."""
    (low, _), (exact, _) = (
        steps(tiny.parts(accumulation=8, step={"accumulate": dtype}), [tiny.batch()])
        for dtype in ("bfloat16", "float32")
    )
    ours, theirs = (
        np.concatenate([np.ravel(x) for x in jax.tree.leaves(s.opt_state) if x.ndim])
        for s in (low, exact)
    )
    assert 1e-4 < np.linalg.norm(ours - theirs) / np.linalg.norm(theirs) < 0.02
